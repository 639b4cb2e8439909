"""Workers come, go, drain and are given up; weights reach them.

Rules kept here: the samples of a worker that is gone, however we learned it, wait again at once, each after its last
token that arrived. A join older than the worker's present seat is refused. No worker waits for a dead peer's weights:
its pullers get another source. A worker counts as active only while it holds a version that some step may still be
trained on. After the driver was away, a worker gets no samples, and no pay for the absence, until it is heard of again:
it may be dead.
"""

import math

from polyrl.ids import Seconds, Step, Version
from polyrl.scheduling.core.commands import Abort, ForgetWorker, PullWeights, StartGenerating
from polyrl.scheduling.core.desk import Desk
from polyrl.scheduling.core.events import EngineBack, WeightsFailed, WeightsInstalled, WorkerJoined
from polyrl.scheduling.core.fleet import Worker, settle
from polyrl.scheduling.core.samples import NO_VERSION, TrackedSample
from polyrl.scheduling.parts import balancing, credit, failures, leases
from polyrl.scheduling.rules import weight_delivery
from polyrl.scheduling.rules.staleness import oldest_version
from polyrl.scheduling.rules.weight_delivery import TRAINER

_LOOK_AGAIN_S = 1.0
MOST_DEATHS = 8


def join(desk: Desk, event: WorkerJoined, now: Seconds) -> bool:
    """Give a worker a seat. False for a join that is repeated late."""
    fleet = desk.state.fleet
    newest_life = fleet.last_incarnations.get(event.worker)
    if newest_life is not None and event.incarnation <= newest_life:
        desk.ledger.late_news += 1
        return False
    seat = fleet.by_name.get(event.worker)
    if seat is not None:
        # Not told: a command goes by name, and would hit the newer process, which knows that the old one is over.
        lose(desk, fleet.seats[seat], "a newer process joined under its name", now, tell=False)
    unknown = event.version is None or event.version > desk.state.published
    line = desk.ledger.worker_line(event.worker, _sane(event.price_usd_per_hour))
    slots = max(1, event.slots)
    worker = Worker(
        seat=fleet.next_seat,
        name=event.worker,
        incarnation=event.incarnation,
        slots=slots,
        spot=event.spot,
        local=event.local,
        num_devices=event.num_devices,
        planned=event.planned,
        kv_tokens=event.kv_tokens,
        since=now,
        version=NO_VERSION if unknown or event.version is None else event.version,
        last_tokens_at=now,
        plateau=slots,
        earned=credit.at_join(desk, line, slots, local=event.local),
        has_stalled=line.num_stalls > 0,
        relays=event.relays,
        region=event.region,
        begun_at=now - _sane(event.starting_s) if desk.config.scaling.enabled else None,
    )
    fleet.next_seat += 1
    fleet.add(worker, now)
    line.num_joins += 1
    unpaid_s = math.inf if line.paid_until is None else now - line.paid_until  # no second of a name is paid twice
    desk.ledger.pay(worker.name, "starting", min(_sane(event.starting_s), unpaid_s))
    desk.deadlines.set(("heartbeat", worker.seat), now + _heartbeat_timeout_s(desk, worker))
    if worker.local:
        worker.version = desk.state.published
        worker.validating = desk.state.clock.validating_since is not None
        worker.duty = "to_generating"
        desk.deadlines.set(("switch", worker.seat), now + desk.config.fleet_rules.switch_timeout_s)
        desk.commands.append(StartGenerating(worker.name, "it has joined"))
    _refresh_state(desk, worker, now)
    desk.pulls_due = True
    desk.devices_due = True
    return True


def _sane(amount: float) -> float:
    """Return a worker's claimed price or uptime, or 0 where it cannot be true: the ledger must stay a sum."""
    return amount if 0.0 <= amount < math.inf else 0.0


