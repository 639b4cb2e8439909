"""The laws, re-derived from nothing but the state. Under test they are checked after every event.

Every redundant count and index is computed anew here and compared; then the conservation laws are added up. A law that
does not hold is a bug of the scheduler, whatever the environment did.
"""

import math

from polyrl.errors import LawViolation
from polyrl.ids import SampleId, Seconds, Version, show_sample
from polyrl.scheduling.core.desk import ON_DESK, Desk
from polyrl.scheduling.core.fleet import Worker
from polyrl.scheduling.core.samples import ASKED, NO_LEASE, NO_VERSION, Round, TrackedGroup, TrackedSample
from polyrl.scheduling.parts import episodes, failures, leases
from polyrl.scheduling.rules.staleness import newest_step, oldest_version
from polyrl.scheduling.rules.tail_batching import num_extra
from polyrl.scheduling.scheduler import Scheduler

LEASED = ("leased", "stopping")
RUNNING = ("unhosted", "playing", "waiting", *LEASED)


def check(scheduler: Scheduler, now: Seconds) -> None:
    """Raise LawViolation, naming the law, if one does not hold."""
    desk = scheduler.desk
    _check_desk(desk)
    for sample in desk.samples.values():
        _check_sample(desk, sample)
    for group in desk.groups.values():
        if group.step == ASKED:
            _check_asked(desk, group)
        else:
            _check_group(desk, group)
    for round_ in desk.rounds.values():
        _check_round(desk, round_)
    _check_queue(desk, desk.asked, "what was asked")
    _check_leases(desk)
    _check_fleet(desk, now)
    _check_hosts(desk, now)
    _check_scoring(desk)
    _check_prompts(desk)
    _check_sums(desk)
    _check_rest(desk)


def _law(holds: bool, message: str) -> None:
    if not holds:
        raise LawViolation(message)


def _check_desk(desk: Desk) -> None:
    """Check that the desk's objects are those of the saved state: all code reaches them through the desk."""
    for name in ON_DESK:
        _law(getattr(desk, name) is getattr(desk.state, name), f"the desk's {name} are not the state's")
    _law(desk.seats is desk.state.fleet.seats, "the desk's seats are not the fleet's")


def _check_sample(desk: Desk, sample: TrackedSample) -> None:
    """Check a sample. Messages are made only for a law that is broken: this runs for every sample after every event."""
    group = desk.groups.get(sample.group)
    if group is None:
        raise LawViolation(f"{_name(sample)} has no group")
    if not 0 <= sample.num_tokens <= desk.config.max_new_tokens:
        raise LawViolation(f"{_name(sample)} has {sample.num_tokens} tokens")
    state = sample.state
    leased = state in LEASED
    if leased != (sample.lease != NO_LEASE):
        raise LawViolation(f"{_name(sample)} is {state} with lease {sample.lease}")
    if leased and sample.worker not in desk.seats:
        raise LawViolation(f"{_name(sample)} is leased to an empty seat {sample.worker}")
    if leased and sample.version == NO_VERSION:
        raise LawViolation(f"{_name(sample)} is leased and written by no version")
    oldest = oldest_version(group.step, desk.config.max_staleness)
    if sample.num_tokens and state != "discarded" and sample.version < oldest:
        raise LawViolation(f"{_name(sample)} of step {group.step} has tokens of version {sample.version}")
    waits_for_stop = ("hand_over", sample.lease) in desk.deadlines.entries
    if waits_for_stop != (state == "stopping"):
        raise LawViolation(f"{_name(sample)} is {state}, hand-over deadline: {waits_for_stop}")


def _name(sample: TrackedSample) -> str:
    return f"sample {show_sample(sample.id)}"


def _check_group(desk: Desk, group: TrackedGroup) -> None:
    name = f"group {group.id}"
    samples = [desk.samples[one] for one in group.sample_ids()]
    kept = [one.state for one in samples if one.kept]
    scored, alive = kept.count("scored"), len(kept) - kept.count("discarded")
    _law(group.id in desk.rounds[group.step].groups, f"{name} is not in its round")
    _law(group.num_scored == scored, f"{name} counts {group.num_scored} scored, has {scored}")
    _law(group.need <= alive, f"{name} needs {group.need} samples, {alive} can still be trained")
    running = sum([one.state in RUNNING for one in samples])
    if group.state == "open":
        _law(group.num_generated < group.need, f"{name} has {group.num_generated} answers and is still open")
        _law(running > 0, f"{name} is open and nothing of it runs or waits")
    elif group.state != "claimed":
        _law(running == 0, f"{name} is {group.state} and still generates")
        _law(scored == group.need, f"{name} is {group.state} with {scored} of {group.need} scored")
    elif desk.config.rounds.tail_batching != "designated":
        _law(running == 0, f"{name} has its place and still generates")


