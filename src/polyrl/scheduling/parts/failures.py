"""Assign the fault for a failed lease: to the worker, the group or the sample.

    a sample fails on a worker --> it waits for one that has not failed its group, if such a one can write
        it is handed over, and nobody asked             --> a failure too: it would come back at once, for ever
        it is refused with tokens that others wrote     --> it begins anew without them: whose fault they are, shows
                                                            too, unless who refused them is in doubt itself
        another worker answers the group                --> the worker's: given up after `max_failures` such groups
        another refuses it too, or nobody else is there --> the group's: dropped as a whole
        the sample fails `max_failures` times           --> the sample's: its group goes on without it
    the trainer rejects `max_failures` groups for what a worker wrote --> the worker's: given up

Rules kept here: a failure is held against a worker once per group, and only when another worker has answered the group;
an answer of its own clears all its failures. So neither a prompt that engines refuse nor weights that give NaN cost a
worker its place. Samples lost with an engine's death are held against no worker, unless the engine dies repeatedly
(membership.py).
"""

from polyrl.ids import Version
from polyrl.scheduling.core.desk import Desk
from polyrl.scheduling.core.events import LeaseEnd
from polyrl.scheduling.core.fleet import Worker
from polyrl.scheduling.core.samples import ASKED, TrackedGroup, TrackedSample
from polyrl.scheduling.rules.staleness import oldest_version


def note(desk: Desk, worker: Worker, group: TrackedGroup) -> None:
    """Note that a worker failed a sample of this group. The fault is assigned later."""
    if worker.seat not in group.failed_on:
        group.failed_on.append(worker.seat)
    if group.id not in worker.failed_groups:
        worker.failed_groups = [one for one in worker.failed_groups if one in desk.groups]  # others were dropped
        worker.failed_groups.append(group.id)


def has_failed(desk: Desk, worker: Worker, sample: TrackedSample, reason: LeaseEnd) -> bool:
    """Return whether a lease that ended for this reason counts as a failure."""
    if reason == "handed_over":
        return sample.state != "stopping" and desk.state.rules > 0
    return not (worker.down and sample.num_tokens > sample.moved_at)  # what kills an engine does so at its start


def is_inherited(desk: Desk, sample: TrackedSample, reason: LeaseEnd) -> bool:
    """Whether the tokens that a worker was to go on from may be what it refused: it writes none before it refuses."""
    shown = sample.group in desk.asked.groups or sample.host >= 0  # a client, or an environment, has seen them
    return reason == "refused" and sample.num_tokens > 0 and not shown and desk.state.rules > 0


def rejected(desk: Desk, worker: Worker) -> bool:
    """The trainer has rejected a group for what this worker wrote. Returns whether it is to be given up."""
    worker.num_rejected += 1
    return worker.num_rejected >= desk.config.fleet_rules.max_failures and worker.state != "draining"


def answered(desk: Desk, worker: Worker, group: TrackedGroup) -> list[Worker]:
    """A worker has answered a sample of this group. Returns those that are to be given up for having failed it."""
    worker.failed_groups, worker.num_faults = [], 0
    guilty: list[Worker] = []
    for seat in group.failed_on:
        other = desk.seats.get(seat)
        if other is None or group.id not in other.failed_groups:
            continue
        other.failed_groups.remove(group.id)
        other.num_faults += 1
        if other.num_faults >= desk.config.fleet_rules.max_failures and other.state != "draining":  # who drains goes
            guilty.append(other)
    return guilty


def why_given_up(desk: Desk, group: TrackedGroup) -> str:
    """Why a group that was just refused is not tried any more; empty when it is."""
    if len(group.failed_on) > 1:
        return "a second worker refused it"
    return "" if others(desk, group) else "the only worker that is there refused it"


def others(desk: Desk, group: TrackedGroup) -> list[Worker]:
    """Return the workers that can generate and have not failed the group, with or without room for it now."""
    return [one for one in _able(desk, group) if one.seat not in group.failed_on]


def choose(desk: Desk, sample: TrackedSample, group: TrackedGroup) -> Worker | None:
    """Return the worker for a sample that failed; None when all candidates are full.

    Workers without any failure come first, then workers that have not failed this group, then all others. Without this
    order, several workers that fail everything would be the least loaded and get the sample one after the other.
    """
    willing = others(desk, group)
    willing = [one for one in willing if not one.is_doubtful] or willing or _able(desk, group)
    with_room = [one for one in willing if one.credit > 0]
    if not with_room:
        return None
    wanted = next((one for one in with_room if one.seat == sample.target), None)
    return wanted or min(with_room, key=lambda one: (len(one.leases) / one.capacity, one.spot, one.seat))


def _able(desk: Desk, group: TrackedGroup) -> list[Worker]:
    is_asked = group.step == ASKED
    oldest = Version(0) if is_asked else oldest_version(group.step, desk.config.max_staleness)
    return [
        one for one in desk.seats.values() if one.may_take and one.version >= oldest and not (is_asked and one.local)
    ]