def _heartbeat_timeout_s(desk: Desk, worker: Worker) -> Seconds:
    """Return the timeout. A local worker shares a process with a trainer, which may be busy for as long as a change of
    duty may take."""
    rules = desk.config.fleet_rules
    return max(rules.heartbeat_timeout_s, rules.switch_timeout_s) if worker.local else rules.heartbeat_timeout_s


def heard_from(desk: Desk, worker: Worker, now: Seconds, ago_s: Seconds = 0.0) -> None:
    """Move a worker's heartbeat deadline: any message shows that it lives. Deadlines only move later, so the heap need
    not know."""
    if worker.unheard:
        _was_there(desk, worker, now)
    entries = desk.deadlines.entries
    wait = ("heartbeat", worker.seat)
    due = now - ago_s + _heartbeat_timeout_s(desk, worker)
    if due > entries[wait]:
        entries[wait] = due


def _was_there(desk: Desk, worker: Worker, now: Seconds) -> None:
    """Note that a worker stayed while the driver was away: it is paid for that, and gets samples and weights again."""
    worker.unheard = False
    desk.deadlines.clear(("unheard", worker.seat))
    settle(worker, desk.ledger, now)
    desk.router.update(worker)
    desk.place_due = True
    desk.pulls_due = True
    desk.devices_due = True


def nobody_was_late(desk: Desk, away_s: Seconds, grace_s: Seconds, left_at: Seconds, now: Seconds) -> None:
    """Move every deadline, and wait longer for heartbeats: nothing was heard for a while because we were away.

    A worker that left meanwhile is given up when this grace period ends. A worker not yet heard of gets no samples, and
    keeps those it has until another worker can continue them.
    """
    desk.deadlines.postpone(max(0.0, away_s))
    desk.state.fleet.skip(now - left_at)
    desk.devices_due = True
    for seat, worker in desk.seats.items():
        settle(worker, desk.ledger, left_at)
        worker.unheard = True
        desk.router.update(worker)
        timeout_s = _heartbeat_timeout_s(desk, worker)
        desk.deadlines.set(("heartbeat", seat), now + timeout_s + max(0.0, grace_s))
        desk.deadlines.set(("unheard", seat), now + timeout_s)


def let_others_go_on(desk: Desk, worker: Worker, now: Seconds) -> None:
    """Give the samples of a worker that may be dead to others. The worker may still come back."""
    if not worker.leases:
        return
    if any(one.may_take for one in desk.seats.values()):
        _take_back_all(desk, worker, "it was not heard of since we are back", "lost", now)
    else:
        desk.deadlines.set(("unheard", worker.seat), now + _LOOK_AGAIN_S)


def drain(desk: Desk, worker: Worker, why: str, now: Seconds) -> None:
    """Take everything back from a worker, at the current token, and then let it go."""
    if worker.state == "draining":
        return
    settle(worker, desk.ledger, now)
    _stop_pull(desk, worker)
    desk.state.fleet.start_drain(worker, now)
    desk.router.update(worker)
    desk.deadlines.clear(("notice", worker.seat))
    desk.deadlines.set(("drain", worker.seat), now + desk.config.fleet_rules.drain_timeout_s)
    for lease in list(worker.leases):
        leases.hand_over(desk, desk.leases[lease], why, now)
    leases.release_if_drained(desk, worker)
    _resource_pullers(desk, worker)
    desk.place_due = desk.devices_due = True