def _check_asked(desk: Desk, group: TrackedGroup) -> None:
    name = f"asked group {group.id}"
    states = [desk.samples[one].state for one in group.sample_ids()]
    _law(group.id in desk.asked.groups, f"{name} is not among those that were asked")
    _law(all(one in ("waiting", *LEASED, "generated") for one in states), f"{name} has samples that are {states}")
    _law(any(one != "generated" for one in states), f"{name} is answered and not closed")
    for one in group.sample_ids():
        worker = desk.seats.get(desk.samples[one].worker)
        _law(worker is None or not worker.local, f"{name} is generated on the trainer's own devices")


def _check_round(desk: Desk, round_: Round) -> None:
    name = f"round {round_.step}"
    state = desk.state
    groups = [desk.groups[one] for one in round_.groups]
    _check_queue(desk, round_, name)
    for domain in range(len(round_.quotas)):
        mine = [group for group in groups if group.domain == domain]
        still_open = sum(group.state == "open" for group in mine)
        _law(round_.num_open[domain] == still_open, f"{name} counts {round_.num_open[domain]} open, has {still_open}")
        _law(round_.claims[domain] == len(mine) - still_open, f"{name} counts {round_.claims[domain]} claims")
        _law(round_.claims[domain] <= round_.quotas[domain], f"{name} has more claims than places")
        if still_open:
            _law(round_.claims[domain] < round_.quotas[domain], f"{name} has open groups and no place for them")
        _law(len(mine) >= round_.quotas[domain], f"{name} can never fill its {round_.quotas[domain]} places")
    ready = sum(group.state == "ready" for group in groups)
    delivered = sum(group.state in ("delivered", "taken") for group in groups)
    _law(round_.num_ready == ready, f"{name} counts {round_.num_ready} ready, has {ready}")
    _law(round_.num_delivered == delivered, f"{name} counts {round_.num_delivered} delivered, has {delivered}")
    complete = ready + delivered == sum(round_.quotas)
    _law((round_.closed_at is not None) == complete, f"{name} is closed: {round_.closed_at}, complete: {complete}")
    _law(not (desk.config.streaming and ready), f"{name} holds {ready} complete groups back")
    _law(round_.step <= newest_step(state.published, desk.config.max_staleness), f"{name} opened too early")


def _check_queue(desk: Desk, round_: Round, name: str) -> None:
    samples = [desk.samples[one] for group in round_.groups for one in desk.groups[group].sample_ids()]
    waiting = [one for one in samples if one.state == "waiting"]
    _law(round_.num_waiting == len(waiting), f"{name} counts {round_.num_waiting} waiting, has {len(waiting)}")
    leased = sum([one.state in LEASED for one in samples])
    _law(round_.num_leased == leased, f"{name} counts {round_.num_leased} leased, has {leased}")
    unhosted = [one.id for one in samples if one.state == "unhosted"]
    returning: dict[int, dict[SampleId, None]] = {}
    for sample in waiting:
        if sample.host >= 0 and not sample.num_failures and (sample.target >= 0 or sample.num_tokens):
            returning.setdefault(sample.target, {})[sample.id] = None
    _law(all(seat in desk.seats for seat in returning if seat >= 0), f"{name} has episodes that wait for the dead")
    _law(round_.returning == returning, f"{name} has other episodes that wait for their worker than it says")
    _law(round_.num_unhosted == len(unhosted), f"{name} counts {round_.num_unhosted} unhosted, has {len(unhosted)}")
    without_host = frozenset(one for waiting in round_.unhosted.values() for one in waiting)
    _law(without_host.issuperset(unhosted), f"{name} has episodes that wait in no queue for a host")
    playing = sum(one.state == "playing" for one in samples)
    _law(round_.num_playing == playing, f"{name} counts {round_.num_playing} playing, has {playing}")
    queued = frozenset(round_.fresh) | frozenset(one for _, one in round_.resumed)
    for one in waiting:
        if not one.num_failures and one.id not in queued:
            raise LawViolation(f"{_name(one)} waits in no queue")
    failed = [one.id for one in waiting if one.num_failures]
    _law(sorted(round_.failed) == failed, f"{name} has other samples that failed and wait than it says")


def _check_leases(desk: Desk) -> None:
    state = desk.state
    derived = {one.lease: one.id for one in desk.samples.values() if one.lease != NO_LEASE}
    _law(
        {lease: one.id for lease, one in desk.leases.items()} == derived, "the index of leases is not what samples say"
    )
    _law(all(lease < state.next_lease for lease in derived), "a lease from the future")
    by_worker = {lease: one for worker in desk.seats.values() for lease, one in worker.leases.items()}
    _law(by_worker == derived, "what workers hold is not what samples say")
    for worker in desk.seats.values():
        _law(list(worker.leases) == sorted(worker.leases), f"leases of {worker.name} are out of order")
        for lease in worker.leases:
            if desk.leases[lease].worker != worker.seat:
                raise LawViolation(f"lease {lease} is not at {worker.name}")


