"""Leases, each one sample in one worker's hands: given, ended, taken back, handed over.

Rules kept here: a sample has at most one lease; a lease is never reused; the tokens of a lost lease that have arrived
are kept, and the sample is resumed after them. An aborted lease is over at once; anything its worker still sends of it
is late news.
"""

import heapq
import math

from polyrl.ids import LeaseId, SampleId, Seconds, Version
from polyrl.scheduling.core.commands import Abort, ForgetTokens, Generate, HandOver, ReleaseWorker
from polyrl.scheduling.core.desk import Desk
from polyrl.scheduling.core.fleet import Worker, settle
from polyrl.scheduling.core.ledger import DiscardCause
from polyrl.scheduling.core.samples import NO_LEASE, NO_VERSION, Round, TrackedGroup, TrackedSample
from polyrl.scheduling.parts import failures, hosting
from polyrl.scheduling.rules.staleness import oldest_version

_ANY_VERSION = Version(0)
_ALTERNATES = 10
"""The first rules by which clients that ask without a pause leave rounds half of the places."""
_MOST_PASSED = 256
"""Episodes that are placed before the first in line is given to another worker than its own, and computed again."""
_MORE_THAN_WERE_LOST = 1_000_000
"""Leases that no driver gives between two writes that reach the disk."""


def place_waiting(desk: Desk, now: Seconds) -> None:
    """Give waiting samples to workers with credit: asked ones, then earlier rounds; moved samples before fresh ones."""
    if desk.state.paused:
        return
    desk.failed_wait = False
    if desk.asked.num_waiting and _asked_goes_first(desk):
        _place_asked(desk, now)
    level = local_level(desk)
    if level < math.inf:
        local = desk.state.fleet.local()
        desk.router.cap(level, local)
        _place_rounds(desk, now)
        desk.router.cap(math.inf, local)
    else:
        _place_rounds(desk, now)
    if desk.asked.num_waiting and desk.state.rules >= _ALTERNATES:
        _place_asked(desk, now, is_rest=True)


def _asked_goes_first(desk: Desk) -> bool:
    """Return whether what was asked goes before rounds: not where it had the last place that a round waited for."""
    return desk.state.rules < _ALTERNATES or not desk.asked.num_passed or not _has_waiting(desk)


def _has_waiting(desk: Desk) -> bool:
    return any(one.num_waiting for one in desk.rounds.values())


def local_level(desk: Desk) -> float:
    """Return the load up to which local workers take samples: their share, while others of them turn to generating."""
    num_changing = capacity = held = 0
    for worker in desk.state.fleet.local():
        changes = worker.duty == "to_generating" and worker.state == "active" and not worker.down and not worker.unheard
        if changes or worker.may_take:
            num_changing += changes
            capacity += worker.capacity
            held += len(worker.leases)
    if not num_changing or desk.state.rules < 8:
        return math.inf
    return (held + sum(round_.num_waiting for round_ in desk.rounds.values())) / capacity


def _place_rounds(desk: Desk, now: Seconds) -> None:
    groups = desk.groups
    choose = desk.router.choose
    with_credit = desk.router.loads
    for round_ in desk.rounds.values():
        if not round_.num_waiting:
            continue
        if round_.failed:
            _place_failed(desk, round_, now)
        if not with_credit:
            continue
        min_version = oldest_version(round_.step, desk.config.max_staleness)
        while round_.num_waiting > len(round_.failed) and with_credit:
            sample = _first_waiting(desk.samples, round_)
            group = groups[sample.group]
            worker = None if sample.target < 0 else desk.router.take(sample.target, min_version)
            if worker is None:
                worker = choose(min_version, -1 if sample.num_tokens else group.prefix_worker)
                if worker is None:
                    break
                if round_.returning:
                    sample = _instead(desk, round_, sample, worker.seat)
                    group = groups[sample.group]
            _grant(desk, sample, group, round_, worker, now)


