"""The duty of the trainer's own devices: to generate, or to train.

Each step starts with local workers generating. They stop, hand their samples over and train
- when the seeding window is over and there is a worker to hand over to (seeding.py says how long it is);
- one by one, in a round without a fleet, as soon as fewer devices can hold the samples that still run (hand-back);
- when nothing is left for them to generate, or the step's round is complete: their samples of later rounds wait.
They generate again when the step is trained, unless the next round is complete by then, and in mid-step when samples
wait and no other worker can take them, or when there has been nothing to train for a while. Zero remote workers is a
normal state: then they generate the whole round.

A trainer of several replicas has a local worker for each. Each one turns by itself: some train while others generate.
"""

import math

from polyrl.ids import Seconds, WorkerName
from polyrl.scheduling.core.commands import StartGenerating, StartTraining
from polyrl.scheduling.core.desk import Desk
from polyrl.scheduling.core.fleet import Worker, settle
from polyrl.scheduling.core.samples import Round
from polyrl.scheduling.parts import failures, leases
from polyrl.scheduling.rules import scaling, seeding

_RECHECK_S = 2.0
_CROWD = 16
"""More samples than this on each worker that generates are worth coming back for."""
_LOOKS = 2
_SHARED = 8
"""The first rules by which replicas that turn share what waits, and are given back by measured speeds alone."""


def oldest_round(desk: Desk) -> Round | None:
    """Return the round of the step that is trained next."""
    return next(iter(desk.rounds.values()), None)


def arm_window(desk: Desk, now: Seconds) -> None:
    """Set the end of the seeding window, from the round's start and the fleet as it is now."""
    round_ = oldest_round(desk)
    if round_ is None or round_.closed_at is not None:
        return
    desk.deadlines.clear(("seed", round_.step))
    end = _window_end(desk, round_)
    if end < math.inf:
        desk.deadlines.set(("seed", round_.step), max(now, end))


def _window_end(desk: Desk, round_: Round) -> Seconds:
    """Return the end of the window, which starts with the step: when its round opens, or when the step before is
    trained if that is later."""
    span = _window_s(desk, round_)
    return max(round_.opened_at, desk.state.clock.step_began_at) + span


def _window_s(desk: Desk, round_: Round) -> Seconds:
    """Return the length of the window. With the autoscaler, which changes the fleet often, it is that of the fleet as
    it is now."""
    state, config = desk.state, desk.config
    num_workers, learned = state.fleet.num_remote, state.seeding[round_.kind]
    span = seeding.window(config.seeding, learned, num_workers).seconds
    if not config.scaling.enabled or config.seeding.mode != "learned" or num_workers == 0:
        return span
    return scaling.window_s(state.scaling, round_.kind, learned, span, num_workers)


def window_over(desk: Desk, step: int, now: Seconds) -> None:
    """End the seeding window: hand over, unless no worker could go on with the samples."""
    round_ = desk.rounds.get(step)  # type: ignore[call-overload]
    if round_ is None or round_ is not oldest_round(desk):
        return
    if not _somebody_else_generates(desk):
        desk.deadlines.set(("seed", step), now + _RECHECK_S)
        return
    for worker in desk.state.fleet.local():
        if worker.duty == "generating":
            stop_generating(desk, worker, "the seeding window is over", now)


def _somebody_else_generates(desk: Desk) -> bool:
    others = [worker for worker in desk.seats.values() if worker.may_take and not worker.local]
    return any(desk.state.rules < 3 or not worker.is_doubtful for worker in others)


def stop_generating(desk: Desk, worker: Worker, why: str, now: Seconds) -> None:
    """Take a local worker's samples back; when the last one is here, its devices train."""
    worker.duty = "stopping"
    desk.router.update(worker)
    for lease in list(worker.leases):
        leases.hand_over(desk, desk.leases[lease], why, now)
    desk.devices_due = True
    desk.place_due |= desk.state.rules >= _SHARED


def review(desk: Desk, now: Seconds) -> None:
    """Set every local worker to what it should do now. Cheap, and called after any event that may change it."""
    state = desk.state
    local = state.fleet.local()
    if state.clock.seeding_since is not None and all(one.duty in ("training", "to_generating") for one in local):
        note_seeding(desk, now)  # the last one that generated is gone
    if not local:
        return
    round_ = oldest_round(desk)
    for worker in local:
        if worker.duty == "stopping" and not worker.leases:
            _switch(desk, worker, "to_training", "its samples are handed over", now)
        elif worker.duty == "generating" and round_ is not None and _has_nothing_to_generate(desk, worker, round_, now):
            _switch(desk, worker, "to_training", "nothing is left for it to generate", now)
        elif worker.duty == "generating" and worker.leases and round_ is not None and round_.closed_at is not None:
            stop_generating(desk, worker, "the step's round is complete, and these samples are of later ones", now)
        elif worker.duty == "training" and (why := _why_generate(desk, worker, round_, now)) is not None:
            _switch(desk, worker, "to_generating", why, now)
            _renew_window(desk, round_, now)
    if round_ is not None:
        _hand_back(desk, round_, local, now)


