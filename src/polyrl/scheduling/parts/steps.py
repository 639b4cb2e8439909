"""A step's clock: when the trainer worked, when it waited, when the fleet did, and what is learned from it.

After each step the seeding window is corrected, advice on the size of the fleet is given if it changed, and the step's
line goes into the metrics.

Rules kept here: the clock stands still while the trainer validates, and while it or the driver is gone: such time is no
part of a step. A step that is begun anew has waited and trained for nothing.
"""

import math
from collections.abc import Sequence

from msgspec import structs

from polyrl.ids import Seconds, Step, WorkerName
from polyrl.scheduling.core.commands import AdviseFleet, ReportStep, RoundKind
from polyrl.scheduling.core.desk import Desk, TrainerClock
from polyrl.scheduling.core.events import SupplyOffered
from polyrl.scheduling.core.fleet import Worker, settle
from polyrl.scheduling.core.hosts import settle_host
from polyrl.scheduling.core.ledger import StepLine
from polyrl.scheduling.core.samples import Round
from polyrl.scheduling.parts import devices, membership, reshaping, reward_workers, taking
from polyrl.scheduling.rules import adaptive, scaling, seeding, tail_batching
from polyrl.scheduling.rules.autoscaling import ScaledWorker
from polyrl.scheduling.rules.play_limits import TICKS_PER_S
from polyrl.scheduling.rules.seeding import StepTimes

_ADAPT_EVERY = 8
"""Steps after which factors are chosen anew if no long round came: at a factor of 1 none would ever come."""
_MOST_FASTER = 8.0
"""The most by which the trainer's own engines are believed to be faster or slower than a worker."""
_EXPECTED = 8
"""The first rules by which a step's line has the mean length that is expected."""
_TOLD_FACTORS = 9
"""The first rules by which a step's line has the adaptive factors."""
_FORGET_PER_STEP = 0.9
"""How much earlier answers count in the length model after each step: the policy changes."""


def rounds_opened(desk: Desk, opened: list[Round], now: Seconds) -> None:
    for round_ in opened:
        reshaping.round_opened(desk, round_)
    state = desk.state
    if state.last_line is None and len(desk.rounds) == len(opened):
        state.clock.step_began_at = now
    devices.arm_window(desk, now)
    devices.note_seeding(desk, now)
    if not state.fleet.local():
        devices.note_waiting(desk, now)


def published(desk: Desk, now: Seconds) -> None:
    """Take in that the trainer has published. If a round is open already, it now waits for that round's groups."""
    devices.note_waiting(desk, now)


def training_began(desk: Desk, step: Step, worker: WorkerName, now: Seconds) -> None:
    """Take in that a micro-batch was taken, for this local worker's devices or, without a name, for all."""
    clock = desk.state.clock
    if step not in desk.rounds:
        return
    if worker not in clock.busy:
        clock.busy.append(worker)
    devices.note_idle(desk, worker, None)
    if clock.busy_since is None:
        devices.stop_waiting(desk, now)
        clock.busy_since = now


def training_paused(desk: Desk, step: Step, worker: WorkerName, now: Seconds) -> None:
    """Take in that a micro-batch is done. The next may or may not be there."""
    clock = desk.state.clock
    if step not in desk.rounds or clock.busy_since is None:
        return
    clock.busy = [one for one in clock.busy if worker not in ("", one)]
    devices.note_idle(desk, worker, now)
    desk.devices_due = True
    if clock.busy:
        return
    clock.train_s += now - clock.busy_since
    clock.busy_since = None
    devices.note_waiting(desk, now)


def step_restarted(desk: Desk, step: Step, now: Seconds) -> None:
    """Begin the step anew: the trainer has lost its gradients, and the time they took."""
    training_paused(desk, step, WorkerName(""), now)
    taking.give_again(desk, step)
    if step == next(iter(desk.rounds), None):
        clock = desk.state.clock
        clock.wait_train_s = clock.train_s = 0.0
        clock.idle_since = None
        devices.note_waiting(desk, now)


