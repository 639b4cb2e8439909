"""Whether learning is unharmed: the arithmetic task in every mode, several seeds each, against synchronous runs.

    make bench NAME=learning ARGS='[--variants A,B] [--seeds 0-4] [--runs DIR] [--out FILE.md]'

Every run is `polyrl train arithmetic` with real processes: a trainer whose devices generate too, and two workers. All
of them start from the same model, which is made once. A run that is done (trained, its ledger verified) is not done
again, so the command may be interrupted and called with a part of the variants or seeds; the page is made of all that
is there.

Rules kept here: no figure of the page is written by hand. Reward is that of the samples that came to the trainer, which
a race chooses; `validation` is not, and is there to be compared. Bands and `+-` are 95% confidence (Student's t) over
seeds; a difference is taken seed by seed.
"""

import argparse
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from polyrl.bench.machine import commit
from polyrl.errors import UserError
from polyrl.telemetry.canvas import GRID, INK, PALE_INK, new_panels, save, set_titles, whole_numbers
from polyrl.telemetry.metrics import MetricValue, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COMMAND = ".venv/bin/python -m benchmarks learning"
BASELINE = "synchronous"
VARIANTS: dict[str, tuple[str, ...]] = {
    BASELINE: ("train.mode=synchronous",),
    "streaming": ("train.mode=streaming",),
    "async-1": ("train.mode=async", "train.max_staleness=1"),
    "async-2": ("train.mode=async", "train.max_staleness=2"),
    "race": ("train.mode=streaming", "rounds.tail_batching=race"),
    "prompts": ("train.mode=streaming", "rounds.tail_batching=prompts"),
    "designated": ("train.mode=streaming", "rounds.tail_batching=designated"),
    "predicted": ("train.mode=streaming", "rounds.tail_batching=predicted"),
    "async-2-prompts": ("train.mode=async", "train.max_staleness=2", "rounds.tail_batching=prompts"),
}
NUM_STEPS = 32
TRAINER_USD, WORKER_USD = 2.0, 0.4
"""An hour. They compare how far a dollar goes, and are not what a laptop costs."""
SETTINGS = (
    "manager.port=0", "fleet.workers=2", "fleet.wait=true", "fleet.settings={ slots = 16, kv_tokens = 8192 }",
    f"train.price_usd_per_hour={TRAINER_USD}", f"fleet.price_usd_per_hour={WORKER_USD}",
    f"train.steps={NUM_STEPS}", "train.min_micro_batch_samples=16", "optimizer.lr=1.5e-4",
    "data.num_prompts=128", "data.prompts_per_step=16", "rounds.samples_per_prompt=8",  # an epoch is 8 steps
    "validation.every_steps=8", "validation.num_prompts=64", "seeding.initial_s=0.5", "seeding.max_step_s=0.5",
    "checkpoint.enabled=false",
)  # fmt: skip
ENOUGH = 0.7
"""The reward whose reaching is timed."""
LAST_STEPS = 8
"""An epoch: their mean reward is the reward at the end."""
ATTEMPTS = 2
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t, 97.5%, by degrees of freedom from 1 on."""
OUTCOME = "outcome.json"
INCLUSION = "bias/inclusion_by_bin/"
SHORT_BIN, LONG_BIN = 3, 6


class Curve(NamedTuple):
    """The figures of one run that are compared; one number a step."""

    reward: list[float]
    seconds: list[float]
    """Of steps, up to the end of each; without start and validation."""
    cents: list[float]
    """Those seconds at the price of trainer and workers that were there."""
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


# Runs


def make_model(folder: Path) -> Path:
    """The model that all runs start from, made once."""
    model = folder / "model"
    if not model.is_dir():
        print("the model that all runs start from is made", flush=True)
        half = folder / ".model"
        shutil.rmtree(half, ignore_errors=True)
        code, log = call(("data", "model", "arithmetic", "--out", str(half)), folder / "model.log", 900.0)
        if code != 0:
            raise UserError(f"the model could not be made; see {log}")
        half.rename(model)
    return model


def play(variant: str, seed: int, runs: Path, model: Path, timeout_s: float) -> str | None:
    """Do a run unless it is done. Returns what went wrong."""
    folder = runs / variant / f"seed-{seed}"
    settings = settings_of(variant, seed, model)
    if is_done(folder, settings):
        return None
    wrong = ""
    for attempt in range(ATTEMPTS):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        began = time.monotonic()
        code, log = call(
            ("train", "arithmetic", *settings, "--run-dir", str(folder / "run"), "--quiet"),
            folder / "train.log",
            timeout_s,
        )
        wall_s = time.monotonic() - began
        if code == 0:
            code, log = call(("ledger", str(folder / "run"), "--verify"), folder / "ledger.log", timeout_s)
        if code == 0:
            outcome = {"settings": settings, "wall_s": wall_s, "commit": commit(), "machine": machine()}
            (folder / OUTCOME).write_text(json.dumps(outcome, indent=1))
            print(f"{variant} seed {seed}: done in {wall_s:.0f} s, ledger verified", flush=True)
            return None
        wrong = f"{variant} seed {seed}: {'took too long' if code is None else f'exit code {code}'}; see {log}"
        print(f"{wrong}{'; once more' if attempt + 1 < ATTEMPTS else ''}", flush=True)
    return wrong


def settings_of(variant: str, seed: int, model: Path) -> tuple[str, ...]:
    return (*SETTINGS, *VARIANTS[variant], f"train.seed={seed}", f"model.path={model}")


def is_done(folder: Path, settings: Sequence[str]) -> bool:
    path = folder / OUTCOME
    return path.is_file() and json.loads(path.read_text())["settings"] == list(settings)


def call(arguments: Sequence[str], log: Path, timeout_s: float) -> tuple[int | None, Path]:
    """`polyrl` as a process of its own, out of others' way. Its exit code, None if it took too long; and its log."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            ("nice", "-n", "5", sys.executable, "-m", "polyrl", *arguments),
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            return process.wait(timeout_s), log
        except subprocess.TimeoutExpired:
            return None, log
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
    validation = {
        int(number(line, "step")): number(line, "validation/pass@1") for line in lines if "validation/pass@1" in line
    }
    step_s = [number(line, "time/step_total") for line in steps]
    prices = [TRAINER_USD + WORKER_USD * number(line, "fleet/workers") for line in steps]
    kept = sum(number(line, "tokens/kept") for line in steps)
    lost = sum(number(line, name) for line in steps for name in line if name.startswith("tokens/discarded/"))
    return Curve(
        reward=[number(line, "reward/mean") for line in steps],
        seconds=np.cumsum(step_s).tolist(),
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
    )


