"""Putting the parallelism plan into force: before a round opens, engines get the width that suits its kind.

Rules kept here: the width is decided when a step is trained, for the kind of round that comes next, so that engines
change while the new version is published. The engines' reports count too: a round with more preemptions than before
rules narrower engines out, and four rounds without any let them in again.

The trainer's own engines are reshaped only while none of them holds a sample; the old ones leave the fleet at once, and
the driver joins the new ones. Engines of the fleet are drained by the process that started them, as any worker that
leaves: their samples go on elsewhere. Until the new ones have joined, the command may be repeated and then changes
nothing.
"""

from polyrl.ids import Seconds
from polyrl.scheduling.core.commands import Reshape
from polyrl.scheduling.core.desk import Desk
from polyrl.scheduling.core.fleet import Worker
from polyrl.scheduling.core.samples import Round, RoundKind
from polyrl.scheduling.parts import membership
from polyrl.scheduling.rules import parallelism
from polyrl.scheduling.rules.parallelism import (
    DecodeSpeed,
    LocalDevices,
    ParallelismPlan,
    PreemptionWatch,
    RoundProgress,
    RoundShape,
)

_MIN_OBSERVED = 256
"""Samples that must have run before they say how a round will go."""


def round_opened(desk: Desk, round_: Round) -> None:
    """Record the expected duration of the round on the present engines."""
    local = _planned(desk)
    if not desk.config.parallelism.enabled or not local:
        return
    _note(desk, round_, local)
    round_.predicted_s = _predict(desk, round_.kind, local)


def step_trained(desk: Desk, round_: Round, now: Seconds) -> None:
    """Learn from the round, and reshape the engines if the plan for the next one is another."""
    local = _planned(desk)
    if not desk.config.parallelism.enabled or not local or round_.num_planned == 0:
        return
    _note(desk, round_, local)
    if round_.farthest > 0:
        desk.state.round_lengths[round_.kind].observe(round_.farthest, finished=True)
    _note_rewards(desk, round_)
    _hear_preemptions(desk, round_, local)
    plan = _plan(desk, desk.planner.next_kind(desk.state.tail), local)
    if plan is None or plan.tp == _width(desk, local):
        return
    if desk.config.parallelism.engines == "fleet":
        desk.state.parallelism.width = plan.tp
        desk.state.parallelism.num_preemptions = 0
        desk.commands.append(Reshape(plan.tp, plan.replicas, plan.why))
        return
    if any(worker.leases for worker in local):
        return
    for worker in local:
        desk.state.fleet.start_drain(worker, now)
        membership.lose(desk, worker, "the local engines are reshaped", now, tell=False)
    desk.state.parallelism.num_preemptions = 0
    desk.commands.append(Reshape(plan.tp, plan.replicas, plan.why))


def _planned(desk: Desk) -> list[Worker]:
    """Return the workers whose engines are planned."""
    if desk.config.parallelism.engines == "local":
        return desk.state.fleet.local()
    return [one for one in desk.seats.values() if one.planned and one.state != "draining"]


def _width(desk: Desk, local: list[Worker]) -> int:
    """Return how wide the engines are, or are to become. A worker's own word counts only if it is a local one."""
    config = desk.config.parallelism
    return local[0].num_devices if config.engines == "local" else desk.state.parallelism.width or config.start_tp


def _note(desk: Desk, round_: Round, local: list[Worker]) -> None:
    state = desk.state.parallelism
    state.num_samples_by_kind[round_.kind] = round_.num_planned
    if state.home_tp == 0:
        state.home_tp = _width(desk, local)


def _note_rewards(desk: Desk, round_: Round) -> None:
    """Learn how long the round waited for rewards after its last sample: the mean, recent rounds counting most."""
    if round_.closed_at is None or round_.written_at is None:
        return
    waited_s = max(0.0, round_.closed_at - round_.written_at)
    state = desk.state.parallelism
    state.rewards_s_by_kind[round_.kind] = (state.rewards_s_by_kind.get(round_.kind, waited_s) + waited_s) / 2.0
    is_bound = round_.waits_for_places and desk.as_finished
    state.at_least_s_by_kind[round_.kind] = round_.closed_at - round_.opened_at if is_bound else 0.0


