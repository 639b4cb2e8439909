"""Seconds, tokens and dollars to the same validation accuracy: every mode, beside TRL's GRPOTrainer.

    make bench NAME=time_to_reward ARGS='arithmetic [--seeds 0-4] [--variants A,B] [--runs DIR] [--trl PYTHON]'
    make bench NAME=time_to_reward ARGS='chain-sum --model MODEL_DIR [...]'     SmolLM2 on a GPU
    make bench NAME=time_to_reward ARGS='page docs/results/time-to-reward.md'   of all runs that are there

Arithmetic's runs are those of learning.py: a trainer and two workers, on three cores. `alone` is a trainer on one core
that generates by itself, as TRL's does. `chain-sum` is the data set of reasoning-gym, its trainer alone on the GPU.

Rules kept here: TRL has the same model, training and validation rows, reward, group size, prompts a step, optimizer and
learning rate. Accuracy is that on validation rows, read between two validations along a straight line. Validation and
start count for nobody. Figures of the page are those of the runs; what somebody wrote above them is kept.
"""

import argparse
import json
import random
import shutil
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks import grid
from benchmarks.grid import ARITHMETIC, BASELINE, TRAINER_USD, Curve, Grid
from polyrl.config.recipe import ArithmeticTask
from polyrl.data.arithmetic import draw_problem
from polyrl.errors import UserError
from polyrl.telemetry.canvas import PALE_INK, new_panels, save, set_titles

COMMAND = ".venv/bin/python -m benchmarks time_to_reward"
TRL, ALONE = "TRL", "alone"
AXES = ("seconds", "tokens", "cents")
ROWS = ("train", "validation")


class Contest(NamedTuple):
    grid: Grid
    target: float
    """The accuracy whose reaching is timed."""
    cores_each: int
    trl: Mapping[str, Any]
    """What trl_grpo.py is given, beside model, rows and seed."""
    alone: tuple[str, ...] = ()
    """Variants of one process, which get a core: beside TRL, which is one."""
    has_rows: bool = False
    """Whether its rows are files, `train.jsonl` and `validation.jsonl` beside the runs."""


_ALONE = Grid(
    ARITHMETIC.recipe, ARITHMETIC.settings, {ALONE: ("train.mode=streaming", "fleet.workers=0", "fleet.wait=false")}
)
_CHAIN_SUM = Grid(
    "smollm2-arithmetic",
    (
        "manager.port=0", f"train.price_usd_per_hour={TRAINER_USD}", "train.steps=40", "data.prompts_per_step=16",
        "rounds.samples_per_prompt=16", "rollout.max_new_tokens=48", "optimizer.lr=1e-5", "data.prompt_key=question",
        "data.template={prompt}", "data.reward=arithmetic", "validation.every_steps=5", "validation.num_prompts=200",
        "checkpoint.enabled=false", "algorithm.zero_variance=keep",
    ),
    {name: ARITHMETIC.variants[name] for name in (BASELINE, "streaming", "async-1", "race", "prompts", "designated")},
)  # fmt: skip
CONTESTS: Mapping[str, Contest] = {
    "arithmetic": Contest(
        ARITHMETIC._replace(variants={**ARITHMETIC.variants, **_ALONE.variants}),
        target=0.8,
        cores_each=3,
        trl={"lr": 1.5e-4, "steps": 32, "validate_every": 4, "prompts": 16, "group": 8},
        alone=(ALONE, TRL),
    ),
    "chain-sum": Contest(
        _CHAIN_SUM,
        target=0.15,
        cores_each=2,
        trl={
            "lr": 1e-5, "steps": 40, "validate_every": 5, "prompts": 16, "group": 16, "max_new_tokens": 48,
            "temperature": 0.7, "device": "cuda",
        },
        has_rows=True,
    ),
}  # fmt: skip


# Runs


def at(contest: Contest, runs: Path) -> Grid:
    """The grid, with the files of its rows where they are. Paths of a grid's settings are not compared."""
    if not contest.has_rows:
        return contest.grid
    places = (f"data.source={runs / 'train.jsonl'}", f"data.validation={runs / 'validation.jsonl'}")
    return contest.grid._replace(settings=(*contest.grid.settings, *places))


def make_rows(runs: Path) -> None:
    """`chain_sum` of reasoning-gym; what is validated is not trained on."""
    if all((runs / f"{name}.jsonl").is_file() for name in ROWS):
        return
    try:
        import reasoning_gym  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError("chain-sum: needs reasoning-gym to draw its rows: pip install reasoning-gym") from error
    settings: dict[str, int] = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}
    drawn: Any = reasoning_gym.create_dataset("chain_sum", size=3000, seed=0, **settings)
    rows = list(
        {one["question"]: {"question": one["question"], "answer": str(one["answer"])} for one in drawn}.values()
    )
    random.Random(0).shuffle(rows)
    for name, some in zip(ROWS, (rows[200:], rows[:200]), strict=True):
        (runs / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some), encoding="utf-8")


