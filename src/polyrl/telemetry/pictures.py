"""Runs as pictures: reward, step time, longest answer, throughput against workers, the timeline of every worker.

There is no picture of what is not known of a run (runs.py). Pictures that compare draw all runs into one; the others
are one a run.

Rules kept here: colours are those of looks.py. The warm-up is pale, and not in any mean. Short and long rounds are told
apart by their form as well.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from polyrl.telemetry.canvas import (
    GRID,
    INK,
    PALE_INK,
    SEVERAL,
    activity_legend,
    legend_below,
    new_figure,
    new_panels,
    save,
    set_titles,
    whole_numbers,
)
from polyrl.telemetry.looks import ACTIVITIES, KINDS, LEFT, TRAINER, TimeUnit, unit_for
from polyrl.telemetry.runs import DrawnFleet, DrawnRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_TIMELINE_INCHES = 40.0
_MAX_STEP_LINES = 150
_MAX_DOTS = 60
"""More steps than this are drawn as a line with their running mean on it."""
_VISIBLE_SHARE = 0.0005
"""A share of the timeline: an activity that never lasts longer has no place in the legend."""
_NEAR_CAP = 2.5
"""A cap that is farther above all answers would only flatten them."""
_MARKS = {"short": "o", "long": "D"}
_LEFT_COLOUR = "#30343a"


def draw_all(runs: Sequence[DrawnRun], folder: Path) -> list[Path]:
    """Draw what there is something to draw of. Raises NoPlottingError if matplotlib is missing."""
    compared: list[tuple[str, Callable[[Sequence[DrawnRun]], Figure | None]]] = [
        ("reward.png", reward_figure),
        ("reward-cost.png", reward_cost_figure),
        ("longest.png", longest_figure),
        ("workers.png", workers_figure),
    ]
    drawn = [(name, draw(runs)) for name, draw in compared]
    for run in runs:
        before = "" if len(runs) == 1 else f"{run.name.replace('/', '_')}-"
        drawn += [(f"{before}steps.png", steps_figure(run)), (f"{before}timeline.png", timeline_figure(run))]
    paths: list[Path] = []
    for name, figure in drawn:
        if figure is not None:
            save(figure, folder / name)
            paths.append(folder / name)
    return paths


# Reward


def reward_figure(runs: Sequence[DrawnRun]) -> "Figure | None":
    """Mean reward of every step, all runs in one."""
    curves = [(run, [(float(one.step), one.reward) for one in run.steps]) for run in runs]
    shown = [(run, known) for run, curve in curves if (known := _known(curve))]
    if not shown:
        return None
    figure, axes = new_figure(9.0, 4.6)
    for number, (run, points) in enumerate(shown):
        _curve(axes, points, SEVERAL[number % len(SEVERAL)], run.title)
    axes.grid(axis="y", color=GRID)
    whole_numbers(axes)
    set_titles(axes, f"Reward: {_names(shown)}", _about_curve(shown), "step", "mean reward of a step")
    if len(shown) > 1:
        legend_below(axes)
    return figure


def reward_cost_figure(runs: Sequence[DrawnRun]) -> "Figure | None":
    """Draw the same against seconds, and against dollars where the run costs any."""
    by_time = [(run, _known((one.ended_s, one.reward) for one in run.steps)) for run in runs]
    by_usd = [(run, _known((one.usd, one.reward) for one in run.steps)) for run in runs]
    by_time = [(run, points) for run, points in by_time if points]
    by_usd = [(run, points) for run, points in by_usd if points and points[-1][0] > 0]
    if not by_time:
        return None
    colours = {run.name: SEVERAL[number % len(SEVERAL)] for number, (run, _) in enumerate(by_time)}
    figure, panels = new_panels(12.0 if by_usd else 9.0, 4.6, 2 if by_usd else 1)
    unit = unit_for(max(points[-1][0] for _, points in by_time))
    for run, points in by_time:
        _curve(panels[0], [(x / unit.seconds, y) for x, y in points], colours[run.name], run.title)
    title = f"Reward against its price: {_names(by_time)}"
    set_titles(panels[0], title, _about_curve(by_time), f"time ({unit.name})", "mean reward of a step")
    if by_usd:
        for run, points in by_usd:
            _curve(panels[1], points, colours.get(run.name, INK), None)
        panels[1].xaxis.set_major_formatter(lambda value, _: f"${value:,.4g}")
        set_titles(panels[1], "", "", "dollars", "")
    for axes in panels:
        axes.grid(color=GRID)
        axes.set_xlim(left=0)
    if len(by_time) > 1:
        legend_below(panels[0])
    return figure


def _curve(axes: "Axes", points: Sequence[tuple[float, float]], colour: str, label: str | None) -> None:
    """Dots on a line while they can be told apart; more of them as a pale line, with its running mean on it."""
    x, y = [point[0] for point in points], [point[1] for point in points]
    if len(points) <= _MAX_DOTS:
        axes.plot(x, y, "-o", color=colour, markersize=4, linewidth=1.6, label=label)
        return
    axes.plot(x, y, color=colour, linewidth=0.7, alpha=0.35)
    axes.plot(x, running_mean(y, _window(len(y))), color=colour, linewidth=2.0, label=label)


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of the last `window` values at each place, fewer at the start."""
    return [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def _window(num_values: int) -> int:
    return max(2, num_values // 30)


def _about_curve(shown: Sequence[tuple[DrawnRun, Sequence[tuple[float, float]]]]) -> str:
    longest = max(len(points) for _, points in shown)
    if longest > _MAX_DOTS:
        return f"pale: every step; bold: mean of the last {_window(longest)}"
    first, last = shown[0][1][0][1], shown[0][1][-1][1]
    return f"from {first:.3g} to {last:.3g}" if len(shown) == 1 else "a dot a step"


# Steps


def steps_figure(run: DrawnRun) -> "Figure | None":
    """Draw a bar a step, by its kind; dots are the rollout and the training in it."""
    steps = [one for one in run.steps if one.step_s is not None]
    if not steps:
        return None
    figure, axes = new_figure(10.0, 4.2)
    unit = unit_for(max(one.step_s or 0.0 for one in steps))
    for kind, colour in KINDS.items():
        for is_warmup in (False, True):
            ones = [one for one in steps if one.kind == kind and one.is_warmup == is_warmup]
            if ones:
                seconds = [one.step_s or 0.0 for one in ones]
                label = f"{kind} round, {'warm-up' if is_warmup else f'mean {fmean(seconds):,.3g} s'}"
                heights = [one / unit.seconds for one in seconds]
                pale = 0.35 if is_warmup else 1.0
                axes.bar([one.step for one in ones], heights, 0.8, color=colour, alpha=pale, label=label)
    for mark, colour, label, dots in (
        ("o", INK, "rollout in it", _known((one.step, one.rollout_s) for one in steps)),
        ("s", TRAINER, "training in it", _known((one.step, one.train_s) for one in steps)),
    ):
        if any(seconds for _, seconds in dots) and len(dots) <= 2 * _MAX_DOTS:
            look: dict[str, Any] = {"color": colour, "markeredgecolor": "white", "markersize": 6, "zorder": 3}
            axes.plot([x for x, _ in dots], [y / unit.seconds for _, y in dots], mark, label=label, **look)
    axes.grid(axis="y", color=GRID)
    axes.set_xlim(steps[0].step - 0.7, steps[-1].step + 0.7)
    whole_numbers(axes)
    about = "from the end of the step before to the end of this one"
    set_titles(axes, f"Time of each step: {run.title}", about, "step", f"time ({unit.name})")
    legend_below(axes)
    return figure


def longest_figure(runs: Sequence[DrawnRun]) -> "Figure | None":
    """Draw the longest answer trained in each step; of one run coloured by the kind of round, else by run."""
    curves = [(run, [one for one in run.steps if one.longest is not None]) for run in runs]
    shown = [(run, steps) for run, steps in curves if steps]
    if not shown:
        return None
    figure, axes = new_figure(9.0, 4.2)
    for number, (run, steps) in enumerate(shown):
        run_colour = SEVERAL[number % len(SEVERAL)]
        is_sparse = len(steps) <= _MAX_DOTS
        if is_sparse:
            x, y = [one.step for one in steps], [one.longest or 0.0 for one in steps]
            axes.plot(x, y, color=GRID if len(shown) == 1 else run_colour, linewidth=1.2, alpha=0.8, zorder=1)
        for kind, mark in _MARKS.items():
            ones = [(one.step, one.longest or 0.0) for one in steps if one.kind == kind]
            if ones:
                colour = KINDS[kind] if len(shown) == 1 else run_colour
                label = f"{kind} round" if len(shown) == 1 else f"{run.title}, {kind}"
                size = 5 if is_sparse else 3
                axes.plot(*zip(*ones, strict=True), mark, color=colour, markersize=size, label=label, zorder=3)
    caps = [run.max_new_tokens for run, _ in shown if run.max_new_tokens is not None]
    highest = max(one.longest or 0.0 for _, steps in shown for one in steps)
    if caps and min(caps) == max(caps) <= _NEAR_CAP * highest:
        axes.axhline(caps[0], color=PALE_INK, linewidth=1.0, linestyle="--", label="the most that is allowed")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="y", color=GRID)
    whole_numbers(axes)
    set_titles(axes, f"Longest answer of each step: {_names(shown)}", "of those trained", "step", "tokens")
    legend_below(axes)
    return figure


def workers_figure(runs: Sequence[DrawnRun]) -> "Figure | None":
    """Draw the tokens a second of each step against its mean number of remote workers, and the mean of each whole
    number."""
    shown = [(run, points) for run in runs if (points := _known((one.workers, one.tok_s) for one in run.steps))]
    if not shown:
        return None
    figure, axes = new_figure(7.5, 4.8)
    for number, (run, _) in enumerate(shown):
        colour = SEVERAL[number % len(SEVERAL)]
        points = _known((one.workers, one.tok_s) for one in run.steps if not one.is_warmup)
        pale = _known((one.workers, one.tok_s) for one in run.steps if one.is_warmup)
        for label, ones, face in ((f"a step of {run.title}", points, colour), ("a step of its warm-up", pale, "none")):
            if ones:
                x, y = [point[0] for point in ones], [point[1] for point in ones]
                axes.scatter(x, y, 30, facecolors=face, edgecolors=colour, alpha=0.55, label=label, zorder=3)
        means = _means_by_number(points)
        if len(means) > 1:
            axes.plot(*zip(*means, strict=True), "-D", color=colour, markersize=7, label="mean by number", zorder=4)
    axes.set_xlim(-0.4, max(1.0, *(x for _, points in shown for x, _ in points)) + 0.4)
    axes.set_ylim(0, max(y for _, points in shown for _, y in points) * 1.12)
    whole_numbers(axes)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(color=GRID)
    what = "tokens trained" if all(run.has_prompts_in_tok_s for run, _ in shown) else "answer tokens trained"
    about = f"{what} through the time of the step; workers: mean over the step"
    title = f"Tokens a second against workers: {_names(shown)}"
    set_titles(axes, title, about, "remote workers", "tokens a second")
    legend_below(axes, 2)
    return figure


def _means_by_number(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    by_number: dict[int, list[float]] = {}
    for workers, tok_s in points:
        by_number.setdefault(round(workers), []).append(tok_s)
    return [(float(number), fmean(ones)) for number, ones in sorted(by_number.items())]


# The timeline


def timeline_figure(run: DrawnRun) -> "Figure | None":
    """Draw a row for each worker, coloured by its activity; marks are workers that went."""
    fleet = run.fleet
    if fleet is None:
        return None
    names = list(fleet.rows)
    unit = unit_for(fleet.until)
    figure, axes = new_figure(12.0, min(_MAX_TIMELINE_INCHES, 2.1 + 0.3 * len(names)))
    visible = _VISIBLE_SHARE * fleet.until
    seen: dict[str, None] = {}
    for row, spans in enumerate(fleet.rows.values()):
        bars: dict[str, list[tuple[float, float]]] = {}
        for span in spans:
            width_s = span.end_s - span.start_s
            bars.setdefault(span.activity, []).append((span.start_s / unit.seconds, width_s / unit.seconds))
            if width_s > visible:
                seen[span.activity] = None
        for activity, places in bars.items():
            axes.broken_barh(places, (row - 0.4, 0.8), facecolors=ACTIVITIES[activity].colour, linewidth=0)
    marks = [*_mark_ends(axes, fleet, unit), *_mark_away(axes, fleet, unit)]
    ends = [one.ended_s for one in run.steps if one.ended_s is not None]
    if has_lines := 0 < len(ends) <= _MAX_STEP_LINES:
        for end in ends:
            axes.axvline(end / unit.seconds, color=INK, linewidth=0.5, alpha=0.35)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    first = min((span.start_s for spans in fleet.rows.values() for span in spans), default=0.0)
    axes.set_xlim(min(0.0, first / unit.seconds), max(fleet.until / unit.seconds, 1e-9))
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    about = "thin lines: a step ends" if has_lines else ""
    set_titles(axes, f"What every worker did: {run.title}", about, f"time ({unit.name})", "")
    activity_legend(figure, seen, marks)
    return figure


_ENDINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "lost": ("lost", {"marker": "x", "color": ACTIVITIES[LEFT].colour, "markersize": 8, "markeredgewidth": 2.2}),
    "gone": ("gone", {"marker": "x", "color": ACTIVITIES[LEFT].colour, "markersize": 8, "markeredgewidth": 2.2}),
    "left": (
        "left, all handed over",
        {"marker": "|", "color": _LEFT_COLOUR, "markersize": 12, "markeredgewidth": 2.2},
    ),
}


def _mark_ends(axes: "Axes", fleet: DrawnFleet, unit: TimeUnit) -> list[Any]:
    names = list(fleet.rows)
    handles: list[Any] = []
    for ending, (words, look) in _ENDINGS.items():
        ends = [(at / unit.seconds, names.index(worker)) for how, worker, at in fleet.ends if how == ending]
        if ends:
            x, y = zip(*ends, strict=True)
            handles += axes.plot(x, y, linestyle="", label=words, zorder=5, clip_on=False, **look)
    return handles


def _mark_away(axes: "Axes", fleet: DrawnFleet, unit: TimeUnit) -> list[Any]:
    look: dict[str, Any] = {"color": "#000000", "alpha": 0.12, "linewidth": 0, "label": "manager away", "zorder": 4}
    bands = [axes.axvspan(since / unit.seconds, until / unit.seconds, **look) for since, until in fleet.away]
    return bands[:1]


# Shared by all


def _known(points: Iterable[tuple[float | None, float | None]]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if x is not None and y is not None]


def _names(shown: Sequence[tuple[DrawnRun, object]]) -> str:
    names = [run.title for run, _ in shown]
    return names[0] if len(names) == 1 else f"{len(names)} runs"