def _renew_window(desk: Desk, round_: Round | None, now: Seconds) -> None:
    """Begin another seeding window for devices that come back in mid-step, as long as suits the present fleet."""
    if round_ is None or now < _window_end(desk, round_):
        return
    span = _window_s(desk, round_)
    if span < math.inf:
        desk.deadlines.set(("seed", round_.step), now + max(span, _RECHECK_S))


def _has_nothing_to_generate(desk: Desk, worker: Worker, round_: Round, now: Seconds) -> bool:
    if worker.leases:
        return False
    if round_.closed_at is not None:
        return True
    waiting = any(one.num_waiting for one in desk.rounds.values())
    if waiting or not desk.config.streaming or round_.num_delivered == 0:
        return False
    # The next look at the balance may bring it samples that others have too many of.
    return now - worker.since >= _LOOKS * desk.config.routing.balance_interval_s or not desk.config.routing.balance


def _why_generate(desk: Desk, worker: Worker, round_: Round | None, now: Seconds) -> str | None:
    """Why the devices of a worker that train should generate, or None."""
    state = desk.state
    if state.clock.busy_since is not None and (state.rules < 5 or _is_busy(desk, worker)):
        return None
    if round_ is None:
        seeds = desk.config.seeding.mode != "off" or state.fleet.num_remote == 0
        return "the step is trained" if seeds else None
    if round_.closed_at is not None:
        return None
    is_alone = state.rules < 5 or _nobody_generates(desk)
    if state.clock.train_s == 0.0 and now < _window_end(desk, round_) and is_alone:
        if round_.num_waiting:
            return "the step begins and samples wait"
        if state.published < round_.step:
            return "the step is trained, and a round opens with its version"
    seats = desk.seats.values()
    num_taking = sum(one.may_take if state.rules >= 2 else one.may_generate for one in seats)
    if round_.num_waiting and num_taking == 0:
        return "samples wait and no other worker is there"
    if failures.waits_for_another(desk, round_):
        return "samples wait that every other worker has failed"
    idle = state.clock.idle_since if is_alone else worker.idle_since
    if idle is None or now - idle < desk.config.hand_back.come_back_after_s:
        return None
    crowded = round_.num_waiting > 0
    crowded = crowded or (round_.num_leased > _CROWD * num_taking if is_alone else _would_help(desk))
    return f"the fleet has much to do, and nothing was there to train for {now - idle:.0f} s" if crowded else None


def _is_busy(desk: Desk, worker: Worker) -> bool:
    return worker.name in desk.state.clock.busy or "" in desk.state.clock.busy


def _nobody_generates(desk: Desk) -> bool:
    return all(one.duty in ("training", "to_training") for one in desk.state.fleet.local())


def _would_help(desk: Desk) -> bool:
    """Return whether one more local worker would speed up the samples on the others by more than hand-back may slow
    them."""
    generating = [one for one in desk.state.fleet.local() if one.may_generate]
    num = sum(len(one.leases) for one in generating)
    if not generating or num <= len(generating):
        return False
    now, then = (generating[0].speed.step_s(num / count) for count in (len(generating), len(generating) + 1))
    return now is not None and then is not None and now > desk.config.hand_back.max_slowdown * then


def note_idle(desk: Desk, name: WorkerName, since: Seconds | None) -> None:
    """Note since when a local worker's devices (all, without a name) have nothing to train; None: they have
    something."""
    for worker in desk.state.fleet.local():
        if name in ("", worker.name):
            worker.idle_since = since if worker.duty == "training" else None


def _switch(desk: Desk, worker: Worker, duty: str, why: str, now: Seconds) -> None:
    settle(worker, desk.ledger, now)
    worker.duty = duty  # type: ignore[assignment]
    if duty == "to_generating":
        stop_waiting(desk, now)
    desk.router.update(worker)
    desk.place_due |= desk.state.rules >= _SHARED  # the share of each of the others is another one
    desk.deadlines.set(("switch", worker.seat), now + desk.config.fleet_rules.switch_timeout_s)
    command = StartTraining if duty == "to_training" else StartGenerating
    desk.commands.append(command(worker.name, why))