def lose(desk: Desk, worker: Worker, why: str, now: Seconds, *, tell: bool, rejoin: bool = True) -> None:
    """Remove a worker that is gone, or given up. `tell` the driver if it does not know, and whether it may `rejoin`.

    A drained worker may not, even if it did not hand over in time or was not there to hear of it.
    """
    state = desk.state
    drained = worker.state == "draining"
    settle(worker, desk.ledger, now)
    line = desk.ledger.workers[worker.name]
    line.paid_until = worker.since
    line.num_losses += worker.owes
    if desk.config.scaling.enabled:
        state.scaling.num_lost += not worker.local and (worker.is_taken or not drained)
    for name in ("heartbeat", "unheard", "stall", "pull", "retry_pull", "switch", "notice", "drain"):
        desk.deadlines.clear((name, worker.seat))
    is_unproven, failed_before = failures.is_unproven(desk, worker), worker.failed_groups[:]
    for lease in list(worker.leases):
        sample = desk.leases[lease]
        if is_unproven and sample.num_tokens <= sample.moved_at and sample.group not in failed_before:
            failures.keeps(desk, worker, sample)
        leases.requeue(desk, sample, desk.round_of(sample), now, "lost")
    state.fleet.remove(worker, now)
    desk.router.update(worker)
    leases.worker_gone(desk, worker.seat)
    _resource_pullers(desk, worker)
    forgotten = state.fleet.forget_oldest()
    if forgotten is not None:
        desk.ledger.fold(forgotten)
    desk.place_due = desk.pulls_due = desk.devices_due = True
    if tell:
        desk.commands.append(ForgetWorker(worker.name, why, rejoin and not drained, drained))


def give_up_stalled(desk: Desk, worker: Worker, now: Seconds) -> None:
    """Take samples back that brought no token for too long; give the worker up if that is all of them."""
    desk.deadlines.set(("stall", worker.seat), now + desk.config.fleet_rules.stall_timeout_s)
    held = [desk.leases[lease] for lease in worker.leases]
    if desk.state.trainer_away_since is not None:  # it may be the prompts that are missing
        return
    stalled = [sample for sample in held if sample.seen_tokens == sample.num_tokens]
    all_stall = len(stalled) == len(held)
    if desk.state.rules >= 3 and not worker.local:
        stalled = [sample for sample in held if _is_starved(desk, worker, sample)]
    for sample in held:
        sample.seen_tokens = sample.num_tokens
    if all_stall:
        for sample in held if failures.is_unproven(desk, worker) else ():
            failures.keeps(desk, worker, sample)
        rejoin = credit.may_rejoin(desk, worker)
        lose(desk, worker, "it has samples and brings no token", now, tell=True, rejoin=rejoin)
        return
    if stalled:
        credit.halve(desk, worker)
    for sample in stalled:
        desk.commands.append(
            Abort(worker.name, sample.lease, "it brought no token for too long", sample.id, sample.num_tokens)
        )
        if desk.state.rules >= 3 and not worker.local:
            failures.keeps(desk, worker, sample)
        leases.requeue(desk, sample, desk.round_of(sample), now, "stalled")


def _is_starved(desk: Desk, worker: Worker, sample: TrackedSample) -> bool:
    """Return whether a sample got far less since the last look than its worker's speed gives, or nothing."""
    if sample.seen_tokens < 0:
        return False
    step_s = worker.speed.step_s(len(worker.leases)) or math.inf
    least = desk.config.fleet_rules.stall_timeout_s / step_s / balancing.STARVED
    return sample.num_tokens - sample.seen_tokens < max(1.0, least)


# An engine that dies and comes back while its worker stays


def engine_down(desk: Desk, worker: Worker, now: Seconds) -> None:
    """Give the worker no more samples. It ends those that it has by itself, each after its last token."""
    if worker.down or _dies_too_often(desk, worker, now):
        return
    settle(worker, desk.ledger, now)
    worker.down = True
    desk.router.update(worker)
    desk.place_due = desk.devices_due = True


def _dies_too_often(desk: Desk, worker: Worker, now: Seconds) -> bool:
    """Note a death with samples, give the worker up if there were too many, and return whether it was given up.

    A worker that dies `MOST_DEATHS` times without an answer in between would be the least loaded one each time, and get
    the same samples again. If a sample kills a sound engine, the sample is dropped after `max_failures` deaths
    (failures.py)."""
    if desk.state.rules < 2 or worker.local or not worker.leases:
        return False
    worker.num_deaths += 1
    if worker.num_deaths < MOST_DEATHS:
        return False
    why = f"its engine died {worker.num_deaths} times with samples, and it brought no answer between"
    lose(desk, worker, why, now, tell=True, rejoin=False)
    return True