# The clock stands still


def stand_still(desk: Desk, seconds: Seconds, now: Seconds) -> None:
    """Leave an absence of the driver or the trainer out of the step. No second of it is left out twice."""
    seconds = max(0.0, seconds)
    desk.state.clock.skip(seconds, now)
    if desk.state.trainer_away_since is not None and desk.state.rules > 0:
        desk.state.absence_skipped_s += seconds


def validation_began(desk: Desk, now: Seconds) -> None:
    clock = desk.state.clock
    if clock.validating_since is not None:
        return
    devices.stop_waiting(desk, now)
    clock.validating_since = now
    devices.note_seeding(desk, now)
    _mark_validating(desk, now)


def validation_ended(desk: Desk, now: Seconds) -> None:
    clock = desk.state.clock
    if clock.validating_since is None:
        return
    clock.step_began_at += now - clock.validating_since
    clock.validating_since = None
    _mark_validating(desk, now)
    devices.note_seeding(desk, now)
    devices.note_waiting(desk, now)
    devices.arm_window(desk, now)


def _mark_validating(desk: Desk, now: Seconds) -> None:
    for worker in desk.state.fleet.local():
        settle(worker, desk.ledger, now)
        worker.validating = desk.state.clock.validating_since is not None


# A step's end


def step_trained(desk: Desk, step: Step, left_out: Sequence[WorkerName], now: Seconds) -> None:
    state = desk.state
    round_ = desk.rounds.get(step)
    if round_ is None:
        desk.ledger.late_news += 1
        return
    for worker in desk.seats.values():
        settle(worker, desk.ledger, now)
    for host in desk.hosts.seats.values():
        settle_host(host, desk.ledger, now)
    reward_workers.settle_all(desk, now)
    kept_before = desk.ledger.tokens_kept
    num_groups, num_samples, longest = taking.train_taken(desk, round_, left_out, now)
    times = _measure(desk, now)
    _take_window_in_force(desk, round_.kind, times.workers_now)
    learned = seeding.learn(desk.config.seeding, state.seeding[round_.kind], times)
    tokens = desk.ledger.tokens_kept - kept_before
    state.last_line = _line(desk, round_, times, now, num_groups, num_samples, longest, tokens, learned)
    if state.rules >= _EXPECTED:
        expected = desk.lengths.mean(desk.config.max_new_tokens)
        left = tail_batching.watch_bias(desk.config.rounds, state.tail, round_.kind, tokens, num_samples, expected)
        state.last_line = structs.replace(state.last_line, expected_mean=expected, mode_left=left)
    if desk.config.rounds.adaptive and state.rules >= _TOLD_FACTORS:
        factors = state.tail.factors
        its = {"prompt_factor": factors.prompts, "sample_factor": factors.samples}
        state.last_line = structs.replace(state.last_line, **its)
    desk.commands.append(ReportStep(state.last_line))
    _advise(desk, times, state.last_line)
    _foresee_window(desk, round_.kind, times)
    if desk.config.rounds.adaptive and (round_.kind == "long" or step % _ADAPT_EVERY == _ADAPT_EVERY - 1):
        _adapt(desk)
    desk.lengths.age(_FORGET_PER_STEP)
    for known in (*state.turns.values(), *state.plays.values()):
        known.times.age(_FORGET_PER_STEP)
    if desk.times_episodes:
        state.durations.age(_FORGET_PER_STEP)
    if desk.config.parallelism.enabled:
        reshaping.step_trained(desk, round_, now)
        state.lengths_by_kind[round_.kind].age(_FORGET_PER_STEP)
        state.round_lengths[round_.kind].age(_FORGET_PER_STEP)
    _restart_clock(desk, now)
    desk.deadlines.clear(("seed", step))
    membership.refresh_all(desk, now)
    devices.arm_window(desk, now)
    desk.rounds_due = True
    desk.devices_due = True
    desk.place_due = True