def rows_of(contest: Contest, runs: Path, seed: int) -> dict[str, list[dict[str, Any]]]:
    """As trl_grpo.py takes them."""
    if contest.has_rows:
        files = {name: (runs / f"{name}.jsonl").read_text(encoding="utf-8").splitlines() for name in ROWS}
        return {name: [_as_chat(json.loads(line)) for line in lines] for name, lines in files.items()}
    task = ArithmeticTask()
    drawn = {"train": [draw_problem(task, seed, "train", index) for index in range(128)]}
    drawn["validation"] = [draw_problem(task, 0, "validation", index) for index in range(128)]
    return {name: [{"prompt": one.prompt, "expected": one.answer} for one in some] for name, some in drawn.items()}


def _as_chat(row: dict[str, str]) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": row["question"]}], "expected": row["answer"]}


def play_trl(
    contest: Contest, seed: int, runs: Path, model: Path, python: str, timeout_s: float, cores: Sequence[int]
) -> str | None:
    folder = runs / TRL / f"seed-{seed}"
    settings = trl_settings(contest, seed)
    if grid.is_done(folder, settings):
        return None
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    setup = {**contest.trl, "seed": seed, "model": str(model), **rows_of(contest, runs, seed)}
    (folder / "setup.json").write_text(json.dumps(setup))
    script = str(Path(__file__).with_name("trl_grpo.py"))
    began = time.monotonic()
    command = [python, script, str(folder / "setup.json"), str(folder / "found.json")]
    code = grid.call(command, folder / "train.log", timeout_s, cores)
    if code != 0:
        return f"{TRL} seed {seed}: {'took too long' if code is None else f'exit code {code}'}; see {folder}"
    grid.finish(folder, settings, time.monotonic() - began)
    print(f"{TRL} seed {seed}: done in {time.monotonic() - began:.0f} s", flush=True)
    return None


def trl_settings(contest: Contest, seed: int) -> tuple[str, ...]:
    return (*(f"{name}={value}" for name, value in contest.trl.items()), f"seed={seed}")


def play_grids(contest: Contest, args: argparse.Namespace, runs: Path, model: Path) -> list[str]:
    """One after the other: those of one process, and the others, so that what runs at once has as many cores."""
    known = [*contest.grid.variants, TRL]
    variants = grid.parse_variants(args.variants, known)
    wrong: list[str] = []
    for few in (True, False):
        calls = [
            partial(play_trl, contest, seed, runs, model, args.trl, args.timeout)
            if variant == TRL
            else partial(grid.play, at(contest, runs), variant, seed, runs, model, args.timeout)
            for seed in grid.parse_seeds(args.seeds)
            for variant in variants
            if (variant in contest.alone) == few
        ]
        wrong += grid.play_all(calls, grid.all_cores(), 1 if few else contest.cores_each)
    return wrong


# What they say


def read_trl(folder: Path) -> Curve:
    found = json.loads((folder / "found.json").read_text())
    lengths = found["lengths"]
    return Curve(
        reward=found["rewards"],
        seconds=found["seconds"],
        cents=[TRAINER_USD * one / 36 for one in found["seconds"]],
        tokens=found["tokens"],
        validation={int(step): rate for step, rate in found["validation"].items()},
        length=fmean(lengths),
        ended_length=fmean(lengths),
        inclusion={},
        discarded=0.0,
        staleness=0.0,
        max_staleness=0.0,
        mixed=0.0,
        long_rounds=0.0,
        drafted=0.0,
    )


def read_all(contest: Contest, runs: Path) -> dict[str, dict[int, Curve]]:
    found = grid.read_all(at(contest, runs), runs, runs / "model")
    theirs = {
        seed: read_trl(folder)
        for seed in grid.seeds_in(runs / TRL)
        if grid.is_done(folder := runs / TRL / f"seed-{seed}", trl_settings(contest, seed))
    }
    return found | ({TRL: theirs} if theirs else {})


