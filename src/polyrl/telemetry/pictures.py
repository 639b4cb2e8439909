"""Runs as pictures: reward, step time, longest answer, throughput against workers, the timeline of every worker.

A run is what its journal gives (account.py) and what its metrics give (metrics.py); either may be missing, and then so
are the pictures that need it. Pictures that compare draw all runs into one; the others are one a run.

Rules kept here: colours are those of looks.py. Short and long rounds are told apart by their form as well.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from polyrl.telemetry.account import Account
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
from polyrl.telemetry.looks import ACTIVITIES, KINDS, LEFT, TRAINER, unit_for
from polyrl.telemetry.metric_names import IMPOSED_LENGTHS
from polyrl.telemetry.metrics import MetricValue, from_step_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MAX_TIMELINE_INCHES = 40.0
_MAX_STEP_LINES = 150
_MAX_DOTS = 60
"""More steps than this are drawn as a line with their running mean on it."""
_VISIBLE_SHARE = 0.0005
"""Of the timeline: what is never longer than this has no place in the legend."""
_NEAR_CAP = 2.5
"""A cap that is farther above all answers would only flatten them."""
_MARKS = {"short": "o", "long": "D"}
_LEFT_COLOUR = "#30343a"


class DrawnStep(NamedTuple):
    """One step, in the figures that are drawn; None is not known."""

    step: int
    kind: str
    ended_s: float | None
    """Since the run began."""
    step_s: float | None
    train_s: float | None
    reward: float | None
    longest: float | None
    tok_s: float | None
    workers: float | None
    usd: float | None
    """Of the run so far."""


class Run(NamedTuple):
    name: str
    account: Account | None
    steps: list[DrawnStep]
    has_prompts_in_tok_s: bool
    """Tokens a second count prompts too: metrics know them, a journal does not."""
    caveat: str = ""
    """What nobody should look at it without."""

    @property
    def title(self) -> str:
        return f"{self.name}, {self.caveat}" if self.caveat else self.name


def make_run(name: str, account: Account | None, metrics: Sequence[dict[str, MetricValue]]) -> Run:
    """One run from both of its sources; where they say the same, metrics are believed."""
    by_step: dict[int, dict[str, MetricValue]] = {}
    if account is not None:
        before = None
        for line in account.lines:
            told = from_step_line(line, before)
            step_s = _number(told, "time/step_total") or 0.0
            tok_s = line.tokens_trained / step_s if step_s > 0 else None
            by_step[line.step] = {**told, "tok_s": tok_s, "ended_s": line.trained_at - account.started_at}
            before = line
    for values in metrics:
        known = by_step.setdefault(int(_number(values, "step") or 0), {})
        known |= {key: value for key, value in values.items() if value is not None}
    has_prompts = bool(metrics) and all("perf/throughput_all_gpus" in values for values in metrics)
    steps = [*_steps(by_step, "perf/throughput_all_gpus" if has_prompts else "tok_s")]
    return Run(name, account, steps, has_prompts, _caveat(account, metrics))


def _caveat(account: Account | None, metrics: Sequence[dict[str, MetricValue]]) -> str:
    if account is not None and account.caveat:
        return account.caveat
    is_imposed = any(values.get("rollout/imposed_lengths") for values in metrics)
    return IMPOSED_LENGTHS if is_imposed else ""


def _steps(by_step: dict[int, dict[str, MetricValue]], tok_s: str) -> Iterator[DrawnStep]:
    elapsed_s: float | None = 0.0
    for step, values in sorted(by_step.items()):
        step_s = _number(values, "time/step_total")
        elapsed_s = None if elapsed_s is None or step_s is None else elapsed_s + step_s
        ended_s = _number(values, "ended_s")
        yield DrawnStep(
            step=step,
            kind=str(values.get("rounds/kind", "short")),
            ended_s=elapsed_s if ended_s is None else ended_s,
            step_s=step_s,
            train_s=_number(values, "time/step_train"),
            reward=_number(values, "reward/mean"),
            longest=_number(values, "token/response_length/max"),
            tok_s=_number(values, tok_s),
            workers=_number(values, "fleet/workers"),
            usd=_number(values, "cost/usd_total"),
        )


def _number(values: dict[str, MetricValue], name: str) -> float | None:
    value = values.get(name)
    return float(value) if isinstance(value, int | float) else None


def draw_all(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Draw what there is something to draw of. Raises NoPlottingError if matplotlib is missing."""
    compared: list[tuple[str, Callable[[Sequence[Run]], Figure | None]]] = [
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


def reward_figure(runs: Sequence[Run]) -> "Figure | None":
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


def reward_cost_figure(runs: Sequence[Run]) -> "Figure | None":
    """The same against seconds, and against dollars where the run costs any."""
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
    """Of the last `window` values, fewer at the start."""
    return [fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def _window(num_values: int) -> int:
    return max(2, num_values // 30)


def _about_curve(shown: Sequence[tuple[Run, Sequence[tuple[float, float]]]]) -> str:
    longest = max(len(points) for _, points in shown)
    if longest > _MAX_DOTS:
        return f"pale: every step; bold: mean of the last {_window(longest)}"
    first, last = shown[0][1][0][1], shown[0][1][-1][1]
    return f"from {first:.3g} to {last:.3g}" if len(shown) == 1 else "a dot a step"


# Steps


def steps_figure(run: Run) -> "Figure | None":
    """A bar a step, by its kind; dots are the training in it."""
    steps = [one for one in run.steps if one.step_s is not None]
    if not steps:
        return None
    figure, axes = new_figure(10.0, 4.2)
    unit = unit_for(max(one.step_s or 0.0 for one in steps))
    for kind, colour in KINDS.items():
        ones = [one for one in steps if one.kind == kind]
        if ones:
            mean_s = fmean(one.step_s or 0.0 for one in ones)
            label = f"{kind} round, mean {mean_s:,.3g} s"
            heights = [(one.step_s or 0.0) / unit.seconds for one in ones]
            axes.bar([one.step for one in ones], heights, 0.8, color=colour, label=label)
    trained = [(one.step, one.train_s / unit.seconds) for one in steps if one.train_s is not None]
    if any(train_s for _, train_s in trained) and len(trained) <= 2 * _MAX_DOTS:
        mark: dict[str, Any] = {"color": TRAINER, "markeredgecolor": "white", "markersize": 6, "zorder": 3}
        axes.plot(*zip(*trained, strict=True), "s", label="training in it", **mark)
    axes.grid(axis="y", color=GRID)
    axes.set_xlim(steps[0].step - 0.7, steps[-1].step + 0.7)
    whole_numbers(axes)
    about = "from the end of the step before to the end of this one"
    set_titles(axes, f"Time of each step: {run.title}", about, "step", f"time ({unit.name})")
    legend_below(axes)
    return figure


def longest_figure(runs: Sequence[Run]) -> "Figure | None":
    """The longest answer trained in each step; of one run coloured by the kind of round, else by run."""
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
    caps = [run.account.config.max_new_tokens for run, _ in shown if run.account is not None]
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


def workers_figure(runs: Sequence[Run]) -> "Figure | None":
    """Tokens a second of each step against its mean number of remote workers."""
    shown = [(run, points) for run in runs if (points := _known((one.workers, one.tok_s) for one in run.steps))]
    if not shown:
        return None
    figure, axes = new_figure(7.5, 4.8)
    for number, (run, points) in enumerate(shown):
        colour = SEVERAL[number % len(SEVERAL)]
        x, y = [point[0] for point in points], [point[1] for point in points]
        axes.scatter(x, y, 30, color=colour, alpha=0.55, label=f"a step of {run.title}", linewidths=0, zorder=3)
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


def timeline_figure(run: Run) -> "Figure | None":
    """One row a worker, coloured by what it did; crosses are workers that were lost."""
    account = run.account
    if account is None or not account.timeline.rows:
        return None
    names = row_order(account)
    unit = unit_for(account.now - account.started_at)
    figure, axes = new_figure(12.0, min(_MAX_TIMELINE_INCHES, 2.1 + 0.3 * len(names)))

    def place(moment: float) -> float:
        return (moment - account.started_at) / unit.seconds

    visible = _VISIBLE_SHARE * place(account.now)
    seen: dict[str, None] = {}
    for row, name in enumerate(names):
        bars: dict[str, list[tuple[float, float]]] = {}
        for span in account.timeline.rows[name]:
            bars.setdefault(span.activity, []).append((place(span.start_s), (span.end_s - span.start_s) / unit.seconds))
        for activity, spans in bars.items():
            if any(width > visible for _, width in spans):
                seen[activity] = None
            axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=ACTIVITIES[activity].colour, linewidth=0)
    marks = [*_mark_ends(axes, account, names, place), *_mark_away(axes, account, place)]
    if len(account.lines) <= _MAX_STEP_LINES:
        for line in account.lines:
            axes.axvline(place(line.trained_at), color=INK, linewidth=0.5, alpha=0.35)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    first = min((span.start_s for spans in account.timeline.rows.values() for span in spans), default=account.now)
    axes.set_xlim(min(0.0, place(first)), max(place(account.now), 1e-9))
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    about = "thin lines: a step ends" if 0 < len(account.lines) <= _MAX_STEP_LINES else ""
    set_titles(axes, f"What every worker did: {run.title}", about, f"time ({unit.name})", "")
    activity_legend(figure, seen, marks)
    return figure


def row_order(account: Account) -> list[str]:
    """The trainer's own first, then as they came."""
    local = {life.worker for life in account.lives if life.local}
    came = {life.worker: number for number, life in reversed([*enumerate(account.lives)])}
    return sorted(account.timeline.rows, key=lambda name: (name not in local, came.get(name, -1)))  # type: ignore[arg-type]


def _mark_ends(axes: "Axes", account: Account, names: Sequence[str], place: Callable[[float], float]) -> list[Any]:
    handles: list[Any] = []
    looks: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("lost", "lost", {"marker": "x", "color": ACTIVITIES[LEFT].colour, "markersize": 8, "markeredgewidth": 2.2}),
        (
            "left",
            "left, all handed over",
            {"marker": "|", "color": _LEFT_COLOUR, "markersize": 12, "markeredgewidth": 2.2},
        ),
    )
    for ending, words, look in looks:
        ends = [(life.worker, life.ended_at) for life in account.lives if life.ending == ending]
        if ends:
            x = [place(at) for _, at in ends if at is not None]
            y = [names.index(worker) for worker, _ in ends]
            handles += axes.plot(x, y, linestyle="", label=words, zorder=5, clip_on=False, **look)
    return handles


def _mark_away(axes: "Axes", account: Account, place: Callable[[float], float]) -> list[Any]:
    bands = [
        axes.axvspan(place(start), place(end), color="#000000", alpha=0.12, linewidth=0, label="manager away", zorder=4)
        for start, end in account.away
    ]
    return [bands[0]] if bands else []


# What all of them need


def _known(points: Iterable[tuple[float | None, float | None]]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if x is not None and y is not None]


def _names(shown: Sequence[tuple[Run, object]]) -> str:
    names = [run.title for run, _ in shown]
    return names[0] if len(names) == 1 else f"{len(names)} runs"
