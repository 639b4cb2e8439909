"""The source of a version for each worker, chosen so that the trainer's egress stays nearly constant as a fleet grows.

The trainer serves `trainer_uploads` workers at once; every other worker takes the version from a peer that has it, or
is just receiving it (chunks are passed on as they are verified), each serving `peer_uploads`. A worker without a source
waits for one; workers that pass nothing on come last, or all would wait for them. A worker that failed to pull from a
peer gets that version from the trainer, however many others do; nobody is sent to a peer with which two have failed. A
worker whose pull failed tries again after a growing pause, and keeps its old version meanwhile.
"""

import heapq
from collections.abc import Iterable

from msgspec import Struct

from polyrl.ids import Version
from polyrl.scheduling.core.fleet import Worker
from polyrl.scheduling.core.parameters import WeightDeliveryConfig
from polyrl.scheduling.core.samples import NO_VERSION

TRAINER = -1


class PlannedPull(Struct, frozen=True, gc=False):
    worker: int
    source: int
    """A seat, or TRAINER."""
    why: str


def plan_pulls(
    wanting: Iterable[Worker], fleet: Iterable[Worker], newest: Version, config: WeightDeliveryConfig
) -> list[PlannedPull]:
    """A source for each worker in `wanting` that can have one now: who failed with a peer first, then relays."""
    wanting = sorted(wanting, key=lambda worker: (not worker.failed_with_peer, not worker.relays))
    if not wanting:
        return []
    fleet = list(fleet)
    uploads: dict[int, int] = {TRAINER: 0}
    for worker in fleet:
        if worker.pulling != NO_VERSION:
            uploads[worker.source] = uploads.get(worker.source, 0) + 1
    feeds = {worker.seat: worker.source for worker in fleet if worker.pulling == newest}
    able = [worker.seat for worker in fleet if _can_serve(worker, newest)] if config.relay else []
    holders = frozenset(worker.seat for worker in fleet if worker.version == newest)
    servers = [(uploads.get(seat, 0), seat) for seat in able if _is_fed(seat, feeds, holders)]
    heapq.heapify(servers)
    from_trainer = uploads[TRAINER]
    pulls: list[PlannedPull] = []
    for worker in wanting:
        if worker.failed_with_peer or from_trainer < config.trainer_uploads:
            from_trainer += 1
            pulls.append(PlannedPull(worker.seat, TRAINER, "from the trainer"))
        else:
            source = _take_peer(servers, worker.seat, config.peer_uploads)
            if source is None:
                break
            pulls.append(PlannedPull(worker.seat, source, "from a peer that has it or is getting it"))
        if config.relay and worker.may_relay:
            heapq.heappush(servers, (uploads.get(worker.seat, 0), worker.seat))
    return pulls


def _can_serve(worker: Worker, newest: Version) -> bool:
    has_it = newest in (worker.version, worker.pulling)
    is_there = worker.state != "draining" and not worker.unheard and not worker.is_closed
    return has_it and is_there and worker.may_relay and not worker.local


def _is_fed(seat: int, feeds: dict[int, int], holders: frozenset[int]) -> bool:
    """Whether the chain of sources from here ends at a holder or at the trainer, not at one that waits for a source.

    Without this, a worker that lost its source could be sent to one that pulls from it, and both wait for ever.
    """
    while seat in feeds:
        seat = feeds[seat]
    return seat == TRAINER or seat in holders


def _take_peer(servers: list[tuple[int, int]], own: int, max_uploads: int) -> int | None:
    """The peer with the fewest uploads that is not the worker itself; counts one more for it."""
    if not servers or servers[0][0] >= max_uploads:
        return None
    num, seat = heapq.heappop(servers)
    if seat != own:
        heapq.heappush(servers, (num + 1, seat))
        return seat
    other = _take_peer(servers, own, max_uploads)
    heapq.heappush(servers, (num, seat))
    return other


def retry_after_s(num_failures: int, config: WeightDeliveryConfig) -> float:
    return min(config.max_retry_s, config.retry_s * 2.0 ** (num_failures - 1))