def duty_changed(desk: Desk, worker: Worker, duty: str, now: Seconds) -> None:
    """Take in that a local worker's devices have changed their duty."""
    expected = {"to_training": "training", "to_generating": "generating"}.get(worker.duty)
    if duty != expected:
        desk.ledger.late_news += 1
        return
    settle(worker, desk.ledger, now)
    worker.duty = duty  # type: ignore[assignment]
    worker.idle_since = now if duty == "training" else None
    desk.deadlines.clear(("switch", worker.seat))
    desk.router.update(worker)
    desk.place_due = True
    desk.devices_due = True
    note_waiting(desk, now)
    note_seeding(desk, now)


def all_train(desk: Desk) -> bool:
    """Return whether the trainer has all of its devices: only then is it waiting when it has nothing to train."""
    return all(worker.duty == "training" for worker in desk.state.fleet.local())


def note_waiting(desk: Desk, now: Seconds) -> None:
    """Start the waiting clock if the trainer has all that it needs to train but samples. Publishing is no waiting."""
    clock = desk.state.clock
    round_ = oldest_round(desk)
    is_busy = clock.busy_since is not None or clock.validating_since is not None
    if clock.idle_since is not None or is_busy or round_ is None:
        return
    if desk.state.published >= round_.step and all_train(desk):
        clock.idle_since = now


def stop_waiting(desk: Desk, now: Seconds) -> None:
    clock = desk.state.clock
    if clock.idle_since is not None:
        clock.wait_train_s += now - clock.idle_since
        clock.idle_since = None


def note_seeding(desk: Desk, now: Seconds) -> None:
    """Keep the time in which at least one local worker generates for a round; while it validates, it does not."""
    clock = desk.state.clock
    may_seed = bool(desk.rounds) and clock.validating_since is None
    generating = may_seed and any(one.duty in ("generating", "stopping") for one in desk.state.fleet.local())
    if generating and clock.seeding_since is None:
        clock.seeding_since = now
    elif not generating and clock.seeding_since is not None:
        clock.seeded_s += now - clock.seeding_since
        clock.seeding_since = None


# Hand-back: fewer devices generate while the rest already train


def hand_back_is_due(desk: Desk, round_: Round, num_generated: int) -> bool:
    """Return whether devices may be given back now that so many of the round's samples are generated."""
    config = desk.config.hand_back
    if not config.enabled or round_.closed_at is not None or round_.next_hand_back_share > config.last_share + 1e-9:
        return False
    return num_generated / round_.num_planned >= round_.next_hand_back_share and not round_.num_waiting


def _hand_back(desk: Desk, round_: Round, local: list[Worker], now: Seconds) -> None:
    if not hand_back_is_due(desk, round_, round_.num_generated):
        return
    config, done = desk.config.hand_back, round_.num_generated / round_.num_planned
    while round_.next_hand_back_share <= done:
        round_.next_hand_back_share += config.check_every_share
    generating = [worker for worker in local if worker.may_generate]
    keep = _num_to_keep(desk, generating)
    for worker in sorted(generating, key=lambda one: (len(one.leases), one.seat))[: len(generating) - keep]:
        why = f"{keep} of {len(generating)} local workers hold what still runs"
        stop_generating(desk, worker, why, now)


def _num_to_keep(desk: Desk, generating: list[Worker]) -> int:
    """Return the fewest local workers whose cache, slots and speed suffice for all that runs on them now."""
    running = [desk.leases[lease] for worker in generating for lease in worker.leases]
    if not running or len(generating) < 2:
        return len(generating)
    lengths, cap = desk.lengths, desk.config.max_new_tokens
    tokens = sum(
        desk.config.prompt_tokens + sample.num_tokens + lengths.expected_remaining(sample.num_tokens, cap)
        for sample in running
    )
    for keep in range(1, len(generating)):
        share = len(running) / keep
        kept = generating[:keep]
        fits = all(worker.kv_tokens == 0 or worker.kv_tokens >= tokens / keep for worker in kept)
        roomy = all(worker.plateau >= share for worker in kept)
        if fits and roomy and all(_slowdown(desk, one, share) <= desk.config.hand_back.max_slowdown for one in kept):
            return keep
    return len(generating)


def _slowdown(desk: Desk, worker: Worker, num_running: float) -> float:
    """Return how much slower its samples become. Replicas are alike: one replica's measured memory stands for
    another's."""
    alike = [one.speed for one in (worker, *desk.state.fleet.local()) if one.speed.samples]
    speed = alike[0] if alike and desk.state.rules >= _SHARED else worker.speed
    before, after = speed.step_s(len(worker.leases)), speed.step_s(num_running)
    if before is None or after is None:
        return 1.0 if desk.state.rules < _SHARED else math.inf
    return after / before