def number(line: dict[str, MetricValue], name: str) -> float:
    value = line.get(name, 0.0)
    if not isinstance(value, int | float):
        raise UserError(f"step {line.get('step')}: {name} is {value!r}, expected a number")
    return float(value)


def read_all(runs: Path, model: Path) -> dict[str, dict[int, Curve]]:
    """All runs that are done, by variant and seed; those of other settings are not."""
    found: dict[str, dict[int, Curve]] = {}
    for variant in VARIANTS:
        seeds = sorted(int(one.name.partition("-")[2]) for one in (runs / variant).glob("seed-*"))
        folders = {seed: runs / variant / f"seed-{seed}" for seed in seeds}
        curves = {
            seed: read_curve(folder)
            for seed, folder in folders.items()
            if is_done(folder, settings_of(variant, seed, model))
        }
        if curves:
            found[variant] = curves
    return found


def at_end(curve: Curve) -> float:
    return fmean(curve.reward[-LAST_STEPS:])


def last_validation(curve: Curve) -> float:
    return curve.validation[max(curve.validation)]


def first_enough(curve: Curve, axis: Sequence[float]) -> float | None:
    """Where on the axis the mean reward of three steps has reached ENOUGH; None: nowhere."""
    for step in range(2, len(curve.reward)):
        if fmean(curve.reward[step - 2 : step + 1]) >= ENOUGH:
            return axis[step]
    return None


def spread(numbers: Sequence[float]) -> float:
    """Half of the confidence interval of their mean; not a number for a single one."""
    if len(numbers) < 2:
        return math.nan
    return T_95[len(numbers) - 2] * stdev(numbers) / math.sqrt(len(numbers))


# The page


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