def _take_window_in_force(desk: Desk, kind: RoundKind, num_workers: int) -> None:
    """Make sure, with the autoscaler, that the window of this fleet is corrected, not that of the fleet before."""
    learned = desk.state.seeding[kind]
    if desk.config.scaling.enabled and desk.config.seeding.mode == "learned":
        before = learned.t_seed_s
        learned.t_seed_s = scaling.window_s(desk.state.scaling, kind, learned, before, num_workers)
        learned.last_correction_s = learned.last_correction_s if learned.t_seed_s == before else 0.0
        learned.num_workers = num_workers


def _foresee_window(desk: Desk, kind: RoundKind, times: StepTimes) -> None:
    """Take the window, with the autoscaler, from the model of a step: a step whose fleet changed teaches none."""
    learned, model = desk.state.seeding[kind], desk.state.scaling.models.get(kind)
    num, changed = times.workers_now, abs(times.mean_workers - times.workers_now) >= seeding.SAME_FLEET
    if model is not None and changed and num and num not in learned.memory and desk.config.seeding.mode == "learned":
        learned.t_seed_s = model.window_s(num)


def _advise(desk: Desk, times: StepTimes, line: StepLine) -> None:
    """Say how many workers to hold, if that has changed."""
    state, config = desk.state, desk.config.scaling
    seeded_s = state.clock.seeded_s
    if config.enabled:
        advice = scaling.autoscale(state.scaling, config, times, seeded_s, _scaling_facts(desk, line))
    else:
        begin_s = scaling.BEGIN_S if state.rules >= 2 else 0.0
        advice = scaling.advise(state.scaling, config, times, seeded_s, state.fleet.num_remote, begin_s)
    if advice is not None:
        desk.commands.append(AdviseFleet(advice.num_workers, advice.why, advice.let_go))


def _scaling_facts(desk: Desk, line: StepLine) -> scaling.ScalingFacts:
    lines = desk.ledger.workers
    remote = [worker for worker in desk.seats.values() if not worker.local and worker.state != "draining"]
    held = tuple(
        ScaledWorker(
            name=worker.name,
            seat=worker.seat,
            usd_per_hour=lines[worker.name].price_usd_per_hour,
            rate=_full_rate(worker),
            leaves=worker.leaves_at is not None,
        )
        for worker in remote
    )
    return scaling.ScalingFacts(
        held=held,
        now=line.trained_at,
        step=line.step,
        kind=line.kind,
        step_s=line.step_s,
        num_tokens=line.tokens_trained,
        local_speed=_local_speed(desk.state.fleet.local(), remote),
        trainer_usd_per_hour=desk.config.trainer_usd_per_hour,
        spent_usd=sum(one.usd for one in lines.values()),
    )


def _local_speed(local: list[Worker], remote: list[Worker]) -> float:
    """Return the speed of the trainer's own engines over the fleet's, measured with equally many samples at once."""
    most = [max((num for one in group for num in one.speed.samples), default=0.0) for group in (local, remote)]
    here, there = ([one.speed.step_s(min(most)) for one in group if one.speed.samples] for group in (local, remote))
    local_s, remote_s = ([seconds for seconds in group if seconds] for group in (here, there))
    if not local_s or not remote_s:
        return 1.0
    ratio = (sum(remote_s) / len(remote_s)) / (sum(local_s) / len(local_s))
    return min(_MOST_FASTER, max(1.0 / _MOST_FASTER, ratio))


def _full_rate(worker: Worker) -> float:
    """Return the measured tokens a second of a full worker; 0: not measured yet."""
    num = max(1, worker.limit)
    step_s = worker.speed.step_s(num)
    return num / step_s if step_s else 0.0