def _plan(desk: Desk, kind: RoundKind, local: list[Worker]) -> ParallelismPlan | None:
    config, state = desk.config.parallelism, desk.state
    work, speed = _work(desk, kind, local), _speed(desk, local)
    if work is None or config.model is None or speed is None:
        return None
    return parallelism.plan(
        config,
        state.parallelism,
        kind,
        work,
        shape=config.model,
        devices=_devices(desk, local),
        speed=speed,
        progress=_progress(desk, kind),
        kinds=("short",) if desk.config.rounds.tail_batching == "off" else ("short", "long"),
    )


def _predict(desk: Desk, kind: RoundKind, local: list[Worker]) -> Seconds | None:
    config, work, speed = desk.config.parallelism, _work(desk, kind, local), _speed(desk, local)
    if work is None or config.model is None or speed is None:
        return None
    tp, devices = _width(desk, local), _devices(desk, local)
    capacity = parallelism.capacity_tokens(config.model, tp, devices.memory_bytes, devices.fraction)
    return parallelism.round_time_s(
        speed, _progress(desk, kind), work, tp=tp, replicas=max(1, devices.num_devices // tp), capacity=capacity
    )


def _work(desk: Desk, kind: RoundKind, local: list[Worker]) -> RoundShape | None:
    """Return the expected work of a round of this kind; None before one was seen."""
    num_samples = desk.state.parallelism.num_samples_by_kind.get(kind, 0)
    if num_samples == 0 or desk.state.lengths_by_kind[kind].num_observed < _MIN_OBSERVED:
        return None
    state = desk.state.parallelism
    return RoundShape(
        num_samples,
        desk.config.prompt_tokens,
        desk.config.max_new_tokens,
        local[0].slots,
        rewards_s=state.rewards_s_by_kind.get(kind, 0.0),
        at_least_s=state.at_least_s_by_kind.get(kind, 0.0),
    )


def _progress(desk: Desk, kind: RoundKind) -> RoundProgress:
    rounds = desk.state.round_lengths[kind]
    return RoundProgress(desk.state.lengths_by_kind[kind].survival, rounds.survival if rounds.num_observed else None)


def _hear_preemptions(desk: Desk, round_: Round, local: list[Worker]) -> None:
    config, state = desk.config.parallelism, desk.state.parallelism
    if config.model is None:
        return
    total = sum(worker.num_preemptions for worker in local)
    share = max(0, total - state.num_preemptions) / round_.num_planned
    state.num_preemptions = total
    watch = state.watches.setdefault(round_.kind, PreemptionWatch())
    allowed = parallelism.tensor_parallel_sizes(config.model, _devices(desk, local))
    width = _width(desk, local)
    advice = watch.after_round(width, share, allowed=allowed)
    if advice.tp != width:
        state.min_tp_by_kind[round_.kind] = advice.tp


def _devices(desk: Desk, local: list[Worker]) -> LocalDevices:
    config = desk.config.parallelism
    num = config.num_devices or sum(worker.num_devices for worker in local)
    return LocalDevices(num, int(config.memory_gb * 1e9), config.memory_fraction, config.max_tp)


def _speed(desk: Desk, local: list[Worker]) -> DecodeSpeed | None:
    """Return the speed of one device, as configured or, of the fleet's engines, as measured; None if it is unknown."""
    config = desk.config.parallelism
    if config.speed is not None or config.engines == "local":
        return config.speed
    for worker in local:
        alone, full = worker.speed.step_s(1.0), worker.speed.step_s(float(worker.slots))
        if alone is None or full is None or alone <= 0.0:
            continue
        widened = _width(desk, local) ** config.tp_exponent
        per_sample = max(0.0, (full - alone) / max(1, worker.slots - 1))
        fixed = max(alone - per_sample, alone / 2.0)
        return DecodeSpeed(
            fixed_s=fixed * widened,
            per_sample_s=per_sample * widened,
            per_context_token_s=0.0,
            tp_exponent=config.tp_exponent,
        )
    return None
