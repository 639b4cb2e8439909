"""Groups that were delivered and that the trainer does not train on, or not with all of their samples.

Rules kept here: a group that is rejected is dropped, and the workers whose tokens it is rejected for are counted, and
given up in the end. The prompt of such a group is written again: it is not at fault, and a process that joins under
several names had a round lose all of its prompts, and the run end. A fresh prompt takes its place, as often as a round
may be refilled, where the trainer's own workers alone are named, which are never given up, and after `max_failures`
times: while no worker is there that is believed, a round would be written for ever. A sample that has no reward as part
of its group leaves it; the trainer, which alone knows the others' rewards, decides whether they are enough. News of a
group that is over, or that was told before, is late.
"""

from polyrl.ids import Seconds
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.desk import Desk
from polyrl.scheduling.core.samples import TrackedGroup
from polyrl.scheduling.parts import devices, failures, leases, membership, rounds

WRITTEN_AGAIN = 11
"""The first rules by which a prompt is written again whose group was rejected for what a worker wrote."""


def group_rejected(desk: Desk, event: e.GroupRejected, now: Seconds) -> None:
    group = desk.groups.get(event.group)
    if group is None or not _is_delivered(group):
        desk.ledger.late_news += 1
        return
    blamed = [desk.seats.get(desk.state.fleet.by_name.get(name, -1)) for name in event.blamed]
    is_ours = all(worker is not None and worker.local for worker in blamed)
    is_enough = group.num_again >= desk.config.fleet_rules.max_failures or desk.state.rules < WRITTEN_AGAIN
    end = rounds.drop_group if is_ours or is_enough else rounds.write_again
    end(desk, group, desk.rounds[group.step], "filtered", event.reason, now)
    for worker in blamed:
        if worker is not None and not worker.local and failures.rejected(desk, worker):
            why = f"{worker.num_rejected} groups were rejected for what it wrote, the last for {event.reason}"
            membership.lose(desk, worker, why, now, tell=True, rejoin=False)
            devices.arm_window(desk, now)


def group_unscored(desk: Desk, event: e.GroupUnscored, now: Seconds) -> None:
    group = desk.groups.get(event.group)
    there = [] if group is None or not _is_delivered(group) else [desk.samples[one] for one in group.sample_ids()]
    leaving = [one for one in there if one.state == "scored" and one.id in event.samples]
    if group is None or not leaving:
        desk.ledger.late_news += 1
        return
    round_ = desk.rounds[group.step]
    if len(leaving) == group.num_scored:
        rounds.drop_group(desk, group, round_, "reward_failed", event.reason, now)
        return
    for sample in leaving:
        leases.discard_sample(desk, sample, round_, "reward_failed", event.reason, now)
    group.num_scored -= len(leaving)
    group.need -= len(leaving)


def _is_delivered(group: TrackedGroup) -> bool:
    return group.state in ("delivered", "taken")
