"""The display of a run in a terminal while it goes on; without a terminal, one plain line a step.

    with Progress() as progress:
        progress.show(RunView(name="arithmetic", step=3, ...))     # whenever something changed; costs nothing
        progress.step_done(3, metrics)                             # the step's line, kept above the display

The loop says what is the case in a RunView, made of plain values; `render` is a pure function of it. Drawing is done by
a thread of its own, at most four times a second, so that a long micro-batch does not freeze the clock.

Rules kept here: nothing is wider than the width given, and what is left out is said. Every state has a character of its
own beside its colour. Events are found by comparing one view with the next.
"""

import math
import time
from collections.abc import Callable, Sequence
from statistics import fmean
from types import TracebackType
from typing import Self

from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from polyrl.ids import Seconds
from polyrl.telemetry.looks import ACTIVITIES, KINDS, LEFT, TRAINER, show_seconds, show_tokens
from polyrl.telemetry.metric_names import IMPOSED_LENGTHS
from polyrl.telemetry.metrics import Metrics, show_value, step_fields, step_line

_REFRESH_PER_S = 4.0
_MAX_WORKERS = 12
_MAX_WAITS = 3
_MAX_EVENTS = 4
_MAX_STEP_TIMES = 10
_LABEL = 8
_MAX_BAR = 40
_MAX_NAME = 24
_STATE_WIDTH = 55
"""The words behind a worker's name."""
_EIGHTHS = "▁▂▃▄▅▆▇█"
_DIM = "dim"


class WorkerView(Struct, frozen=True):
    name: str
    state: str
    """An activity of looks.py, or any other word."""
    num_samples: int = 0
    tok_s: float = 0.0
    version: int | None = None
    spot: bool = False
    local: bool = False


class RunView(Struct, frozen=True, kw_only=True):
    """All that the display shows."""

    name: str
    step: int
    num_steps: int | None = None
    kind: str = "short"
    phase: str = ""
    """The trainer's activity, in a word or two."""
    step_began_at: Seconds = 0.0
    """By the clock that the display was given."""
    step_times_s: Sequence[Seconds] = ()
    """Seconds of steps that are done."""
    rewards: Sequence[float] = ()
    """Mean reward of every step that is done."""
    num_groups: int = 0
    """Groups that the step needs."""
    num_generated: int = 0
    num_scored: int = 0
    num_trained: int = 0
    workers: Sequence[WorkerView] = ()
    waits: Sequence[str] = ()
    """Peers that are waited for and since when, longest first."""
    events: Sequence[str] = ()
    """Last one last."""
    usd: float = 0.0


class Progress:
    """The display of one run. `show` and `note` may be called from any thread."""

    def __init__(self, console: Console | None = None, clock: Callable[[], Seconds] = time.monotonic) -> None:
        self._console = Console(highlight=False) if console is None else console
        self._clock = clock
        self._view: RunView | None = None
        self._events: tuple[str, ...] = ()
        """Replaced, never changed: the drawing thread may be reading it."""
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=self._draw, console=self._console, refresh_per_second=_REFRESH_PER_S, transient=True
            )

    @property
    def is_live(self) -> bool:
        return self._live is not None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, view: RunView) -> None:
        """Draw this from now on."""
        if self._view is not None:
            for text in news(self._view.workers, view.workers):
                self.note(text)
        self._view = view

    def note(self, text: str) -> None:
        """Something happened that a person should know of. Said again and again, it is shown once."""
        if not self._events or self._events[-1] != text:
            self._events = (*self._events, text)[-_MAX_EVENTS:]

    def step_done(self, step: int, metrics: Metrics) -> None:
        """Print the one line that is there with and without a terminal."""
        if self._live is None:
            self.say(step_line(step, metrics))
            return
        line = Text()
        for label, figure in step_fields(step, metrics, self._console.width):
            line.append(f"{label} ", _DIM).append(f"{figure}  ", "bold" if label == "reward" else "")
        if metrics.get("rollout/imposed_lengths"):
            line.append(f"({IMPOSED_LENGTHS})", "yellow")
        line.rstrip()
        self.say(line)

    def say(self, text: str | Text) -> None:
        """Print a line that stays, above the display."""
        self._console.print(Text(text) if isinstance(text, str) else text, soft_wrap=True)

    def _draw(self) -> Group:
        view = self._view
        if view is None:
            return Group(Text("starting", style=_DIM))
        shown = replace(view, events=(*view.events, *self._events)[-_MAX_EVENTS:])
        return render(shown, self._console.width, self._clock())


# What the display is made of


def render(view: RunView, width: int, now: Seconds) -> Group:
    """Render the display, no line of it wider than `width`."""
    lines = [_head(view, now), *_reward(view, width), *_round(view, width, now), *_workers(view, width)]
    lines += [_labelled("trainer", Text(view.phase))] if view.phase else []
    lines += [
        _labelled("waits" if number == 0 else "", Text(text)) for number, text in enumerate(view.waits[:_MAX_WAITS])
    ]
    if len(view.waits) > _MAX_WAITS:
        lines.append(_labelled("", Text(f"... and {len(view.waits) - _MAX_WAITS} more waits", style=_DIM)))
    shown = view.events[-_MAX_EVENTS:]
    lines += [_labelled("lately" if number == 0 else "", Text(text)) for number, text in enumerate(shown)]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Group(*lines)


def _labelled(label: str, text: Text) -> Text:
    return Text.assemble((label.ljust(_LABEL + 1), "cyan"), text)


