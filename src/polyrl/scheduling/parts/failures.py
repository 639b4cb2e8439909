"""Assign the fault for a failed lease: to the worker, the group or the sample.

    a sample fails on a worker --> it waits for one that has not failed its group, if such a one can write
        it is handed over without a request             --> a failure too: it would come back at once, for ever
        it stalls, or gets a token now and then         --> a failure too
        its worker is lost before any token of it and any answer
                                                        --> a failure too, while a worker with an answer is there
        it is refused with another worker's tokens      --> it begins anew without them, which settles the fault;
                                                            a failure too, unless the refusing worker is in doubt
        another worker answers the group                --> the worker's: given up after `max_failures` such groups
        another refuses it too, or there is no other    --> the group's: dropped as a whole
        the sample fails `max_failures` times           --> the sample's: its group goes on without it
            neither counts while only workers without an answer have failed it, and another one is there or can come
    the trainer rejects `max_failures` groups for what a worker wrote --> the worker's: given up

Rules kept here: a failure is held against a worker once per group, and only when another worker has answered the group;
an answer of its own clears all its failures. So neither a prompt that engines refuse nor weights that give NaN cost a
worker its place. Samples lost with an engine's death are held against no worker, unless the engine dies repeatedly
(membership.py).

A process with a worker token can join under many names, and fail every sample under each. So a failure reported by a
worker without an answer costs a sample nothing while another worker is still to try it; the same report by two workers
with answers is believed.
"""

from polyrl.ids import Version
from polyrl.scheduling.core.desk import Desk
from polyrl.scheduling.core.events import LeaseEnd
from polyrl.scheduling.core.fleet import Worker
from polyrl.scheduling.core.samples import ASKED, Round, TrackedGroup, TrackedSample
from polyrl.scheduling.rules.staleness import oldest_version

_PROVEN_FIRST_SINCE = 3
"""The first rules that prefer workers that have answered: a stranger may join under as many names as it likes."""
_PROVEN_FIRST_FOR_SILENT_SINCE = 7
"""The first rules that do so for samples of workers that bring nothing."""


def note(desk: Desk, worker: Worker, group: TrackedGroup) -> None:
    """Note that a worker failed a sample of this group. The fault is assigned later."""
    if worker.seat not in group.failed_on:
        group.failed_on.append(worker.seat)
    if group.id not in worker.failed_groups:
        worker.failed_groups = [one for one in worker.failed_groups if one in desk.groups]  # others were dropped
        worker.failed_groups.append(group.id)


def keeps(desk: Desk, worker: Worker, sample: TrackedSample) -> None:
    """Count a failure of a worker that keeps a sample without progress: another worker gets the sample."""
    sample.num_failures += 1
    note(desk, worker, desk.groups[sample.group])


def is_unproven(desk: Desk, worker: Worker) -> bool:
    """Return whether a worker has brought no answer, while a worker with answers can take its samples over.

    Otherwise one process could join under many names, get the same samples under each, and let each time-out pass.
    """
    if desk.state.rules < _PROVEN_FIRST_FOR_SILENT_SINCE or worker.is_proven or not worker.leases:
        return False
    return any(one.is_proven and one.state != "draining" for one in desk.seats.values())


def has_failed(desk: Desk, worker: Worker, sample: TrackedSample, reason: LeaseEnd) -> bool:
    """Return whether a lease that ended for this reason counts as a failure."""
    if reason == "handed_over":
        return sample.state != "stopping" and desk.state.rules > 0
    return not (worker.down and sample.num_tokens > sample.moved_at)  # what kills an engine does so at its start


def is_inherited(desk: Desk, sample: TrackedSample, reason: LeaseEnd) -> bool:
    """Return whether the tokens that a worker was to go on from may be what it refused: it writes none before it
    refuses."""
    shown = sample.group in desk.asked.groups or sample.host >= 0  # a client, or an environment, has seen them
    return reason == "refused" and sample.num_tokens > 0 and not shown and desk.state.rules > 0


def rejected(desk: Desk, worker: Worker) -> bool:
    """Note that the trainer rejected a group for what this worker wrote. Return whether the worker is to be given
    up."""
    worker.num_rejected += 1
    worker.has_answered = worker.is_believed = False
    return worker.num_rejected >= desk.config.fleet_rules.max_failures and worker.state != "draining"


