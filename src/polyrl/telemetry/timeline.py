"""The timeline of a fleet: spans of activities, one row a worker.

The simulator marks what its machines do; an account of a run (account.py) marks what the journal says of each worker.
"""

from collections.abc import Iterable, Sequence

from msgspec import Struct

from polyrl.ids import Seconds


class Span(Struct, frozen=True):
    """An activity of a machine, from one moment to another."""

    start_s: Seconds
    end_s: Seconds
    activity: str


class Timeline:
    """Spans by machine; a machine that lives again under its name goes on in its row."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Span]] = {}
        self._open: dict[str, tuple[Seconds, str]] = {}

    def mark(self, name: str, activity: str | None, now: Seconds) -> None:
        """Mark what the machine does from now on; None: it is gone."""
        before = self._open.get(name)
        if before is not None:
            if before[1] == activity:
                return
            if now > before[0]:
                self.rows.setdefault(name, []).append(Span(before[0], now, before[1]))
        if activity is None:
            self._open.pop(name, None)
        else:
            self.rows.setdefault(name, [])
            self._open[name] = (now, activity)

    def doing(self, name: str) -> tuple[Seconds, str] | None:
        """Return the machine's activity, and since when; None: it is gone."""
        return self._open.get(name)

    def end(self, now: Seconds) -> None:
        for name in list(self._open):
            self.mark(name, None, now)


def moments_of_going(spans: Sequence[Span], total_s: Seconds) -> list[Seconds]:
    """Return the moments at which a worker ended with nothing right after it, the end of the run aside."""
    nexts = [*(span.start_s for span in spans[1:]), total_s]
    ends = [span.end_s for span in spans]  # none for a machine that was let go at the moment of its start
    return [end for end, then in zip(ends, nexts, strict=False) if then > end and end < total_s]


def seconds_by_activity(spans: Iterable[Span], start_s: Seconds, end_s: Seconds) -> dict[str, float]:
    """Return the seconds of each activity between two moments."""
    seconds: dict[str, float] = {}
    for span in spans:
        within = min(span.end_s, end_s) - max(span.start_s, start_s)
        if within > 0:
            seconds[span.activity] = seconds.get(span.activity, 0.0) + within
    return seconds