def _instead(desk: Desk, round_: Round, sample: TrackedSample, seat: int) -> TrackedSample:
    """Return the sample that a worker gets: the first, unless another worker has its prompt in the cache. Then an
    episode of this worker, or a fresh sample, goes first, for a limited number of times. Episodes whose worker is gone
    come before all."""
    orphans = round_.returning.get(-1)
    if orphans is not None:
        return desk.samples[next(iter(orphans))]
    if sample.host >= 0 and sample.target >= 0 and round_.num_passed < _MOST_PASSED:
        own = round_.returning.get(seat)
        other = _first_fresh(desk.samples, round_) if own is None else desk.samples[next(iter(own))]
        if other is not None:
            round_.num_passed += 1
            return other
    round_.num_passed = 0
    return sample


def _place_asked(desk: Desk, now: Seconds, *, is_rest: bool = False) -> None:
    """Place asked samples: any version may write them, but not the trainer's own devices (asking.py).

    While samples of a round wait, one asked sample is placed after each of theirs; `is_rest`: the places left are of no
    use to a round.
    """
    asked, router = desk.asked, desk.router
    alternates = desk.state.rules >= _ALTERNATES and not is_rest and _has_waiting(desk)
    if asked.failed:
        _place_failed(desk, asked, now)
    while asked.num_waiting > len(asked.failed):
        sample = _first_waiting(desk.samples, asked)
        group = desk.groups[sample.group]
        worker = router.choose(_ANY_VERSION, -1 if sample.num_tokens else group.prefix_worker, remote=True)
        if worker is None:
            return
        _grant(desk, sample, group, asked, worker, now)
        if alternates:
            asked.num_passed = 1
            return
    asked.fresh.clear()
    asked.resumed.clear()


def _place_failed(desk: Desk, round_: Round, now: Seconds) -> None:
    """Place failed samples in order. There may be thousands: while the first finds no worker, no other is tried."""
    while round_.failed:
        sample = desk.samples[round_.failed[0]]
        group = desk.groups[sample.group]
        worker = failures.choose(desk, sample, group)
        if worker is None:
            if not desk.failed_wait and desk.state.rules >= 3:  # it may be the trainer's devices that it waits for
                desk.devices_due = True
            desk.failed_wait = True
            return
        del round_.failed[0]
        _grant(desk, sample, group, round_, worker, now)


def _first_waiting(samples: dict[SampleId, TrackedSample], round_: Round) -> TrackedSample:
    """Return the sample to place next. There is one: `num_waiting` says so."""
    resumed = round_.resumed
    while resumed:
        sample = samples.get(resumed[0][1])
        if sample is not None and sample.num_tokens == -resumed[0][0] and _waits_here(sample):
            return sample
        heapq.heappop(resumed)
    sample = _first_fresh(samples, round_)
    assert sample is not None
    return sample


def _first_fresh(samples: dict[SampleId, TrackedSample], round_: Round) -> TrackedSample | None:
    fresh = round_.fresh
    while fresh:
        sample = samples.get(fresh[-1])
        # As `_waits_here`, without a call: every sample comes this way.
        if sample is not None and sample.num_tokens == 0 and sample.state == "waiting" and not sample.num_failures:
            return sample
        fresh.pop()
    return None


def _waits_here(sample: TrackedSample) -> bool:
    """Return whether the sample waits in `fresh` or `resumed`: samples that failed wait elsewhere."""
    return sample.state == "waiting" and not sample.num_failures