def answered(desk: Desk, worker: Worker, group: TrackedGroup) -> list[Worker]:
    """Note that a worker answered a sample of this group. Return the workers to give up for having failed it."""
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
    if _is_to_be_tried(desk, group):
        return ""
    return "a second worker refused it" if len(group.failed_on) > 1 else "the only worker that is there refused it"


def fails_for_good(desk: Desk, sample: TrackedSample, group: TrackedGroup) -> bool:
    """Return whether a sample that was just failed is not tried any more."""
    if sample.num_failures < desk.config.fleet_rules.max_failures:
        return False
    return desk.state.rules < _PROVEN_FIRST_SINCE or group.step == ASKED or not _is_to_be_tried(desk, group)


def _is_to_be_tried(desk: Desk, group: TrackedGroup) -> bool:
    """Return whether the group is to be tried by another worker, whose word counts for more than that of the workers
    that failed it."""
    if desk.state.rules < _PROVEN_FIRST_SINCE:
        return len(group.failed_on) < 2 and bool(others(desk, group))
    num_proven = sum(seat in desk.seats and desk.seats[seat].is_proven for seat in group.failed_on)
    if others(desk, group):
        return num_proven < 2
    return num_proven == 0 and _is_awaited(desk, group)


def _is_awaited(desk: Desk, group: TrackedGroup) -> bool:
    """Return whether a worker is there that may write the group later: it pulls weights, say, or its devices train.

    A worker that never has is waited for while it fetches its first version, which has a deadline.
    """
    return any(
        (one.is_proven or (one.state == "pulling" and one.num_pull_failures == 0))
        and one.state != "draining"
        and one.seat not in group.failed_on
        and not (group.step == ASKED and one.local)
        for one in desk.seats.values()
    )


def others(desk: Desk, group: TrackedGroup) -> list[Worker]:
    """Return the workers that can generate and have not failed the group, with or without room for it now."""
    return [one for one in _able(desk, group) if one.seat not in group.failed_on]


def choose(desk: Desk, sample: TrackedSample, group: TrackedGroup) -> Worker | None:
    """Return the worker for a sample that failed; None when all candidates are full, or the right one is not there."""
    with_room = [one for one in _candidates(desk, group) if one.credit > 0]
    if not with_room:
        return None
    wanted = next((one for one in with_room if one.seat == sample.target), None)
    return wanted or min(with_room, key=lambda one: (len(one.leases) / one.capacity, one.spot, one.seat))


def _candidates(desk: Desk, group: TrackedGroup) -> list[Worker]:
    """Return the workers that a failed sample may go to.

    A prompt that is written again goes to workers of which answers were trained, and waits for them: under a new name
    answers are soon made up. Otherwise, workers without any failure come first, those that have answered before the
    rest; then workers that have not failed this group, then all others. Without this order, several workers that fail
    everything would be the least loaded and get the sample one after the other.
    """
    willing = others(desk, group)
    sound = [one for one in willing if not one.is_doubtful]
    if desk.state.rules < _PROVEN_FIRST_SINCE:
        return sound or willing or _able(desk, group)
    if group.num_again and ((believed := [one for one in sound if _is_believed(one)]) or _believed_come(desk, group)):
        return believed
    if found := [one for one in sound if one.is_proven] or sound or willing:
        return found
    able = _able(desk, group)
    return [one for one in able if one.is_proven] or ([] if _is_awaited(desk, group) else able)


def _is_believed(worker: Worker) -> bool:
    return worker.local or worker.is_believed


def _believed_come(desk: Desk, group: TrackedGroup) -> bool:
    """Return whether a worker may write the group later of which answers were trained: its devices train now, say."""
    able = [one.seat for one in _able(desk, group)]
    return any(
        _is_believed(one)
        and one.state != "draining"
        and not (one.down or one.is_doubtful or one.num_pull_failures)
        and one.seat not in group.failed_on
        and one.seat not in able
        for one in desk.seats.values()
    )


def waits_for_another(desk: Desk, round_: Round) -> bool:
    """Return whether the first sample that failed waits for a worker that does not generate now."""
    if desk.state.rules < _PROVEN_FIRST_SINCE or not round_.failed:
        return False
    return not _candidates(desk, desk.groups[desk.samples[round_.failed[0]].group])


def _able(desk: Desk, group: TrackedGroup) -> list[Worker]:
    is_asked = group.step == ASKED
    oldest = Version(0) if is_asked else oldest_version(group.step, desk.config.max_staleness)
    return [
        one for one in desk.seats.values() if one.may_take and one.version >= oldest and not (is_asked and one.local)
    ]
