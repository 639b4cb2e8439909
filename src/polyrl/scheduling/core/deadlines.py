"""Deadlines: every wait for the outside has one, with a name.

The dictionary is the truth; the heap finds the earliest entry and may hold outdated ones. Pushing a deadline back, as
every heartbeat does, is one dictionary write: the heap entry is renewed when it comes up.
"""

import heapq
from typing import Literal

from polyrl.ids import Seconds

WaitName = Literal[
    "heartbeat",
    "unheard",
    "stall",
    "hand_over",
    "pull",
    "retry_pull",
    "switch",
    "notice",
    "drain",
    "reward",
    "seed",
    "balance",
    "turn",
    "episode",
    "host_drain",
]
Wait = tuple[WaitName, int]
"""The name of a wait, and its object: a seat of a worker or a host, a lease, a sample or a step."""


class Deadlines:
    def __init__(self, entries: dict[Wait, Seconds] | None = None) -> None:
        self.entries: dict[Wait, Seconds] = {} if entries is None else entries
        self._heap: list[tuple[Seconds, Wait]] = [(at, wait) for wait, at in self.entries.items()]
        heapq.heapify(self._heap)

    def set(self, wait: Wait, at: Seconds) -> None:
        known = self.entries.get(wait)
        self.entries[wait] = at
        if known is None or at < known:
            heapq.heappush(self._heap, (at, wait))

    def postpone(self, seconds: Seconds) -> None:
        """Move all deadlines but those of notices: a machine is taken away on time."""
        for wait in self.entries:
            if wait[0] != "notice":
                self.entries[wait] += seconds
        self._heap = [(at, wait) for wait, at in self.entries.items()]
        heapq.heapify(self._heap)

    def clear(self, wait: Wait) -> None:
        self.entries.pop(wait, None)

    def earliest(self) -> Seconds | None:
        """Return the next moment at which something is due."""
        heap, entries = self._heap, self.entries
        while heap:
            at, wait = heap[0]
            due = entries.get(wait)
            if due == at:
                return at
            heapq.heappop(heap)
            if due is not None and due > at:
                heapq.heappush(heap, (due, wait))
        return None

    def pop_due(self, now: Seconds) -> Wait | None:
        """Take out one wait that is over, earliest first."""
        at = self.earliest()
        if at is None or at > now:
            return None
        _, wait = heapq.heappop(self._heap)
        del self.entries[wait]
        return wait