def _check_fleet(desk: Desk, now: Seconds) -> None:
    state = desk.state
    fleet = state.fleet
    _law(fleet.by_name == {worker.name: seat for seat, worker in fleet.seats.items()}, "names and seats differ")
    remote = sum(not worker.local and worker.state != "draining" for worker in fleet.seats.values())
    _law(fleet.num_remote == remote, f"the fleet counts {fleet.num_remote} remote workers, has {remote}")
    _law(
        fleet.local_seats == [seat for seat, worker in fleet.seats.items() if worker.local],
        "the seats of local workers are not what the fleet says",
    )
    choosable = [seat for seat, worker in fleet.seats.items() if worker.may_take and worker.credit > 0]
    _law(desk.router.valid_seats() == sorted(choosable), "the router's workers are not those with credit")
    for worker in fleet.seats.values():
        name = f"worker {worker.name}"
        _law(("heartbeat", worker.seat) in desk.deadlines.entries, f"{name} is not missed if it dies")
        stall = ("stall", worker.seat) in desk.deadlines.entries
        _law(stall == bool(worker.leases), f"{name} has {len(worker.leases)} leases, stall deadline: {stall}")
        pull = ("pull", worker.seat) in desk.deadlines.entries
        _law(pull == (worker.pulling != NO_VERSION), f"{name} pulls {worker.pulling}, deadline: {pull}")
        _law(worker.version <= state.published, f"{name} holds an unpublished version")
        if worker.pulling != NO_VERSION and worker.source != -1:
            _law(worker.source in fleet.seats, f"{name} pulls from an empty seat")
            _law(not _pulls_from_itself(fleet.seats, worker), f"{name} pulls, by others, from itself")
        if any(
            desk.leases[one].group not in desk.asked.groups for one in worker.leases
        ):  # asked ones run on over a pull
            _law(worker.state in ("active", "draining"), f"{name} has samples and is {worker.state}")
        if worker.local:
            switching = ("switch", worker.seat) in desk.deadlines.entries
            expected = worker.duty in ("to_training", "to_generating")
            _law(switching == expected, f"{name} is {worker.duty}, switch deadline: {switching}")
        _law(worker.since <= now, f"{name} is paid beyond now")


def _check_hosts(desk: Desk, now: Seconds) -> None:
    hosts, waits = desk.hosts, desk.deadlines.entries
    _law(hosts.by_name == {host.name: seat for seat, host in hosts.seats.items()}, "hosts' names and seats differ")
    played = {one.id: one.host for one in desk.samples.values() if one.host >= 0}
    by_host = {one: host.seat for host in hosts.seats.values() for one in host.episodes}
    _law(by_host == played, "what hosts play is not what samples say")
    for host in hosts.seats.values():
        _law(len(host.episodes) <= host.slots, f"host {host.name} plays more episodes than it has places")
        _law((("host_drain", host.seat) in waits) == host.draining, f"host {host.name} drains without a deadline")
        _law(host.since <= now, f"host {host.name} is paid beyond now")
    if any(domain.environment for domain in desk.config.domains):
        for sample in desk.samples.values():
            _check_episode(desk, sample)
    else:
        _law(not played, "a host plays, and no domain has an environment")


def _check_episode(desk: Desk, sample: TrackedSample) -> None:
    group, waits, state = desk.groups[sample.group], desk.deadlines.entries, sample.state
    is_hosted = sample.host >= 0
    is_episode = group.step != ASKED and bool(desk.environment_of(group.domain))
    if is_hosted != (is_episode and state in RUNNING[1:]):
        raise LawViolation(f"{_name(sample)} is {state} at host {sample.host}")
    if ("episode", sample.id) in waits and not is_hosted:
        raise LawViolation(f"{_name(sample)} is not played, and given up when it has been played too long")
    if is_hosted and sample.id not in desk.state.playtimes:
        raise LawViolation(f"{_name(sample)} is played without a clock")
    if (("turn", sample.id) in waits) != (state == "playing"):
        raise LawViolation(f"{_name(sample)} is {state}, and its environment's move is waited for, or not")
    if is_hosted and sample.call_start > sample.num_tokens:
        raise LawViolation(f"{_name(sample)} has fewer tokens than before its call")


def _pulls_from_itself(seats: dict[int, Worker], worker: Worker) -> bool:
    source = seats.get(worker.source)
    for _ in seats:
        if source is None or source.pulling == NO_VERSION:
            return False
        if source is worker:
            return True
        source = seats.get(source.source)
    return True