def learned(found: dict[str, dict[int, Curve]]) -> list[list[str]]:
    base = found.get(BASELINE, {})
    rows = [["", "seeds", f"reward, last {LAST_STEPS} steps", "against synchronous", "validation at the end",
             "against synchronous", ""]]  # fmt: skip
    for name, curves in found.items():
        every = list(curves.values())
        rewards, checks = differences(curves, base, at_end), differences(curves, base, last_validation)
        compared = name != BASELINE and bool(rewards)
        rows.append([
            name, str(len(every)),
            show([at_end(one) for one in every]), show(rewards, sign="+") if compared else "",
            show([last_validation(one) for one in every]), show(checks, sign="+") if compared else "",
            verdict(checks) if compared else "",
        ])  # fmt: skip
    return rows


NOTHING_TO_COMPARE = (
    f"nothing to compare; that takes a run of `{BASELINE}` and one of another variant, of the same seed"
)


def in_short(found: dict[str, dict[int, Curve]]) -> str:
    """Which variants are judged how, by validation at the end."""
    judged: dict[str, list[str]] = {}
    for row in learned(found)[1:]:
        if row[-1]:
            judged.setdefault(row[-1], []).append(row[0])
    said = "; ".join(f"{what}: {', '.join(names)}" for what, names in judged.items())
    return f"**In short**, against synchronous runs, by validation at the end: {said or NOTHING_TO_COMPARE}."


def paid(found: dict[str, dict[int, Curve]]) -> list[list[str]]:
    rows = [["", "seconds a step", f"seconds to reward {ENOUGH:g}", f"cents to reward {ENOUGH:g}",
             f"steps to reward {ENOUGH:g}", "tokens discarded"]]  # fmt: skip
    for name, curves in found.items():
        every = list(curves.values())
        rows.append([
            name, show([one.seconds[-1] / len(one.seconds) for one in every], ".2f"),
            show([first_enough(one, one.seconds) for one in every], ".1f"),
            show([first_enough(one, one.cents) for one in every], ".2f"),
            show([first_enough(one, list(range(1, len(one.reward) + 1))) for one in every], ".1f"),
            f"{fmean(one.discarded for one in every):.1%}",
        ])  # fmt: skip
    return rows


def biased(found: dict[str, dict[int, Curve]]) -> list[list[str]]:
    base = found.get(BASELINE, {})
    rows = [["", "length trained", "against synchronous", "against all that ended", "trained of 4-7 tokens",
             "of 32-63 tokens", "long rounds", "mean age of tokens", "oldest", "of two versions"]]  # fmt: skip
    for name, curves in found.items():
        every = list(curves.values())
        rows.append([
            name, show([one.length for one in every], ".2f"),
            show([one.length / base[seed].length for seed, one in curves.items() if seed in base]),
            show([one.length / one.ended_length for one in every]),
            *(show([one.inclusion.get(b) for one in every], ".2f") for b in (SHORT_BIN, LONG_BIN)),
            f"{fmean(one.long_rounds for one in every):.0%}",
            show([one.staleness for one in every], ".2f"), f"{max(one.max_staleness for one in every):.0f}",
            f"{fmean(one.mixed for one in every):.1%}",
        ])  # fmt: skip
    return rows