def supply_offered(desk: Desk, event: SupplyOffered, now: Seconds) -> None:
    """Note the provider's offer, which counts at the end of the step. A worker not yet heard of since the driver was
    away keeps its price: it may still be paid."""
    state, fleet = desk.state.scaling, desk.state.fleet
    state.offered = max(0, event.num_workers)
    if not 0.0 <= event.usd_per_hour < math.inf:
        return
    state.offered_usd_per_hour = event.usd_per_hour
    for name in event.workers:
        worker = fleet.seats.get(fleet.by_name.get(name, -1))
        if worker is not None and not worker.local and not worker.unheard:
            settle(worker, desk.ledger, now)
            desk.ledger.workers[name].price_usd_per_hour = event.usd_per_hour


def _adapt(desk: Desk) -> None:
    tail, config = desk.state.tail, desk.config
    num_prompts = sum(domain.prompts_per_step for domain in config.domains)
    if desk.times_episodes:
        lengths, most = desk.state.durations, round(config.environments.episode_timeout_s * TICKS_PER_S)
    else:
        lengths, most = desk.lengths, config.max_new_tokens
    rules = tail_batching.in_force(config.rounds, tail)
    outlook = adaptive.choose_factors(rules, lengths, tail.correlation.value(), most, num_prompts)
    if outlook is not None:
        tail.factors.prompts, tail.factors.samples = outlook.prompts, outlook.samples


def _measure(desk: Desk, now: Seconds) -> StepTimes:
    state, clock = desk.state, desk.state.clock
    if clock.seeding_since is not None:
        clock.seeded_s += now - clock.seeding_since
    first = clock.step_began_at if clock.first_remote_at is None else clock.first_remote_at
    last = first if clock.last_remote_at is None else clock.last_remote_at
    return StepTimes(
        wait_train_s=clock.wait_train_s,
        wait_remote_s=0.0 if clock.last_remote_at is None else now - last,
        remote_s=last - first,
        train_s=clock.train_s,
        mean_workers=state.fleet.mean_remote(now),
        workers_now=state.fleet.num_remote if clock.last_remote_at is not None else 0,
        num_reserved=len(state.fleet.local()),
    )


def _restart_clock(desk: Desk, now: Seconds) -> None:
    state = desk.state
    state.clock = TrainerClock(step_began_at=now, validating_since=state.clock.validating_since)
    devices.note_seeding(desk, now)
    devices.note_waiting(desk, now)
    state.fleet.restart_mean(now)


def _line(
    desk: Desk,
    round_: Round,
    times: StepTimes,
    now: Seconds,
    num_groups: int,
    num_samples: int,
    longest: int,
    tokens: int,
    learned: str,
) -> StepLine:
    ledger = desk.ledger
    before = ledger.discarded_told
    discarded = {cause: num - before.get(cause, 0) for cause, num in ledger.tokens_discarded.items()}
    ledger.discarded_told = dict(ledger.tokens_discarded)
    return StepLine(
        step=round_.step,
        kind=round_.kind,
        opened_at=round_.opened_at,
        closed_at=now if round_.closed_at is None else round_.closed_at,
        trained_at=now,
        step_s=now - desk.state.clock.step_began_at,
        num_groups=num_groups,
        num_samples=num_samples,
        tokens_trained=tokens,
        tokens_discarded={cause: num for cause, num in discarded.items() if num},
        longest=longest,
        trained_mean=tokens / num_samples if num_samples else 0.0,
        generated_mean=round_.ended_tokens / round_.num_generated if round_.num_generated else 0.0,
        inclusion_by_length=tuple(
            (b, ended, trained)
            for b, (ended, trained) in enumerate(zip(ledger.ended_by_bin, ledger.trained_by_bin, strict=True))
            if ended
        ),
        wait_train_s=times.wait_train_s,
        wait_remote_s=times.wait_remote_s,
        train_s=times.train_s,
        seed_window_s=desk.state.clock.seeded_s,
        seed_window_why=learned,
        predicted_s=round_.predicted_s,
        mean_workers=times.mean_workers,
        num_moves=round_.num_moves,
        usd=ledger.usd(now),
    )