def _grant(desk: Desk, sample: TrackedSample, group: TrackedGroup, round_: Round, worker: Worker, now: Seconds) -> None:
    state = desk.state
    seat, num_tokens = worker.seat, sample.num_tokens
    if not worker.leases:
        settle(worker, desk.ledger, now)
        worker.last_tokens_at = now
        desk.deadlines.set(("stall", seat), now + desk.config.fleet_rules.stall_timeout_s / 2)
        look_later(desk, now)
    lease = state.next_lease
    state.next_lease += 1  # pyright: ignore[reportAttributeAccessIssue]  a call of LeaseId is not free here
    sample.state = "leased"
    sample.lease = lease
    sample.worker = seat
    sample.seen_tokens = -1
    if round_.returning:
        _forget_return(round_, sample)
    sample.target = -1
    version = sample.version
    if version == NO_VERSION or worker.version < version:
        sample.version = worker.version
    desk.leases[lease] = sample
    worker.leases[lease] = sample.id
    worker.num_granted += 1
    round_.num_waiting -= 1
    round_.num_leased += 1
    if round_ is not desk.asked:
        desk.asked.num_passed = 0
    desk.router.update(worker)
    why = "with its siblings" if group.prefix_worker == seat else "least loaded"
    group.prefix_worker = seat
    again, end = num_tokens, desk.max_new_tokens
    if sample.host >= 0:
        end = sample.call_end
        if sample.writer == seat and num_tokens == sample.call_start:  # it has what it computed then
            why, again = "it answered the last call", 0
    if not worker.local and state.clock.first_remote_at is None and round_ is not desk.asked:
        state.clock.first_remote_at = now
    if again:
        desk.ledger.tokens_reprefilled += again
    desk.commands.append(Generate(worker.name, lease, sample.id, num_tokens, end, why))


def skip_numbers(desk: Desk) -> None:
    """Skip numbers that may be taken already: the driver's last records may be lost with its machine."""
    desk.state.next_lease = LeaseId(desk.state.next_lease + _MORE_THAN_WERE_LOST)


def look_later(desk: Desk, now: Seconds) -> None:
    """Arm the next check whether running samples should move to other workers (balancing.py)."""
    if desk.config.routing.balance and ("balance", 0) not in desk.deadlines.entries:
        desk.deadlines.set(("balance", 0), now + desk.config.routing.balance_interval_s)


def note_tokens(desk: Desk, sample: TrackedSample, num_tokens: int) -> int:
    """Take in a sample's number of tokens; returns how many are new. A smaller number, or one beyond the cap, is
    ignored."""
    cap = desk.max_new_tokens
    gained = (num_tokens if num_tokens < cap else cap) - sample.num_tokens
    if gained <= 0:
        return 0
    sample.num_tokens += gained
    desk.ledger.tokens_arrived += gained
    return gained


def note_length(desk: Desk, sample: TrackedSample, round_: Round, *, finished: bool) -> None:
    """Learn from an answer that ended, or was stopped and would have gone on. Asked samples do not count: their prompts
    are not the run's."""
    if round_ is desk.asked:
        return
    desk.lengths.observe(sample.num_tokens, finished=finished)
    if desk.plans_parallelism:  # how far it ran is what a round is made of, whoever ended it
        desk.state.lengths_by_kind[round_.kind].observe(sample.num_tokens, finished=True)
        round_.farthest = max(round_.farthest, sample.num_tokens)


def end_lease(desk: Desk, sample: TrackedSample, round_: Round, now: Seconds) -> Worker:
    """End a sample's lease, and return the worker that had it."""
    worker = desk.seats[sample.worker]
    lease = sample.lease
    if len(worker.leases) == 1:
        settle(worker, desk.ledger, now)
        desk.deadlines.clear(("stall", worker.seat))
    if sample.state == "stopping":
        desk.deadlines.clear(("hand_over", lease))
    del desk.leases[lease]
    del worker.leases[lease]
    sample.lease = NO_LEASE
    sample.worker = -1
    round_.num_leased -= 1
    if desk.plans_parallelism:
        round_.written_at, round_.waits_for_places = now, bool(desk.scoring.queue)
    if not worker.local and round_ is not desk.asked:
        desk.state.clock.last_remote_at = now
    if worker.state == "draining":
        release_if_drained(desk, worker)
    else:
        desk.router.update(worker)
        desk.place_due = True
        if worker.local:
            desk.devices_due = True
    return worker


def release_if_drained(desk: Desk, worker: Worker) -> None:
    waited_for = ("drain", worker.seat) in desk.deadlines.entries  # not so when it is lost: nobody is there to release
    if worker.state == "draining" and not worker.leases and waited_for:
        desk.commands.append(ReleaseWorker(worker.name, "it has handed everything over"))