def as_markdown(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def machine() -> str:
    path = Path("/proc/cpuinfo")
    models = [line.split(":", 1)[1].strip() for line in path.read_text().splitlines() if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


ABOUT = """\
The arithmetic task (a model of 90,000 parameters that mostly guesses has to find patience) in every mode and with
every kind of tail batching, against synchronous runs. Real processes: a manager, a trainer whose devices generate
too, and two workers. The page is written by the command below."""
HOW_TO_READ = """\
**How to read it.** `+-` and bands are 95% confidence over seeds; differences are taken seed by seed. A reward is that
of the samples that came to the trainer: where samples race, the race chooses them, and it says little about the
policy; in async runs it is that of the older policies which wrote them. Validation, on problems that are never
trained on, does not depend on the mode. Seconds and dollars are those of steps, without start and validation, and all
processes share the cores of one machine: nobody has idle devices to gain from here. What overlap is worth to a fleet
is [simulated](../concepts/rounds.md#staleness)."""
ABOUT_BIAS = """\
Answers that a race ends early never end by themselves, so that what a race does to lengths shows against synchronous
runs. Of answers that ended, those whose groups came too late, or that were extra, are not trained.
`predicted` knows nothing before the second epoch, which begins with step 8."""


def page(found: dict[str, dict[int, Curve]], origin: str, pictures: Sequence[str]) -> str:
    variants = [["variant", "settings"], *([name, f"`{' '.join(VARIANTS[name])}`"] for name in found)]
    parts = [
        "# What every mode learns",
        ABOUT,
        origin,
        in_short(found),
        HOW_TO_READ,
        "## What was learned",
        as_markdown(learned(found)),
        f"![reward over steps]({pictures[0]})",
        "## What it took",
        as_markdown(paid(found)),
        f"![reward over seconds and dollars]({pictures[1]})",
        "## What was trained on",
        as_markdown(biased(found)),
        ABOUT_BIAS,
        "## Every run",
        f"`polyrl train arithmetic {' '.join(SETTINGS)} train.seed=N`, and:",
        as_markdown(variants),
    ]
    return "\n\n".join(parts) + "\n"


# Pictures

_COLOURS = ("#d55e00", "#3a86c8", "#009e73", "#cc79a7", "#c9b400", "#7a4fa3", "#8c564b", "#e0218a")
_COLUMNS = 4
SMOOTH = 4


def draw_steps(found: dict[str, dict[int, Curve]], path: Path) -> None:
    """A panel a variant, each with the synchronous runs behind it."""
    from matplotlib.figure import Figure

    others = [name for name in found if name != BASELINE] or [BASELINE]
    num_rows = math.ceil(len(others) / _COLUMNS)
    figure = Figure(figsize=(13.0, 3.1 * num_rows + 0.6), layout="constrained")
    grid = figure.subplots(num_rows, _COLUMNS, sharex=True, sharey=True, squeeze=False)
    for place, axes in enumerate(grid.flat):
        if place >= len(others):
            axes.set_visible(False)
            continue
        name = others[place]
        if BASELINE in found and name != BASELINE:
            band(axes, over_steps(found[BASELINE]), PALE_INK, BASELINE)
        band(axes, over_steps(found[name]), _COLOURS[place % len(_COLOURS)], name)
        checks(axes, found[name], _COLOURS[place % len(_COLOURS)])
        plain(axes)
        whole_numbers(axes)
        axes.set_title(name, loc="left", fontsize=11, fontweight="bold", color=INK)
    figure.supxlabel("step", fontsize=10, color=INK)
    figure.supylabel("reward", fontsize=10, color=INK)
    about = "lines: reward, with its 95% band (grey: synchronous runs); dots: validation pass@1"
    figure.suptitle(about, x=0.01, ha="left", fontsize=10, color=PALE_INK)
    save(figure, path)


def draw_cost(found: dict[str, dict[int, Curve]], path: Path) -> None:
    figure, panels = new_panels(13.0, 4.6, 2)
    for axes, what, about in zip(panels, ("seconds", "cents"), ("seconds of steps", "cents"), strict=True):
        for place, (name, curves) in enumerate(found.items()):
            colour = PALE_INK if name == BASELINE else _COLOURS[(place - 1) % len(_COLOURS)]
            band(axes, over(curves, what), colour, name if what == "seconds" else None, alpha=0.08)
        plain(axes)
        set_titles(
            axes, f"Reward over {about}", f"running mean of {SMOOTH} steps, mean over seeds, 95% band", about, "reward"
        )
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    save(figure, path)


def plain(axes: "Axes") -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(visible=True, color=GRID, linewidth=0.8)
    axes.set_ylim(0.0, 1.02)


class Band(NamedTuple):
    x: Sequence[float]
    mean: "np.ndarray[Any, Any]"
    half: "np.ndarray[Any, Any]"


def over_steps(curves: dict[int, Curve]) -> Band:
    num = min(len(one.reward) for one in curves.values())
    return _banded(range(num), [one.reward[:num] for one in curves.values()])


def over(curves: dict[int, Curve], axis: str) -> Band:
    """On a common axis, from where all have a reward to where the first one ends."""
    axes = [getattr(one, axis) for one in curves.values()]
    x = np.linspace(max(one[0] for one in axes), min(one[-1] for one in axes), 100)
    rows = [np.interp(x, its, running_mean(one.reward)) for its, one in zip(axes, curves.values(), strict=True)]
    return _banded(x.tolist(), rows)


def running_mean(numbers: Sequence[float]) -> list[float]:
    return [fmean(numbers[max(0, end - SMOOTH) : end]) for end in range(1, len(numbers) + 1)]


def _banded(x: Sequence[float], rows: Sequence[Any]) -> Band:
    numbers = np.array(rows)
    half = np.array([spread(column) for column in numbers.T.tolist()])
    return Band(x, numbers.mean(axis=0), half)


def band(axes: "Axes", one: Band, colour: str, name: str | None, alpha: float = 0.18) -> None:
    axes.plot(one.x, one.mean, color=colour, linewidth=1.6, label=name)
    if np.isfinite(one.half).all():
        axes.fill_between(one.x, one.mean - one.half, one.mean + one.half, color=colour, alpha=alpha, linewidth=0)


def checks(axes: "Axes", curves: dict[int, Curve], colour: str) -> None:
    versions = sorted(set[int]().union(*(one.validation for one in curves.values())))
    rows = [[one.validation[version] for one in curves.values() if version in one.validation] for version in versions]
    halves = [0.0 if math.isnan(half := spread(row)) else half for row in rows]
    axes.errorbar(versions, [fmean(row) for row in rows], halves, fmt="o", markersize=4, color=colour, elinewidth=1)


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


def parse_variants(text: str | None) -> list[str]:
    if text is None:
        return list(VARIANTS)
    names = text.split(",")
    for name in names:
        if name not in VARIANTS:
            raise UserError(f"--variants: no variant {name!r}; expected some of {', '.join(VARIANTS)}")
    return names


def write(found: dict[str, dict[int, Curve]], runs: Path, out: Path | None, command: str) -> None:
    outcomes = [
        json.loads((runs / variant / f"seed-{seed}" / OUTCOME).read_text())
        for variant, curves in found.items()
        for seed in curves
    ]
    origin = "\n".join(
        f"- {line}"
        for line in (
            f"command: `{command}`; {len(outcomes)} runs of {fmean(one['wall_s'] for one in outcomes):.0f} s each",
            f"commit: {', '.join(sorted({str(one['commit']) for one in outcomes}))}",
            f"machine: {', '.join(sorted({one['machine'] for one in outcomes}))}",
            f"date: {time.strftime('%Y-%m-%d')}",
        )
    )
    folder = runs if out is None else out.parent
    folder.mkdir(parents=True, exist_ok=True)
    pictures = ("learning.png", "learning-cost.png")
    draw_steps(found, folder / pictures[0])
    draw_cost(found, folder / pictures[1])
    text = page(found, origin, pictures)
    (runs / "learning.md" if out is None else out).write_text(text, encoding="utf-8")
    for rows in (learned(found), paid(found), biased(found)):
        print("\n" + as_markdown(rows))
    print("\n" + in_short(found))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description="Reward over steps, seconds and dollars of every mode, against synchronous runs.",
        epilog="about 45 runs of half a minute; `--variants synchronous,streaming --seeds 0-1` is a taste of it",
    )
    parser.add_argument("--variants", metavar="A,B", help=f"of {', '.join(VARIANTS)} (default: all)")
    parser.add_argument("--seeds", default="0-4", metavar="LIST", help="0-4 or 0,2 (default: %(default)s)")
    parser.add_argument("--runs", default="out/learning", metavar="DIR", help="runs go here (default: %(default)s)")
    parser.add_argument(
        "--out", metavar="FILE.md", help="write the page there, pictures beside it (default: in --runs)"
    )
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="for one run (default: %(default)g)")
    args = parser.parse_args(arguments)
    variants, seeds = parse_variants(args.variants), parse_seeds(args.seeds)
    runs = Path(args.runs).resolve()
    runs.mkdir(parents=True, exist_ok=True)
    model = make_model(runs)
    wrong = [
        what
        for seed in seeds  # seed by seed, so that an interrupted command has something of every variant
        for variant in variants
        if (what := play(variant, seed, runs, model, args.timeout)) is not None
    ]
    found = read_all(runs, model)
    if not found:
        raise UserError(f"{runs}: no run is done")
    write(found, runs, None if args.out is None else Path(args.out), " ".join([COMMAND, *arguments]))
    for what in wrong:
        print(what, file=sys.stderr)
    return 1 if wrong else 0