def reached(curve: Curve, axis: Sequence[float], target: float) -> float | None:
    """Where on the axis validation gets there first, along straight lines; None: nowhere. Step 0 is at 0."""
    points = sorted((step, rate) for step, rate in curve.validation.items() if step <= len(axis))
    where = [0.0 if step == 0 else axis[step - 1] for step, _ in points]
    if points and points[0][1] >= target:
        return where[0]
    for place in range(1, len(points)):
        before, after = points[place - 1][1], points[place][1]
        if after >= target:
            share = (target - before) / (after - before)
            return where[place - 1] + share * (where[place] - where[place - 1])
    return None


# The page

HOW_TO_READ = """\
**How to read it.** `+-` and bands are 95% confidence over seeds (Student's t). `seconds` are those of steps: start and
validation count for nobody, though workers of an async run go on generating while it is validated. `tokens` are all
that were generated, thrown away or not. Cents are seconds at 2 dollars an hour of the trainer, and 0.4 of each worker;
TRL and `alone` pay the trainer alone. *against* columns are ratios of seconds of the same seed: below 1 is faster. A
seed that never got there has no ratio, and is counted. The accuracies were chosen where the curves still rise."""
ABOUT = {
    "arithmetic": """\
## The arithmetic task, on a CPU

A model of 90,000 parameters; 16 prompts of 8 answers a step, 128 prompts. A trainer and two workers have three cores of
their own; `alone` (our trainer, without workers) and TRL have one core each. As many run at once as there are cores
for. `speculation` is that of the workers; the trainer's own engine has it at `auto` in every run.""",
    "chain-sum": """\
## SmolLM2 and reasoning-gym, on a GPU

SmolLM2-135M-Instruct on `chain_sum` of reasoning-gym (two or three terms of a digit, negative results too); 16 prompts
of 16 answers a step. Up to three runs at once share the GPU, each with two cores, and a trainer is the only one that
generates. TRL generates with transformers (vLLM was not there), in bfloat16 under autocast with float32 weights; ours
computes in bfloat16, with float32 weights in the optimizer.""",
}


def table(contest: Contest, found: Mapping[str, Mapping[int, Curve]]) -> list[list[str]]:
    target = contest.target
    to = [f"{axis} to {target:.0%}" for axis in (*AXES, "steps")]
    rows = [["", "seeds", "seconds a step", to[0], "against synchronous", "against TRL", *to[1:],
             "accuracy at the end"]]  # fmt: skip
    for name, curves in found.items():
        every = list(curves.values())
        reach = {axis: [reached(one, getattr(one, axis), target) for one in every] for axis in AXES}
        steps = [reached(one, list(range(1, len(one.reward) + 1)), target) for one in every]
        rows.append([
            name, str(len(every)), grid.show([one.seconds[-1] / len(one.seconds) for one in every], ".2f"),
            grid.show(reach["seconds"], ".1f"),
            *(ratio(curves, found.get(other, {}), target) if name != other else "" for other in (BASELINE, TRL)),
            grid.show(reach["tokens"], ",.0f"), grid.show(reach["cents"], ".2f"), grid.show(steps, ".1f"),
            grid.show([grid.last_validation(one) for one in every]),
        ])  # fmt: skip
    return rows


def ratio(curves: Mapping[int, Curve], others: Mapping[int, Curve], target: float) -> str:
    pairs = [
        (reached(curves[seed], curves[seed].seconds, target), reached(others[seed], others[seed].seconds, target))
        for seed in curves
        if seed in others
    ]
    return grid.show([ours / theirs if ours is not None and theirs else None for ours, theirs in pairs], ".2f")


def learned(found: Mapping[str, Mapping[int, Curve]]) -> list[list[str]]:
    """Accuracy at the end against synchronous runs, seed by seed; drafts and waste."""
    base = dict(found.get(BASELINE, {}))
    rows = [["", "accuracy at the end, against synchronous", "", "tokens discarded", "written by drafts"]]
    for name, curves in found.items():
        apart = grid.differences(dict(curves), base, grid.last_validation)
        compared = name != BASELINE and bool(apart)
        rows.append([
            name, grid.show(apart, sign="+") if compared else "", grid.verdict(apart) if compared else "",
            f"{fmean(one.discarded for one in curves.values()):.1%}",
            f"{fmean(one.drafted for one in curves.values()):.1%}",
        ])  # fmt: skip
    return rows


def section(name: str, contest: Contest, runs: Path, out: Path, command: str) -> str:
    found = read_all(contest, runs)
    if not found:
        raise UserError(f"{runs}: no run is done")
    picture = f"{out.stem}-{name}.png"
    draw(contest, found, out.with_name(picture))
    for rows in (table(contest, found), learned(found)):
        print("\n" + grid.as_markdown(rows))
    settings = [
        ["variant", "settings"],
        *([one, f"`{' '.join(own)}`"] for one, own in contest.grid.variants.items() if one in found),
    ]
    return "\n\n".join([
        ABOUT[name],
        grid.origin(grid.outcomes_of(found, runs), command),
        grid.as_markdown(table(contest, found)),
        f"![accuracy over seconds and tokens]({picture})",
        grid.as_markdown(learned(found)),
        f"`polyrl train {contest.grid.recipe} {' '.join(contest.grid.settings)} train.seed=N`, and:",
        grid.as_markdown(settings),
    ])  # fmt: skip