def engine_back(desk: Desk, worker: Worker, event: EngineBack, now: Seconds) -> None:
    """Take a worker back whose engine runs the version of its start. Leases that it never ended go to others."""
    if worker.state == "draining" or (not worker.down and _dies_too_often(desk, worker, now)):
        return
    settle(worker, desk.ledger, now)
    _take_back_all(desk, worker, "its engine was down", "engine_failed", now)
    if not worker.local:  # that one has what the trainer has
        unknown = event.version is None or event.version > desk.state.published
        worker.version = NO_VERSION if unknown or event.version is None else event.version
    worker.down = False
    _resource_pullers(desk, worker)
    _refresh_state(desk, worker, now)
    desk.router.update(worker)
    desk.pulls_due = True
    desk.place_due = True
    desk.devices_due = True


def _take_back_all(desk: Desk, worker: Worker, why: str, cause: str, now: Seconds) -> None:
    """Take all samples back, each after its last token that arrived; later frames of the worker are late."""
    for lease in list(worker.leases):
        sample = desk.leases[lease]
        desk.commands.append(Abort(worker.name, lease, why, sample.id, sample.num_tokens))
        leases.requeue(desk, sample, desk.round_of(sample), now, cause)


# Weights


def publish(desk: Desk, version: Version, now: Seconds) -> bool:
    """Take in a newer published version. Local workers hold it already. Returns False for a late repetition."""
    if version <= desk.state.published:
        desk.ledger.late_news += 1
        return False
    desk.state.published = version
    for worker in desk.seats.values():
        worker.accused_by, worker.failed_with_peer, worker.bad_source = [], False, False
        if worker.local:
            worker.version = version
        _refresh_state(desk, worker, now)
    desk.pulls_due = True
    desk.rounds_due = True
    return True


def replace(desk: Desk, version: Version, now: Seconds) -> None:
    """Replace a version by another of the same number. Workers that hold or fetch the former one fetch it anew.

    Tokens written with the former one stay: the driver knows which they are.
    """
    for worker in desk.seats.values():
        if worker.version == version:
            settle(worker, desk.ledger, now)
            _take_back_all(desk, worker, "its version was replaced", "replaced", now)
            if not worker.local:  # its weights are the trainer's own
                worker.version = NO_VERSION
            leases.release_if_drained(desk, worker)
        if worker.pulling == version:
            _stop_pull(desk, worker)
        _refresh_state(desk, worker, now)
        desk.router.update(worker)
    desk.pulls_due = True
    desk.place_due = True
    desk.devices_due = True


def _refresh_state(desk: Desk, worker: Worker, now: Seconds) -> None:
    """Update the worker's state: active if its version may still write, otherwise waiting for weights or pulling."""
    if worker.state == "draining":
        return
    usable = worker.version >= oldest_version_wanted(desk) and worker.version != NO_VERSION
    state = "active" if usable else "pulling" if worker.pulling != NO_VERSION else "waiting"
    if state != worker.state:
        settle(worker, desk.ledger, now)
        worker.state = state
        desk.router.update(worker)
        desk.place_due = desk.place_due or usable
        desk.devices_due = True


def refresh_all(desk: Desk, now: Seconds) -> None:
    """Update the states of all workers at the end of a step: which versions may write has changed."""
    for worker in desk.seats.values():
        _refresh_state(desk, worker, now)


def oldest_version_wanted(desk: Desk) -> Version:
    """Return the oldest version that a round not yet trained may be written by."""
    newest = Step(desk.state.published)
    oldest_round = next(iter(desk.rounds), newest)
    return oldest_version(min(newest, oldest_round), desk.config.max_staleness)


