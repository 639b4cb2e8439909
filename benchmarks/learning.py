"""Whether learning is unharmed: the arithmetic task in every mode, several seeds each, against synchronous runs.

    make bench NAME=learning ARGS='[--grid stale] [--variants A,B] [--seeds 0-4] [--runs DIR] [--out FILE.md]'

Every run is `polyrl train arithmetic` with real processes: a trainer whose devices generate too, and two workers. They
are those of time_to_reward.py, which says what they took; the page is made of all that are there.

Rules kept here: no figure of the page is written by hand; words above the figures stay. Reward is that of the
samples that came to the trainer, which a race chooses; `validation` is not, and is there to be compared. A difference
is taken seed by seed.
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from benchmarks.grid import (
    ARITHMETIC,
    BASELINE,
    COLOURS,
    STALE,
    Band,
    Curve,
    Grid,
    all_cores,
    as_markdown,
    band,
    banded,
    differences,
    last_validation,
    make_model,
    origin,
    outcomes_of,
    parse_seeds,
    parse_variants,
    plain,
    play,
    play_all,
    read_all,
    show,
    spread,
    verdict,
)
from polyrl.errors import UserError
from polyrl.telemetry.canvas import INK, PALE_INK, save, whole_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COMMAND = ".venv/bin/python -m benchmarks learning"
GRIDS = {"learning": ARITHMETIC, "stale": STALE}
LAST_STEPS = 8
"""An epoch: their mean reward is the reward at the end."""
SHORT_BIN, LONG_BIN = 3, 6


def at_end(curve: Curve) -> float:
    return fmean(curve.reward[-LAST_STEPS:])


JUDGED_BY: dict[str, Callable[[Curve], float]] = {
    "by validation at the end": last_validation,
    f"By reward over the last {LAST_STEPS} steps": at_end,
}

# The page


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
    """Which variants are judged how, by validation at the end and by reward."""
    said = [f"{by}: {_judged(found, value)}" for by, value in JUDGED_BY.items()]
    if not found.keys() - {BASELINE} or BASELINE not in found:
        said = [NOTHING_TO_COMPARE]
    return f"**In short**, against synchronous runs, {'. '.join(said)}."


def _judged(found: dict[str, dict[int, Curve]], value: Callable[[Curve], float]) -> str:
    """Variants by what is said of them; with their figures where there is a difference."""
    judged: dict[str, list[str]] = {}
    for name, curves in found.items():
        numbers = differences(curves, found[BASELINE], value) if BASELINE in found and name != BASELINE else []
        if numbers:
            what = verdict(numbers)
            differs = what in ("better", "worse")
            judged.setdefault(what, []).append(f"{name} ({show(numbers, sign='+')})" if differs else name)
    return "; ".join(f"{what}: {', '.join(names)}" for what, names in judged.items()) or "nothing to compare"


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


_BEGINS = "The arithmetic task ("
ABOUT = f"""\
{_BEGINS}a model of 90,000 parameters that mostly guesses has to find patience), each variant against
synchronous runs. Real processes: a manager, a trainer whose devices generate too, and two workers. The page is written
by the command below."""
HOW_TO_READ = """\
**How to read it.** `+-` and bands are 95% confidence over seeds; differences are taken seed by seed. A reward is that
of the samples that came to the trainer: where samples race, the race chooses them, and it says little about the
policy; in async runs it is that of the older policies which wrote them, so while a run still learns, a part of what it
is behind is its lag. Validation, on problems that are never trained on, does not depend on the mode."""
ABOUT_BIAS = """\
Answers that a race ends early never end by themselves, so that what a race does to lengths shows against synchronous
runs. Of answers that ended, those whose groups came too late, or that were extra, are not trained.
`predicted` knows nothing before the second epoch, which begins with step 8."""


def page(grid: Grid, found: dict[str, dict[int, Curve]], origin: str, picture: str, before: str) -> str:
    variants = [["variant", "settings"], *([name, f"`{' '.join(grid.variants[name])}`"] for name in found)]
    parts = [
        before,
        ABOUT,
        origin,
        in_short(found),
        HOW_TO_READ,
        "## What was learned",
        as_markdown(learned(found)),
        f"![reward over steps]({picture})",
        *(["[What it took](time-to-reward.md) in seconds, tokens and dollars."] if grid is ARITHMETIC else []),
        "## What was trained on",
        as_markdown(biased(found)),
        ABOUT_BIAS,
        "## Every run",
        f"`polyrl train {grid.recipe} {' '.join(grid.settings)} train.seed=N`, and:",
        as_markdown(variants),
    ]
    return "\n\n".join(parts) + "\n"


# The picture

_COLUMNS = 4


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
        band(axes, over_steps(found[name]), COLOURS[place % len(COLOURS)], name)
        checks(axes, found[name], COLOURS[place % len(COLOURS)])
        plain(axes)
        whole_numbers(axes)
        axes.set_title(name, loc="left", fontsize=11, fontweight="bold", color=INK)
    figure.supxlabel("step", fontsize=10, color=INK)
    figure.supylabel("reward", fontsize=10, color=INK)
    about = "lines: reward, with its 95% band (grey: synchronous runs); dots: validation pass@1"
    figure.suptitle(about, x=0.01, ha="left", fontsize=10, color=PALE_INK)
    save(figure, path)


def over_steps(curves: dict[int, Curve]) -> Band:
    num = min(len(one.reward) for one in curves.values())
    return banded(range(num), [one.reward[:num] for one in curves.values()])


def checks(axes: "Axes", curves: dict[int, Curve], colour: str) -> None:
    versions = sorted(set[int]().union(*(one.validation for one in curves.values())))
    rows = [[one.validation[version] for one in curves.values() if version in one.validation] for version in versions]
    halves = [0.0 if math.isnan(half := spread(row)) else half for row in rows]
    axes.errorbar(versions, [fmean(row) for row in rows], halves, fmt="o", markersize=4, color=colour, elinewidth=1)


# The command


def own_words(out: Path) -> str:
    """Return the words above the figures of the page that is there: they stay, to be looked at again."""
    before = out.read_text(encoding="utf-8").partition(_BEGINS)[0] if out.is_file() else ""
    return before.rstrip() or "# What every mode learns"


def write(grid: Grid, found: dict[str, dict[int, Curve]], runs: Path, out: Path | None, command: str) -> None:
    out = runs / "learning.md" if out is None else out
    out.parent.mkdir(parents=True, exist_ok=True)
    picture = out.with_suffix(".png").name
    draw_steps(found, out.parent / picture)
    text = page(grid, found, origin(outcomes_of(found, runs), command), picture, own_words(out))
    out.write_text(text, encoding="utf-8")
    for rows in (learned(found), biased(found)):
        print("\n" + as_markdown(rows))
    print("\n" + in_short(found))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description="Reward over steps of every mode, against synchronous runs.",
        epilog="about 55 runs of half a minute; `--variants synchronous,streaming --seeds 0-1` is a taste of it",
    )
    parser.add_argument("--grid", choices=tuple(GRIDS), default="learning", help="default: every mode")
    parser.add_argument("--variants", metavar="A,B", help="some of the grid's (default: all)")
    parser.add_argument("--seeds", default="0-4", metavar="LIST", help="0-4 or 0,2 (default: %(default)s)")
    parser.add_argument("--runs", metavar="DIR", help="runs go here (default: out/learning, out/stale)")
    parser.add_argument(
        "--out", metavar="FILE.md", help="write the page there, pictures beside it (default: in --runs)"
    )
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="for one run (default: %(default)g)")
    parser.add_argument("--cores-each", type=int, default=3, help="of a run; as many run at once as there are for")
    args = parser.parse_args(arguments)
    grid = GRIDS[args.grid]
    variants, seeds = parse_variants(args.variants, list(grid.variants)), parse_seeds(args.seeds)
    runs = Path(args.runs or f"out/{args.grid}").resolve()
    runs.mkdir(parents=True, exist_ok=True)
    model = make_model(runs)
    wrong = play_all(
        [
            partial(play, grid, variant, seed, runs, model, args.timeout)
            for seed in seeds  # seed by seed, so that an interrupted command has something of every variant
            for variant in variants
        ],
        all_cores(),
        args.cores_each,
    )
    found = read_all(grid, runs, model)
    if not found:
        raise UserError(f"{runs}: no run is done")
    write(grid, found, runs, None if args.out is None else Path(args.out), " ".join([COMMAND, *arguments]))
    for what in wrong:
        print(what, file=sys.stderr)
    return 1 if wrong else 0
