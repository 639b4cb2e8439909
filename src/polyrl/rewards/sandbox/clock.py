"""The time of one program on the clock: compiling it and all of its cases together.

Rules kept here: a program that is not done in its time is slow, and slow is wrong. The machine is to blame only if the
program has hardly run: less than a tenth of that time is its own. Its own time is what it computed, or the time for
which it was not waiting for a core, whichever is more: threads of its own that wait for each other do not excuse it.
Nor does a sandbox that it has broken: the time of such a run is unknown, and is not counted.
"""

import math
from collections.abc import Callable

from polyrl.rewards.sandbox.slot import RunResult

_LEAST_SHARE = 0.1


class ProgramClock:
    """`within_s`: the time that the program has; none: its cases have limits of their own alone."""

    def __init__(self, within_s: float | None, now: Callable[[], float]) -> None:
        self._within_s, self._now, self._began_at = within_s, now, now()
        self._own_s = self._broken_s = 0.0

    @property
    def passed_s(self) -> float:
        return self._now() - self._began_at

    @property
    def left_s(self) -> float:
        return math.inf if self._within_s is None else self._within_s - self.passed_s

    @property
    def is_starved(self) -> bool:
        """Whether the program has hardly run."""
        return self._own_s < _LEAST_SHARE * (self.passed_s - self._broken_s)

    def count(self, result: RunResult) -> None:
        self._own_s += max(result.cpu_s, result.wall_s - result.queued_s)

    def leave_out(self, broken_s: float) -> None:
        """Forget the time of a run that broke its sandbox."""
        self._broken_s += broken_s