def start_pulls(desk: Desk, now: Seconds) -> None:
    """Find a source for every worker that lacks the newest version."""
    state = desk.state
    wanting = [
        worker
        for worker in desk.seats.values()
        if worker.version < state.published
        and worker.pulling == NO_VERSION
        and not worker.local
        and worker.state != "draining"
        and not worker.down
        and not worker.unheard
        and ("retry_pull", worker.seat) not in desk.deadlines.entries
    ]
    pulls = weight_delivery.plan_pulls(wanting, desk.seats.values(), state.published, desk.config.weight_delivery)
    desk.pulls_wait = len(pulls) < len(wanting)
    for pull in pulls:
        worker = desk.seats[pull.worker]
        worker.pulling = state.published
        worker.source = pull.source
        _refresh_state(desk, worker, now)
        desk.deadlines.set(("pull", worker.seat), now + desk.config.fleet_rules.pull_timeout_s)
        source = None if pull.source == TRAINER else desk.seats[pull.source].name
        held = None if worker.version == NO_VERSION else worker.version
        desk.commands.append(PullWeights(worker.name, worker.pulling, source, held, pull.why))


def weights_installed(desk: Desk, worker: Worker, event: WeightsInstalled, now: Seconds) -> None:
    if event.version > desk.state.published or event.version <= worker.version or worker.local:
        desk.ledger.late_news += 1
        return
    worker.version = event.version
    worker.num_pull_failures = 0
    if worker.begun_at is not None:
        desk.state.scaling.saw_ready(now - worker.begun_at)
        worker.begun_at = None
    # While nobody waits for a source, none of a thousand workers that install a version has the fleet looked over.
    due = desk.pulls_due or desk.pulls_wait or worker.version < desk.state.published
    if worker.pulling == event.version:
        _stop_pull(desk, worker)
    _refresh_state(desk, worker, now)
    desk.router.update(worker)
    desk.pulls_due = due
    desk.place_due = True
    desk.devices_due = True


def weights_failed(desk: Desk, worker: Worker, event: WeightsFailed, now: Seconds) -> None:
    """Let the worker keep its version and retry later: at the trainer if it pulled from a peer, and at once if it was
    not even sent there.

    No worker is sent to that peer once a second worker has failed with it. A worker that fails with several sources
    accuses only the last one. A worker that fails with the trainer accuses no source: the fault is its own.
    """
    if worker.pulling != event.version:
        desk.ledger.late_news += 1
        return
    _accuse_source(desk, worker)
    _stop_pull(desk, worker)
    if not event.untried:
        worker.num_pull_failures += 1
        pause = weight_delivery.retry_after_s(worker.num_pull_failures, desk.config.weight_delivery)
        desk.deadlines.set(("retry_pull", worker.seat), now + pause)
    _refresh_state(desk, worker, now)
    _resource_pullers(desk, worker)
    desk.pulls_due = True


def _accuse_source(desk: Desk, worker: Worker) -> None:
    source = desk.seats.get(worker.source)
    if desk.state.rules == 0:
        if source is not None:
            source.bad_source = True
        return
    for other in desk.seats.values():
        if worker.name in other.accused_by:
            other.accused_by.remove(worker.name)
    if source is not None:
        source.accused_by.append(worker.name)
        worker.failed_with_peer = True


def _stop_pull(desk: Desk, worker: Worker) -> None:
    worker.pulling = NO_VERSION
    worker.source = TRAINER
    desk.deadlines.clear(("pull", worker.seat))
    desk.pulls_due = True


def _resource_pullers(desk: Desk, source: Worker) -> None:
    """Find another source for the workers that pulled from this one."""
    if source.version == desk.state.published and source.seat in desk.seats and source.state != "draining":
        return
    for worker in desk.seats.values():
        if worker.pulling != NO_VERSION and worker.source == source.seat:
            _stop_pull(desk, worker)