def requeue(desk: Desk, sample: TrackedSample, round_: Round, now: Seconds, cause: str) -> None:
    """End a sample's lease before the answer ended; it waits for another worker, from the tokens that have arrived."""
    worker = end_lease(desk, sample, round_, now)
    if sample.num_tokens > sample.moved_at:
        sample.writer = worker.seat
    round_.num_moves += 1
    desk.ledger.count_move(cause)
    is_shown = round_ is desk.asked or sample.host >= 0  # a client, or an environment, has seen some of it
    if cause == "lost" and not desk.config.fleet_rules.migrate and not is_shown:
        desk.ledger.discard_tokens("preemption", sample.num_tokens)
        sample.num_tokens = 0
        sample.version = NO_VERSION
    sample.moved_at = sample.num_tokens
    wait(desk, sample, round_)


def wait(desk: Desk, sample: TrackedSample, round_: Round) -> None:
    """Have a sample wait for a worker, from the tokens that it has."""
    sample.state = "waiting"
    round_.num_waiting += 1
    if sample.host >= 0:
        _expect_return(desk, sample, round_)
    if sample.num_failures:
        round_.failed.append(sample.id)
    elif sample.num_tokens:
        heapq.heappush(round_.resumed, (-sample.num_tokens, sample.id))
    else:
        round_.fresh.append(sample.id)
    desk.place_due = True


def forget_tokens(desk: Desk, sample: TrackedSample, why: str) -> None:
    """Have a sample begin anew when its lease ends."""
    desk.commands.append(ForgetTokens(sample.id, sample.lease, why))
    desk.ledger.discard_tokens("refused", sample.num_tokens)
    sample.num_tokens = sample.moved_at = 0
    sample.version = NO_VERSION


def hand_over(desk: Desk, sample: TrackedSample, why: str, now: Seconds) -> None:
    """Ask for a running sample back, at its current token."""
    if sample.state != "leased":
        return
    sample.state = "stopping"
    worker = desk.seats[sample.worker]
    desk.deadlines.set(("hand_over", sample.lease), now + desk.config.fleet_rules.hand_over_timeout_s)
    desk.commands.append(HandOver(worker.name, sample.lease, why))


def _expect_return(desk: Desk, sample: TrackedSample, round_: Round) -> None:
    """Have a waiting episode return to the worker of its last call, or soon to any worker if that one is gone."""
    if sample.target not in desk.seats:
        sample.target = -1
    if not sample.num_failures and (sample.target >= 0 or sample.num_tokens):
        round_.returning.setdefault(sample.target, {})[sample.id] = None


def worker_gone(desk: Desk, seat: int) -> None:
    """Let the episodes that wait for a lost worker go to others."""
    for round_ in desk.rounds.values():
        for sample_id in list(round_.returning.get(seat, ())):
            sample = desk.samples[sample_id]
            _forget_return(round_, sample)
            _expect_return(desk, sample, round_)


def _forget_return(round_: Round, sample: TrackedSample) -> None:
    """Take a sample off the list of those that wait for the worker of their last call, if it is there."""
    returning = round_.returning.get(sample.target)
    if returning is not None and sample.id in returning:
        del returning[sample.id]
        if not returning:
            del round_.returning[sample.target]


def stop_waiting(round_: Round, sample: TrackedSample) -> None:
    round_.num_waiting -= 1
    _forget_return(round_, sample)
    if sample.num_failures:
        round_.failed.remove(sample.id)


def discard_sample(
    desk: Desk, sample: TrackedSample, round_: Round, cause: DiscardCause, why: str, now: Seconds
) -> None:
    """End a sample untrained, wherever it stands; abort it if it runs. Scoring is cancelled by the caller's part."""
    if sample.host >= 0 or sample.state == "unhosted":
        hosting.stop(desk, sample, round_, why, now)
    if sample.state == "waiting":
        stop_waiting(round_, sample)
    elif sample.lease != NO_LEASE:
        note_length(desk, sample, round_, finished=False)
        lease = sample.lease
        worker = end_lease(desk, sample, round_, now)
        desk.commands.append(Abort(worker.name, lease, why, sample.id, sample.num_tokens, cause))
    sample.state = "discarded"
    desk.ledger.discard(cause, sample.num_tokens)