def _check_scoring(desk: Desk) -> None:
    queued = frozenset(one for _, one in desk.scoring.queue)
    _law(len(desk.scoring.running) <= desk.config.rewards.slots, "more rewards run than the pool has places")
    _law(not desk.scoring.running or ("reward", 0) in desk.deadlines.entries, "rewards run without a deadline")
    for one in desk.scoring.running:
        sample = desk.samples.get(one)
        _law(
            sample is not None and sample.state == "scoring", f"a reward runs for {show_sample(one)}, which is {sample}"
        )
    for sample in desk.samples.values():
        if sample.state == "generated" and desk.config.rewards.as_finished and sample.group not in desk.asked.groups:
            raise LawViolation(f"sample {show_sample(sample.id)} was not sent to be scored")
        if sample.state == "scoring" and sample.id not in desk.scoring.running and sample.id not in queued:
            raise LawViolation(f"sample {show_sample(sample.id)} waits for a reward that does not run")


def _check_prompts(desk: Desk) -> None:
    state = desk.state
    tail, config = state.tail, desk.config
    keys = [(group.domain, group.epoch, group.prompt) for group in desk.groups.values() if group.step != ASKED]
    keys += [(d, one.epoch, one.prompt) for d, waiting in enumerate(tail.deferred) for one in waiting]
    _law(len(keys) == len(frozenset(keys)), "a prompt is in two places")
    for d, waiting in enumerate(tail.deferred):
        quota = config.domains[d].prompts_per_step
        most = quota + max(num_extra(config.rounds, tail.factors, quota), _most_extra(config.rounds.adaptive, quota))
        if config.max_staleness == 0:
            _law(
                len(waiting) < most or not waiting,
                f"domain {d} has {len(waiting)} deferred prompts, {most} is too many",
            )
        for one in waiting:
            often = one.times_deferred == 1
            _law(often, f"prompt {one.prompt} waits and was deferred {one.times_deferred} times")
            _law(one.first_deferred_step >= 0, f"prompt {one.prompt} waits since no step")


def _most_extra(adaptive: bool, quota: int) -> int:
    return quota if adaptive else 0


def _check_sums(desk: Desk) -> None:
    ledger = desk.ledger
    open_samples = [one for one in desk.samples.values() if one.state != "discarded"]
    gone = ledger.tokens_kept + ledger.tokens_answered + sum(ledger.tokens_discarded.values())
    tokens = gone + sum(one.num_tokens for one in open_samples)
    _law(ledger.tokens_arrived == tokens, f"{ledger.tokens_arrived} tokens arrived, {tokens} are accounted for")
    ended = ledger.samples_trained + ledger.samples_answered + sum(ledger.samples_discarded.values())
    samples = ended + len(open_samples)
    _law(ledger.samples_started == samples, f"{ledger.samples_started} samples started, {samples} are accounted for")
    deferred = sum(map(len, desk.state.tail.deferred))
    num_groups = len(desk.groups) - len(desk.asked.groups)
    prompts = ledger.prompts_trained + sum(ledger.prompts_dropped.values()) + deferred + num_groups
    _law(ledger.prompts_started == prompts, f"{ledger.prompts_started} prompts started, {prompts} are accounted for")


def _check_rest(desk: Desk) -> None:
    due = desk.scores_due or desk.place_due or desk.rounds_due or desk.pulls_due or desk.devices_due or desk.hosts_due
    _law(not due, "something was left undone at the end of an event")
    if desk.state.paused:
        return
    for round_ in desk.rounds.values() if desk.hosts.seats else ():
        for sample_id in _unhosted(desk, round_):
            waiting = desk.samples[sample_id]
            domain = desk.groups[waiting.group].domain
            room = episodes.choose_host(desk, waiting, desk.environment_of(domain))
            _law(room is None, f"an episode of domain {domain} waits although a host has room for it")
    shares = leases.local_level(desk) < math.inf
    for round_ in (desk.asked, *desk.rounds.values()):
        is_asked = round_ is desk.asked
        oldest = Version(0) if is_asked else oldest_version(round_.step, desk.config.max_staleness)
        if round_.num_waiting > len(round_.failed):
            room = desk.router.has_room(oldest, remote=is_asked or shares)
            _law(not room, f"{'an asked' if is_asked else 'a'} sample waits although a worker has room for it")
        for first in round_.failed[:1]:
            group = desk.groups[desk.samples[first].group]
            others = failures.others(desk, group)
            sound = [one for one in others if not one.is_doubtful]
            proven = [one for one in sound if one.is_proven and desk.state.rules >= 3]
            room = any(one.credit > 0 for one in proven or sound)
            room = room and not group.num_again  # it may wait for the workers that are believed
            _law(not room, "a sample that failed waits although a worker that never did has room for it")


def _unhosted(desk: Desk, round_: Round) -> list[SampleId]:
    ids = [one for group in round_.groups for one in desk.groups[group].sample_ids()]
    return [one for one in ids if desk.samples[one].state == "unhosted"]
