"""The virtual clock and what is due on it. Things due at one moment happen in the order in which they were put down."""

import heapq
from collections.abc import Callable

from polyrl.ids import Seconds

Action = Callable[[], None]


class Agenda:
    def __init__(self) -> None:
        self.now: Seconds = 0.0
        self._due: list[tuple[Seconds, int, Action]] = []
        self._num_put = 0

    def at(self, at: Seconds, action: Action) -> None:
        """Do it then; now, if then has passed."""
        self._num_put += 1
        heapq.heappush(self._due, (max(at, self.now), self._num_put, action))

    def later(self, seconds: Seconds, action: Action) -> None:
        self.at(self.now + seconds, action)

    def next_at(self) -> Seconds | None:
        return self._due[0][0] if self._due else None

    def do_next(self) -> None:
        self.now, _, action = heapq.heappop(self._due)
        action()
