"""The source of a version for each worker, chosen so that the trainer's egress stays nearly constant as a fleet grows.

The trainer serves `trainer_uploads` workers at once; every other worker takes the version from a peer that has it, or
is just receiving it (chunks are passed on as they are verified), each serving `peer_uploads`. A worker without a source
waits for one; workers that pass nothing on come last, or all would wait for them.

A region is a name that workers give; those without one are near the trainer. A version enters a region once: while a
peer of its own region has it or is getting it, a worker waits for that peer rather than pull over the long link.

A worker that failed to pull from a peer gets that version from the trainer, even beyond `trainer_uploads`; a peer with
which two workers have failed serves no more. A worker whose pull failed tries again after a growing pause, and keeps
its old version meanwhile.
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
    """Choose a source for each worker in `wanting` that can have one now: first those that failed with a peer, then
    relays, those of regions before others."""
    wanting = sorted(wanting, key=lambda worker: (not worker.failed_with_peer, not worker.relays, not worker.region))
    if not wanting:
        return []
    uploads = _count_uploads(fleet := list(fleet))
    servers = _servers(fleet, uploads, newest) if config.relay else {}
    from_trainer = uploads.get(TRAINER, 0)
    pulls: list[PlannedPull] = []
    for worker in wanting:
        near = servers.setdefault(worker.region, [])
        source = _take_peer(near, config.peer_uploads) if worker.region and not worker.failed_with_peer else None
        if source is not None:
            pulls.append(PlannedPull(worker.seat, source, "from a peer of its region that has it or is getting it"))
        elif worker.failed_with_peer or (from_trainer < config.trainer_uploads and not (worker.region and near)):
            from_trainer += 1
            pulls.append(PlannedPull(worker.seat, TRAINER, "from the trainer"))
        elif worker.region and near:
            continue  # rather than over the long link: its region's peers have more to serve than they may
        elif (source := _take_peer(servers.get("", []), config.peer_uploads)) is not None:
            pulls.append(PlannedPull(worker.seat, source, "from a peer that has it or is getting it"))
        else:
            continue
        if config.relay and worker.may_relay:
            heapq.heappush(near, (uploads.get(worker.seat, 0), worker.seat))
    return pulls


def _count_uploads(fleet: list[Worker]) -> dict[int, int]:
    """Return the pulls under way, by the seat of their source."""
    uploads: dict[int, int] = {}
    for worker in fleet:
        if worker.pulling != NO_VERSION:
            uploads[worker.source] = uploads.get(worker.source, 0) + 1
    return uploads


def _servers(fleet: list[Worker], uploads: dict[int, int], newest: Version) -> dict[str, list[tuple[int, int]]]:
    """By region, a heap of the uploads and seat of each worker that others may pull from."""
    fed = _fed(fleet, newest)
    servers: dict[str, list[tuple[int, int]]] = {}
    for worker in fleet:
        if worker.seat in fed and _can_serve(worker):
            servers.setdefault(worker.region, []).append((uploads.get(worker.seat, 0), worker.seat))
    for heap in servers.values():
        heapq.heapify(heap)
    return servers


def _can_serve(worker: Worker) -> bool:
    is_there = worker.state != "draining" and not worker.unheard and not worker.is_closed
    return is_there and worker.may_relay and not worker.local


def _fed(fleet: list[Worker], newest: Version) -> dict[int, bool]:
    """Return the seats from which the chain of sources ends at a holder or at the trainer, not at a worker without a
    source.

    Without this, a worker that lost its source could be sent to its own puller, and both would wait for ever.
    """
    feeds = {worker.seat: worker.source for worker in fleet if worker.pulling == newest}
    known = {TRAINER: True} | {worker.seat: True for worker in fleet if worker.version == newest}
    for first in list(feeds):
        seat = first
        chain: list[int] = []
        while seat not in known and seat in feeds:
            chain.append(seat)
            known[seat] = False  # a circle ends here
            seat = feeds[seat]
        known.update(dict.fromkeys(chain, known.get(seat, False)))
    return {seat: True for seat, is_fed in known.items() if is_fed}


def _take_peer(servers: list[tuple[int, int]], max_uploads: int) -> int | None:
    """Take the peer with the fewest uploads, and count one more for it."""
    if not servers or servers[0][0] >= max_uploads:
        return None
    num, seat = servers[0]
    heapq.heapreplace(servers, (num + 1, seat))
    return seat


def retry_after_s(num_failures: int, config: WeightDeliveryConfig) -> float:
    return min(config.max_retry_s, config.retry_s * 2.0 ** (num_failures - 1))
