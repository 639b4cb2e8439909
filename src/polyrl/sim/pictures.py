"""A run as pictures in files: the timeline of every worker, the saw-tooth of step times, tokens/s against workers.

The colours are those of the terminal (telemetry/looks.py); what matplotlib needs around a picture is in
telemetry/canvas.py, which says so when it is not installed.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from polyrl.sim.report import row_order
from polyrl.sim.result import Measured, measure_steps, num_warmup_steps
from polyrl.sim.simulation import Simulation
from polyrl.telemetry.canvas import (
    GRID,
    INK,
    SEVERAL,
    activity_legend,
    legend_below,
    new_figure,
    save,
    set_titles,
    whole_numbers,
)
from polyrl.telemetry.looks import ACTIVITIES, KINDS, LEFT, TRAINER, TimeUnit, unit_for
from polyrl.telemetry.timeline import moments_of_going

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from polyrl.sim.planner import Plan

_MAX_TIMELINE_INCHES = 40.0


def draw_all(sim: Simulation, folder: Path) -> list[Path]:
    """Draw the three pictures into the folder. Raises NoPlottingError if matplotlib is missing."""
    pictures: list[tuple[str, Callable[[Simulation], Figure]]] = [
        ("timeline.png", timeline_figure),
        ("steps.png", steps_figure),
        ("workers.png", workers_figure),
    ]
    paths: list[Path] = []
    for name, draw in pictures:
        save(draw(sim), folder / name)
        paths.append(folder / name)
    return paths


def timeline_figure(sim: Simulation) -> "Figure":
    """One row a worker, coloured by what it did; thin lines are the ends of steps."""
    names = sorted(sim.timeline.rows, key=row_order)
    height = min(_MAX_TIMELINE_INCHES, 2.1 + 0.3 * len(names))
    figure, axes = new_figure(12.0, height)
    unit = unit_for(sim.now)
    seen: dict[str, None] = {}
    for row, name in enumerate(names):
        by_activity: dict[str, list[tuple[float, float]]] = {}
        for span in sim.timeline.rows[name]:
            bar = (span.start_s / unit.seconds, (span.end_s - span.start_s) / unit.seconds)
            by_activity.setdefault(span.activity, []).append(bar)
        for activity, bars in by_activity.items():
            seen[activity] = None
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=ACTIVITIES[activity].colour, linewidth=0)
        ends = [moment / unit.seconds for moment in moments_of_going(sim.timeline.rows[name], sim.now)]
        if ends:
            seen[LEFT] = None
            axes.plot(ends, [row] * len(ends), "x", color=ACTIVITIES[LEFT].colour, markersize=7, markeredgewidth=2)
    for line in sim.lines:
        axes.axvline(line.trained_at / unit.seconds, color=INK, linewidth=0.5, alpha=0.35)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, sim.now / unit.seconds)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    set_titles(axes, f"What every worker did: {_name(sim)}", "thin lines: a step ends", f"time ({unit.name})", "")
    activity_legend(figure, seen)
    return figure


def steps_figure(sim: Simulation) -> "Figure":
    """A bar a step by its kind; dots are the rollout in it; the warm-up is pale."""
    figure, axes = new_figure(10.0, 4.2)
    steps, num_warmup = measure_steps(sim), num_warmup_steps(sim)
    unit = unit_for(max(step.step_s for step in steps))
    for kind, colour in KINDS.items():
        for label, is_pale in ((f"{kind} round", False), (f"{kind} round, warm-up", True)):
            ones = [s for s in steps if s.line.kind == kind and (s.line.step < num_warmup) == is_pale]
            if ones:
                heights = [one.step_s / unit.seconds for one in ones]
                axes.bar(
                    [one.line.step for one in ones],
                    heights,
                    0.8,
                    color=colour,
                    alpha=0.35 if is_pale else 1,
                    label=label,
                )
    places = [step.line.step for step in steps]
    _dots(axes, places, [step.rollout_s for step in steps], unit, INK, "o", "rollout")
    _dots(axes, places, [step.line.train_s for step in steps], unit, TRAINER, "s", "training")
    axes.grid(axis="y", color=GRID)
    axes.set_xlim(-0.7, len(steps) - 0.3)
    whole_numbers(axes)
    measured = fmean(step.step_s for step in steps[num_warmup:])
    about = f"mean {measured:,.0f} s" + (f", without the first {num_warmup} steps" if num_warmup else "")
    set_titles(axes, f"Time of each step: {_name(sim)}", about, "step", f"time ({unit.name})")
    legend_below(axes)
    return figure


def workers_figure(sim: Simulation) -> "Figure":
    """Tokens a second of each step against its mean number of remote workers, and the mean of each whole number."""
    figure, axes = new_figure(7.5, 4.8)
    steps, num_warmup = measure_steps(sim), num_warmup_steps(sim)
    for label, ones, pale in (
        ("a step", steps[num_warmup:], False),
        ("a step of the warm-up", steps[:num_warmup], True),
    ):
        if ones:
            x, y = [one.line.mean_workers for one in ones], [one.tok_s for one in ones]
            face = "none" if pale else KINDS["short"]
            axes.scatter(x, y, 34, facecolors=face, edgecolors=KINDS["short"], alpha=0.75, label=label, zorder=3)
    settled = _means_by_workers(steps[num_warmup:])
    axes.plot(
        *zip(*settled, strict=True),
        "-D",
        color=KINDS["long"],
        markersize=8,
        label="mean of a fleet that did not change",
        zorder=4,
    )
    most = max(step.line.mean_workers for step in steps)
    axes.set_xlim(-0.4, max(1.0, most) + 0.4)
    axes.set_ylim(0, max(step.tok_s for step in steps) * 1.12)
    whole_numbers(axes)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(color=GRID)
    about = "tokens trained, with their prompts; workers: mean over the step"
    set_titles(axes, f"Tokens a second against workers: {_name(sim)}", about, "remote workers", "tokens a second")
    legend_below(axes)
    return figure


def _means_by_workers(steps: Sequence[Measured]) -> list[tuple[float, float]]:
    by_number: dict[int, list[Measured]] = {}
    for step in steps:
        number = round(step.line.mean_workers)
        if abs(step.line.mean_workers - number) < 0.05:
            by_number.setdefault(number, []).append(step)
    means = [
        (float(n), sum(s.tokens for s in ones) / sum(s.step_s for s in ones)) for n, ones in sorted(by_number.items())
    ]
    return means or [(float("nan"), float("nan"))]


def _dots(
    axes: "Axes", x: Iterable[int], seconds: Iterable[float], unit: TimeUnit, colour: str, mark: str, label: str
) -> None:
    y = [one / unit.seconds for one in seconds]
    axes.plot(list(x), y, mark, color=colour, markeredgecolor="white", markersize=6, label=label, zorder=3)


def _name(sim: Simulation) -> str:
    return f"{sim.scenario.name}, seed {sim.seed}"


def plan_figure(plan: "Plan") -> "Figure":
    """Dollars a million tokens against tokens a second: a line a way to run, a point a number of workers."""
    figure, axes = new_figure(8.5, 5.4)
    prices = sorted({row.worker_price_usd_per_hour for row in plan.rows})
    rows = [row for row in plan.rows if row.worker_price_usd_per_hour == prices[0] and row.usd_per_mtok is not None]
    ways = sorted({(row.staleness, row.factor) for row in rows})
    factors = sorted({factor for _, factor in ways})
    for staleness, factor in ways:
        ones = sorted(
            (row for row in rows if (row.staleness, row.factor) == (staleness, factor)), key=lambda row: row.workers
        )
        x, y = (
            [row.throughput_tok_s for row in ones],
            [row.usd_per_mtok for row in ones if row.usd_per_mtok is not None],
        )
        label = f"factor {factor:g}, " + ("on-policy" if staleness == 0 else f"staleness {staleness}")
        colour = SEVERAL[factors.index(factor) % len(SEVERAL)]
        axes.plot(x, y, "-o" if staleness == 0 else "--s", color=colour, label=label, markersize=5, linewidth=1.4)
        for row, at_x, at_y in zip(ones, x, y, strict=True):
            axes.annotate(str(row.workers), (at_x, at_y), (4, 4), textcoords="offset points", fontsize=8, color=colour)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"${value:.2f}")
    axes.grid(color=GRID)
    about = f"numbers: remote workers, at ${prices[0]:g} an hour each; right is faster, down is cheaper"
    title = f"Ways to run {plan.scenario}, seed {plan.seed}"
    set_titles(axes, title, about, "tokens trained a second", "dollars a million tokens")
    legend_below(axes, 3)
    return figure
