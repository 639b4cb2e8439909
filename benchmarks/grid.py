"""Runs that differ in one setting each, several seeds of each: done, read, and compared seed by seed.

learning.py and time_to_reward.py make their pages of them, arithmetic's of the same runs.

Rules kept here: every run has real processes, starts from the same model, and has its ledger verified. A run that is
done is not done again, so a command may be interrupted, or called with a part of the variants or seeds. Several at once
have cores of their own. Bands and `+-` are 95% confidence (Student's t) over seeds.
"""

import json
import math
import os
import platform
import queue
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from polyrl.bench.machine import commit, cpu
from polyrl.errors import UserError
from polyrl.telemetry.canvas import GRID
from polyrl.telemetry.metrics import MetricValue, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BASELINE = "synchronous"
TRAINER_USD, WORKER_USD = 2.0, 0.4
"""An hour. They compare how far a dollar goes, and are not what a laptop costs."""
ATTEMPTS = 2
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t, 97.5%, by degrees of freedom from 1 on."""
OUTCOME = "outcome.json"
INCLUSION = "bias/inclusion_by_bin/"
ACCURACY = "validation/pass@1"
SMOOTH = 4
COLOURS = ("#d55e00", "#3a86c8", "#009e73", "#cc79a7", "#c9b400", "#7a4fa3", "#8c564b", "#e0218a", "#222222", "#66a61e")


_PLACES = ("model.path=", "data.source=", "data.validation=")


class Grid(NamedTuple):
    recipe: str
    settings: tuple[str, ...]
    """Of all runs."""
    variants: Mapping[str, tuple[str, ...]]
    """Beside those, by name; the first is what others are compared with."""


_ENGINE = "fleet.settings={{ slots = 16, kv_tokens = 8192, speculation = '{}' }}"
_SPECULATION = _ENGINE.format("auto")
ARITHMETIC = Grid(
    "arithmetic",
    (
        "manager.port=0", "fleet.workers=2", "fleet.wait=true", _ENGINE.format("off"),
        f"train.price_usd_per_hour={TRAINER_USD}", f"fleet.price_usd_per_hour={WORKER_USD}",
        "train.steps=32", "train.min_micro_batch_samples=16", "optimizer.lr=1.5e-4",
        "data.num_prompts=128", "data.prompts_per_step=16", "rounds.samples_per_prompt=8",  # an epoch is 8 steps
        "validation.every_steps=4", "validation.num_prompts=128", "seeding.initial_s=0.5", "seeding.max_step_s=0.5",
        "checkpoint.enabled=false",
    ),
    {
        BASELINE: ("train.mode=synchronous",),
        "streaming": ("train.mode=streaming",),
        "async-1": ("train.mode=async", "train.max_staleness=1"),
        "async-2": ("train.mode=async", "train.max_staleness=2"),
        "async-4": ("train.mode=async", "train.max_staleness=4"),
        "race": ("train.mode=streaming", "rounds.tail_batching=race"),
        "prompts": ("train.mode=streaming", "rounds.tail_batching=prompts"),
        "designated": ("train.mode=streaming", "rounds.tail_batching=designated"),
        "predicted": ("train.mode=streaming", "rounds.tail_batching=predicted"),
        "speculation": ("train.mode=streaming", _SPECULATION),
        "together": ("train.mode=async", "train.max_staleness=2", "rounds.tail_batching=prompts", _SPECULATION),
    },
)  # fmt: skip
_LAG_8 = ("train.mode=async", "train.max_staleness=8")
_SCALED = "algorithm.scale_lr_by_sample_size=true"
STALE = Grid(
    "arithmetic",
    (*ARITHMETIC.settings, "optimizer.lr=6e-4"),
    {
        BASELINE: ("train.mode=synchronous",),
        "lag-8": _LAG_8,
        "guard-8": (*_LAG_8, "train.min_sample_size=0.8", "train.max_norm_growth=5"),
        "scaled-8": (*_LAG_8, _SCALED),
        "vcpo-8": (
            *_LAG_8, _SCALED, "algorithm.baseline=optimal", "algorithm.correction=tis-sequence",
            "algorithm.correction_high=8",
        ),
        "tis-8": (*_LAG_8, "algorithm.correction=tis-sequence", "algorithm.correction_high=8"),
    },
)  # fmt: skip
"""Weights that are eight versions behind, at four times the learning rate: what guards are for."""


class Curve(NamedTuple):
    """The figures of one run that are compared; one number a step."""

    reward: list[float]
    seconds: list[float]
    """Of steps, up to the end of each; without start and validation."""
    cents: list[float]
    """Those seconds at the price of trainer and workers that were there."""
    tokens: list[float]
    """Generated up to the end of each, whether they were trained or not."""
    validation: dict[int, float]
    """pass@1 by version."""
    length: float
    """Of answers trained, the mean of the steps' means."""
    ended_length: float
    """Of all answers that ended by themselves, whether they were trained or not."""
    inclusion: dict[int, float]
    """Of those, the share that was trained, by length: bin b holds 2^(b-1) to 2^b - 1 tokens."""
    discarded: float
    """Of all tokens."""
    staleness: float
    max_staleness: float
    mixed: float
    long_rounds: float
    drafted: float
    """Tokens that drafts foresaw, of all."""