def draw(contest: Contest, found: Mapping[str, Mapping[int, Curve]], path: Path) -> None:
    figure, panels = new_panels(13.0, 5.2, 2)
    for axes, what in zip(panels, ("seconds", "tokens"), strict=True):
        for place, (name, curves) in enumerate(found.items()):
            colour = PALE_INK if name == BASELINE else grid.COLOURS[(place - 1) % len(grid.COLOURS)]
            one = over(list(curves.values()), what)
            grid.band(axes, one, colour, name if what == "seconds" else None, alpha=0.08)
        grid.plain(axes)
        axes.axhline(contest.target, color=PALE_INK, linewidth=0.8, linestyle="--")
        set_titles(axes, f"Validation accuracy over {what}", "mean over seeds, 95% band", what, "accuracy")
    figure.legend(loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    save(figure, path)


def over(curves: Sequence[Curve], what: str) -> grid.Band:
    """Mean accuracy of the seeds at each validation, over the mean of the axis there."""
    steps = sorted(set(curves[0].validation).intersection(*(one.validation for one in curves)))
    steps = [step for step in steps if step <= min(len(one.reward) for one in curves)]
    x = [fmean(0.0 if step == 0 else getattr(one, what)[step - 1] for one in curves) for step in steps]
    return grid.banded(x, [[one.validation[step] for step in steps] for one in curves])


# The command


def play_contest(name: str, args: argparse.Namespace) -> int:
    contest = CONTESTS[name]
    runs = (Path(args.runs) if args.runs else default_runs(name)).resolve()
    runs.mkdir(parents=True, exist_ok=True)
    if contest.has_rows:
        make_rows(runs)
        if args.model is None:
            raise UserError(f"{name}: --model is missing: the directory of examples/smollm2.py")
    if not Path(args.trl).exists():
        raise UserError(f"{args.trl}: no such file; benchmarks/install_trl.sh installs TRL, --trl names its Python")
    model = grid.make_model(runs) if args.model is None else Path(args.model).resolve()
    wrong = play_grids(contest, args, runs, model)
    found = read_all(contest, runs)
    print("\n" + grid.as_markdown(table(contest, found)))
    for what in wrong:
        print(what)
    return 1 if wrong else 0


def default_runs(name: str) -> Path:
    return Path("out") / ("learning" if name == "arithmetic" else name)


def write_page(out: Path) -> None:
    parts = [
        section(name, contest, default_runs(name).resolve(), out, f"{COMMAND} {name}")
        for name, contest in CONTESTS.items()
        if default_runs(name).is_dir()
    ]
    if not parts:
        raise UserError("out: no run is done")
    text = "\n\n".join([own_words(out), HOW_TO_READ, *parts])
    out.write_text(text + "\n", encoding="utf-8")


def own_words(out: Path) -> str:
    """What somebody wrote at the top of the page that is there: it stays, to be looked at again."""
    before = out.read_text(encoding="utf-8").partition("**How to read it.**")[0] if out.is_file() else ""
    return before.rstrip() or "# Time to the same accuracy"


def main(arguments: Sequence[str]) -> int:
    if list(arguments[:1]) == ["page"] and len(arguments) == 2:
        write_page(Path(arguments[1]))
        return 0
    parser = argparse.ArgumentParser(description="Seconds, tokens and dollars to the same validation accuracy")
    parser.add_argument("contest", choices=tuple(CONTESTS), help="or: page FILE.md")
    parser.add_argument("--model", metavar="DIR", help="that all runs start from (default: the arithmetic one, made)")
    parser.add_argument("--variants", metavar="A,B", help="default: all, and TRL")
    parser.add_argument("--seeds", default="0-4", metavar="LIST", help="0-4 or 0,2 (default: %(default)s)")
    parser.add_argument("--runs", metavar="DIR", help="runs go here (default: out/learning, out/chain-sum)")
    parser.add_argument("--trl", default=str(Path.home() / ".cache/polyrl/engines/trl/bin/python"), metavar="PYTHON")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="for one run (default: %(default)g)")
    args = parser.parse_args(arguments)
    return play_contest(args.contest, args)