def _head(view: RunView, now: Seconds) -> Text:
    steps = f"step {view.step}" + ("" if view.num_steps is None else f" of {view.num_steps}")
    parts = [view.name, steps, f"{view.kind} round"]
    left_s = eta_s(view, now)
    parts += [] if left_s is None else [f"{show_seconds(left_s)} left"]
    parts += [f"${view.usd:,.2f}" if view.usd >= 1 else f"${view.usd:.4f}"] if view.usd > 0 else []
    return Text("   ".join(parts), style="bold")


def eta_s(view: RunView, now: Seconds) -> Seconds | None:
    """Return the seconds until the last step is done, at the pace of recent steps; None if unknown."""
    if view.num_steps is None or not view.step_times_s:
        return None
    step_s = fmean(view.step_times_s[-_MAX_STEP_TIMES:])
    return max(0.0, step_s * (view.num_steps - view.step) - max(0.0, now - view.step_began_at))


def _reward(view: RunView, width: int) -> list[Text]:
    known = [reward for reward in view.rewards if math.isfinite(reward)]
    if not known:
        return []
    values = f"{show_value(known[-1])}  from {show_value(known[0])}, best {show_value(max(known))}"
    room = max(8, width - _LABEL - len(values) - 4)
    return [_labelled("reward", Text.assemble((sparkline(known, room), KINDS["short"]), "  ", values))]


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw the last values, as many as fit, between the lowest and the highest of them."""
    shown = values[-width:]
    low, high = min(shown), max(shown)
    span = high - low
    if span <= 0:
        return _EIGHTHS[0] * len(shown)
    return "".join(_EIGHTHS[min(7, int((value - low) / span * 8))] for value in shown)


def _round(view: RunView, width: int, now: Seconds) -> list[Text]:
    if view.num_groups <= 0:
        return []
    counts = f"{view.num_trained} trained, {view.num_scored} scored, {view.num_generated} generated"
    words = f"{counts} of {view.num_groups} groups  {show_seconds(max(0.0, now - view.step_began_at))}"
    bar = _bar(view, max(0, min(_MAX_BAR, width - _LABEL - len(words) - 3)))
    return [_labelled("round", Text.assemble(bar, "  " if bar else "", words))]


def _bar(view: RunView, width: int) -> Text:
    """Trained, scored and generated groups, each part behind the one before."""
    parts = (
        (view.num_trained, "█", TRAINER),
        (view.num_scored, "▓", KINDS["short"]),
        (view.num_generated, "▒", KINDS["short"]),
    )
    text, drawn = Text(), 0
    for number, glyph, colour in parts:
        until = max(drawn, min(width, round(number / view.num_groups * width)))
        text.append(glyph * (until - drawn), style=colour)
        drawn = until
    return text.append("░" * (width - drawn), style=_DIM)


def _workers(view: RunView, width: int) -> list[Text]:
    if not view.workers:
        return [_labelled("workers", Text("none", style=_DIM))]
    total = sum(worker.tok_s for worker in view.workers)
    num_remote = sum(not worker.local for worker in view.workers)
    num_local = len(view.workers) - num_remote
    counts = [f"{num_remote} remote"] + ([f"{num_local} local"] if num_local else [])
    lines = [_labelled("workers", Text(f"{', '.join(counts)}; {show_tokens(total)} tokens/s"))]
    longest = max(len(worker.name) for worker in view.workers[:_MAX_WORKERS])
    name_width = max(4, min(longest, _MAX_NAME, width - _LABEL - _STATE_WIDTH))
    lines += [_labelled("", _worker(worker, name_width)) for worker in view.workers[:_MAX_WORKERS]]
    if len(view.workers) > _MAX_WORKERS:
        lines.append(_labelled("", Text(f"... and {len(view.workers) - _MAX_WORKERS} more", style=_DIM)))
    return lines


def _worker(worker: WorkerView, name_width: int) -> Text:
    look = ACTIVITIES.get(worker.state)
    name = worker.name if len(worker.name) <= name_width else worker.name[: name_width - 1] + "…"
    version = "" if worker.version is None else f"v{worker.version}"
    speed = f"{worker.tok_s:,.0f} tok/s" if worker.tok_s > 0 else ""
    samples = _samples(worker) if worker.num_samples else ""
    figures = f" {worker.state:<11}{samples:>12}{speed:>13}  {version:<6} {'spot' if worker.spot else ''}"
    glyph = ("•", "") if look is None else (look.glyph, look.colour)
    return Text.assemble(name.ljust(name_width), " ", glyph, figures.rstrip())


# What happened between two views


def news(before: Sequence[WorkerView], after: Sequence[WorkerView]) -> list[str]:
    """Return the workers that came and went, in words."""
    old = {worker.name: worker for worker in before}
    new = {worker.name: worker for worker in after}
    told: list[str] = []
    for name, worker in old.items():
        now = new.get(name)
        if worker.state != LEFT and (now is None or now.state == LEFT):
            told.append(_farewell(worker))
        elif now is not None and now.state == "draining" and worker.state != "draining":
            told.append(
                f"worker {name} drains: {_samples(worker)} handed over"
                if worker.num_samples
                else f"worker {name} drains"
            )
    for name, worker in new.items():
        if worker.state != LEFT and (name not in old or old[name].state == LEFT):
            told.append(f"worker {name} joined{' (spot)' if worker.spot else ''}")
    return told


def _farewell(worker: WorkerView) -> str:
    if worker.state == "draining" and worker.num_samples == 0:
        return f"worker {worker.name} left"
    if worker.num_samples == 0:
        return f"worker {worker.name} lost: it had no sample"
    return f"worker {worker.name} lost: its {_samples(worker)} moved"


def _samples(worker: WorkerView) -> str:
    return f"{worker.num_samples} sample{'' if worker.num_samples == 1 else 's'}"
