"""Routing: a sample goes to the least loaded worker with credit, or to one that has its prompt in the cache.

A worker's credit is what its measured plateau, or what it has earned if that is less (credit.py), leaves beside the
samples it has. Samples that find no credit wait with us, not in an engine's queue, so a worker that joins late finds
work. A fresh sample whose siblings run on a worker
follows them (their prompt's cache is there) while that worker is loaded by at most `prefix_imbalance` more than the
least loaded one. While some of the trainer's own workers still turn to generating, the others take no more than their
share of the waiting samples (`cap`): the first to turn would take them all.

The heap may hold outdated entries; each is checked against its worker when it comes up, and all of them go when they
are many. Ties are broken by spot (reserved machines first) and by seat, so a rebuilt router decides as the old one did.
"""

import heapq
import math
from collections.abc import Iterable

from polyrl.ids import Version
from polyrl.scheduling.core.fleet import Worker
from polyrl.scheduling.core.parameters import RoutingConfig

HeapEntry = tuple[float, bool, int]
_OUTDATED = 64
"""Outdated entries that are tolerated: a worker whose load rises and falls without ever coming up would leave some
behind in every round."""


class Router:
    def __init__(self, config: RoutingConfig, seats: dict[int, Worker]) -> None:
        self.config = config
        self._seats = seats
        self._heap: list[HeapEntry] = []
        self._local_level = math.inf
        self.loads: dict[int, float] = {}
        """Workers with credit, by seat: the load that each one's valid entry shows."""
        for worker in seats.values():
            self.update(worker)

    def update(self, worker: Worker) -> None:
        """Say that a worker's load, plateau, state or duty has changed, or that it is gone."""
        seat = worker.seat
        num_leases = len(worker.leases)
        earned = worker.earned
        if (
            num_leases < worker.plateau
            and num_leases < earned
            and worker.state == "active"
            and worker.duty == "generating"
            and not worker.down
            and not worker.unheard
            and not worker.is_closed
            and seat in self._seats
        ):
            slots = worker.slots
            load = num_leases / (slots if slots < earned else earned)
            if worker.local and load >= self._local_level:
                self.loads.pop(seat, None)
                return
            if self.loads.get(seat) != load:
                self.loads[seat] = load
                heapq.heappush(self._heap, (load, worker.spot, seat))
                if len(self._heap) > _OUTDATED + 4 * len(self.loads):
                    self._drop_outdated()
        else:
            self.loads.pop(seat, None)

    def cap(self, level: float, local: Iterable[Worker]) -> None:
        """Give no local worker more than this load, until the next call."""
        self._local_level = level
        for worker in local:
            self.update(worker)

    def _drop_outdated(self) -> None:
        loads = self.loads
        self._heap = sorted({entry for entry in self._heap if loads.get(entry[2]) == entry[0]})  # sorted, it is a heap

    def choose(self, min_version: Version, prefix_worker: int, *, remote: bool = False) -> Worker | None:
        """Return the worker that takes the next sample, or None when none can. `remote`: not one of the trainer's
        own."""
        skipped: list[HeapEntry] = []
        chosen: Worker | None = None
        heap = self._heap
        while heap:
            entry = heap[0]
            load, _, seat = entry
            if self.loads.get(seat) != load:
                heapq.heappop(heap)
                continue
            worker = self._seats[seat]
            if worker.version < min_version or (remote and worker.local):
                skipped.append(heapq.heappop(heap))
                continue
            chosen = worker
            its_load = self.loads.get(prefix_worker)
            if its_load is not None and its_load <= load + self.config.prefix_imbalance:
                holder = self._seats[prefix_worker]
                chosen = holder if holder.version >= min_version else worker
            break
        for entry in skipped:
            heapq.heappush(heap, entry)
        return chosen

    def take(self, seat: int, min_version: Version) -> Worker | None:
        """Return that worker if it could be chosen now."""
        if seat not in self.loads or self._seats[seat].version < min_version:
            return None
        return self._seats[seat]

    def has_room(self, min_version: Version, *, remote: bool = False) -> bool:
        return self.choose(min_version, -1, remote=remote) is not None

    def valid_seats(self) -> list[int]:
        """Seats that could be chosen, for the invariants."""
        return sorted(self.loads)