# Runs


def make_model(folder: Path) -> Path:
    """The model that all runs start from, made once."""
    model = folder / "model"
    if not model.is_dir():
        print("the model that all runs start from is made", flush=True)
        half = folder / ".model"
        shutil.rmtree(half, ignore_errors=True)
        log = folder / "model.log"
        code = call(polyrl("data", "model", "arithmetic", "--out", str(half)), log, 900.0, all_cores())
        if code != 0:
            raise UserError(f"the model could not be made; see {log}")
        half.rename(model)
    return model


def all_cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def play_all(runs: Sequence[Callable[[Sequence[int]], str | None]], cores: Sequence[int], cores_each: int) -> list[str]:
    """As many at once as the cores are enough for, each called with its own. Returns what went wrong."""
    places: queue.SimpleQueue[Sequence[int]] = queue.SimpleQueue()
    num = max(1, len(cores) // cores_each)
    for place in range(num):
        places.put(cores[place * cores_each : (place + 1) * cores_each])

    def one(play: Callable[[Sequence[int]], str | None]) -> str | None:
        mine = places.get()
        try:
            return play(mine)
        finally:
            places.put(mine)

    with ThreadPoolExecutor(num) as pool:
        return [wrong for wrong in pool.map(one, runs) if wrong is not None]


def play(
    grid: Grid, variant: str, seed: int, runs: Path, model: Path, timeout_s: float, cores: Sequence[int]
) -> str | None:
    """Do a run unless it is done. Returns what went wrong."""
    folder = runs / variant / f"seed-{seed}"
    settings = settings_of(grid, variant, seed, model)
    if is_done(folder, settings):
        return None
    wrong = ""
    for attempt in range(ATTEMPTS):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        began = time.monotonic()
        train = ("train", grid.recipe, *settings, "--run-dir", str(folder / "run"), "--quiet")
        code = call(polyrl(*train), folder / "train.log", timeout_s, cores)
        wall_s = time.monotonic() - began
        if code == 0:
            verify = polyrl("ledger", str(folder / "run"), "--verify")
            code = call(verify, folder / "ledger.log", timeout_s, cores)
        if code == 0:
            finish(folder, settings, wall_s)
            print(f"{variant} seed {seed}: done in {wall_s:.0f} s, ledger verified", flush=True)
            return None
        wrong = f"{variant} seed {seed}: {'took too long' if code is None else f'exit code {code}'}; see {folder}"
        print(f"{wrong}{'; once more' if attempt + 1 < ATTEMPTS else ''}", flush=True)
    return wrong


def finish(folder: Path, settings: Sequence[str], wall_s: float) -> None:
    outcome = {"settings": list(settings), "wall_s": wall_s, "commit": commit(), "machine": machine()}
    (folder / OUTCOME).write_text(json.dumps(outcome, indent=1))


def settings_of(grid: Grid, variant: str, seed: int, model: Path) -> tuple[str, ...]:
    return (*grid.settings, *grid.variants[variant], f"train.seed={seed}", f"model.path={model}")


def is_done(folder: Path, settings: Sequence[str]) -> bool:
    """Whether it ran with these settings; where the model lies does not matter."""
    path = folder / OUTCOME
    if not path.is_file():
        return False
    return _without_places(json.loads(path.read_text())["settings"]) == _without_places(settings)


def _without_places(settings: Sequence[str]) -> list[str]:
    return [one for one in settings if not one.startswith(_PLACES)]


def polyrl(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "polyrl", *arguments]


def call(command: Sequence[str], log: Path, timeout_s: float, cores: Sequence[int]) -> int | None:
    """A process on these cores, with a thread a process. Its exit code, None if it took too long."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            ("nice", "-n", "5", "taskset", "-c", ",".join(map(str, cores)), *command),
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,
        )
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end(process)


def end(process: "subprocess.Popen[bytes]") -> None:
    """In good order, or at once; with all that it started."""
    for number, patience_s in ((signal.SIGINT, 20.0), (signal.SIGKILL, 5.0)):
        if process.poll() is None:
            os.killpg(process.pid, number)
            try:
                process.wait(patience_s)
            except subprocess.TimeoutExpired:
                continue


# What they say


def read_curve(folder: Path) -> Curve:
    lines = read_metrics(folder / "run" / "metrics.jsonl")
    steps = [line for line in lines if line.get("reward/mean") is not None]
    validation = {int(number(line, "step")): number(line, ACCURACY) for line in lines if ACCURACY in line}
    step_s = [number(line, "time/step_total") for line in steps]
    prices = [TRAINER_USD + WORKER_USD * number(line, "fleet/workers") for line in steps]
    kept = sum(number(line, "tokens/kept") for line in steps)
    lost = sum(map(discarded, steps))
    return Curve(
        reward=[number(line, "reward/mean") for line in steps],
        seconds=np.cumsum(step_s).tolist(),
        tokens=np.cumsum([number(line, "tokens/kept") + discarded(line) for line in steps]).tolist(),
        cents=np.cumsum([s * usd / 36 for s, usd in zip(step_s, prices, strict=True)]).tolist(),
        validation=validation,
        length=fmean(number(line, "bias/trained_mean_length") for line in steps),
        ended_length=fmean(number(line, "bias/generated_mean_length") for line in steps),
        inclusion={
            int(name.removeprefix(INCLUSION)): number(steps[-1], name)
            for name in steps[-1]
            if name.startswith(INCLUSION)
        },
        discarded=lost / (kept + lost),
        staleness=fmean(number(line, "staleness/mean") for line in steps),
        max_staleness=max(number(line, "staleness/max") for line in steps),
        mixed=fmean(number(line, "staleness/mixed_samples") for line in steps),
        long_rounds=fmean(number(line, "rounds/long") for line in steps),
        drafted=sum(number(line, "fleet/accepted_tokens") for line in steps) / (kept + lost),
    )


def discarded(line: dict[str, MetricValue]) -> float:
    return sum(number(line, name) for name in line if name.startswith("tokens/discarded/"))


def number(line: dict[str, MetricValue], name: str) -> float:
    value = line.get(name, 0.0)
    if not isinstance(value, int | float):
        raise UserError(f"step {line.get('step')}: {name} is {value!r}, expected a number")
    return float(value)


def read_all(grid: Grid, runs: Path, model: Path) -> dict[str, dict[int, Curve]]:
    """All runs that are done, by variant and seed; those of other settings are not."""
    found: dict[str, dict[int, Curve]] = {}
    for variant in grid.variants:
        folders = {seed: runs / variant / f"seed-{seed}" for seed in seeds_in(runs / variant)}
        curves = {
            seed: read_curve(folder)
            for seed, folder in folders.items()
            if is_done(folder, settings_of(grid, variant, seed, model))
        }
        if curves:
            found[variant] = curves
    return found


def seeds_in(folder: Path) -> list[int]:
    return sorted(int(one.name.partition("-")[2]) for one in folder.glob("seed-*"))


def last_validation(curve: Curve) -> float:
    return curve.validation[max(curve.validation)]


def spread(numbers: Sequence[float]) -> float:
    """Half of the confidence interval of their mean; not a number for a single one."""
    if len(numbers) < 2:
        return math.nan
    return T_95[len(numbers) - 2] * stdev(numbers) / math.sqrt(len(numbers))


# Tables and lines


def show(numbers: Sequence[float | None], shape: str = ".3f", sign: str = "") -> str:
    """Their mean and its confidence; how many have no number."""
    known = [one for one in numbers if one is not None]
    if not known:
        return "-"
    text = f"{fmean(known):{sign}{shape}}"
    if len(known) > 1:
        text += f" +- {spread(known):{shape}}"
    missing = len(numbers) - len(known)
    return f"{text} ({missing} never)" if missing else text


def differences(curves: dict[int, Curve], base: dict[int, Curve], value: Callable[[Curve], float]) -> list[float]:
    return [value(curves[seed]) - value(base[seed]) for seed in curves if seed in base]


def verdict(numbers: Sequence[float]) -> str:
    if len(numbers) < 2:
        return "one seed tells nothing"
    if abs(fmean(numbers)) <= spread(numbers):
        return "within noise"
    return "better" if fmean(numbers) > 0 else "worse"


def as_markdown(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def machine() -> str:
    return f"{cpu()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def origin(outcomes: Sequence[dict[str, Any]], command: str) -> str:
    """Where figures come from, as a list."""
    return "\n".join(
        f"- {line}"
        for line in (
            f"command: `{command}`; {len(outcomes)} runs of {fmean(one['wall_s'] for one in outcomes):.0f} s each",
            f"commit: {', '.join(sorted({str(one['commit']) for one in outcomes}))}",
            f"machine: {', '.join(sorted({one['machine'] for one in outcomes}))}",
            f"date: {time.strftime('%Y-%m-%d')}",
        )
    )


def outcomes_of(found: Mapping[str, Mapping[int, object]], runs: Path) -> list[dict[str, Any]]:
    folders = [runs / variant / f"seed-{seed}" for variant, curves in found.items() for seed in curves]
    return [json.loads((folder / OUTCOME).read_text()) for folder in folders]


def plain(axes: "Axes") -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(visible=True, color=GRID, linewidth=0.8)
    axes.set_ylim(0.0, 1.02)


class Band(NamedTuple):
    x: Sequence[float]
    mean: "np.ndarray[Any, Any]"
    half: "np.ndarray[Any, Any]"


def banded(x: Sequence[float], rows: Sequence[Any]) -> Band:
    numbers = np.array(rows)
    half = np.array([spread(column) for column in numbers.T.tolist()])
    return Band(x, numbers.mean(axis=0), half)


def band(axes: "Axes", one: Band, colour: str, name: str | None, alpha: float = 0.18) -> None:
    axes.plot(one.x, one.mean, color=colour, linewidth=1.6, label=name)
    if np.isfinite(one.half).all():
        axes.fill_between(one.x, one.mean - one.half, one.mean + one.half, color=colour, alpha=alpha, linewidth=0)


# The command


def parse_seeds(text: str) -> list[int]:
    try:
        first, dash, last = text.partition("-")
        seeds = list(range(int(first), int(last) + 1)) if dash else [int(one) for one in text.split(",")]
    except ValueError as error:
        raise UserError(f"--seeds: got {text!r}, expected 0-4 or 0,2") from error
    if not 1 <= len(set(seeds)) <= len(T_95) + 1 or min(seeds) < 0:
        raise UserError(f"--seeds: got {text!r}, expected one to {len(T_95) + 1} numbers >= 0")
    return seeds


def parse_variants(text: str | None, known: Sequence[str]) -> list[str]:
    if text is None:
        return list(known)
    names = text.split(",")
    for name in names:
        if name not in known:
            raise UserError(f"--variants: no variant {name!r}; expected some of {', '.join(known)}")
    return names
