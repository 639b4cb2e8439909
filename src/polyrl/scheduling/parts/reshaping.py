"""Putting the parallelism plan into force: before a round opens, the local engines get the width that suits its kind.

Rules kept here: it is decided when a step is trained, for the kind of round that comes next, so that the change is made
while the new version is published. Engines are reshaped only while none of them holds a sample, so nothing is lost; the
old ones leave the fleet at once and the driver joins the new ones. The engines' reports count too: a round in which
more samples than before were thrown out of the cache rules narrower engines out, four calm ones let them in again.
"""

from polyrl.ids import Seconds
from polyrl.scheduling.core.commands import Reshape
from polyrl.scheduling.core.desk import Desk
from polyrl.scheduling.core.fleet import Worker
from polyrl.scheduling.core.samples import Round, RoundKind
from polyrl.scheduling.parts import membership
from polyrl.scheduling.rules import parallelism
from polyrl.scheduling.rules.parallelism import (
    LocalDevices,
    ParallelismPlan,
    PreemptionWatch,
    RoundProgress,
    RoundShape,
)

_MIN_OBSERVED = 256
"""Samples that must have run before they say how a round will go."""


def round_opened(desk: Desk, round_: Round) -> None:
    """Put down what the round is expected to take on the engines as they are."""
    local = desk.state.fleet.local()
    if not desk.config.parallelism.enabled or not local:
        return
    _note(desk, round_, local)
    round_.predicted_s = _predict(desk, round_.kind, local)


def step_trained(desk: Desk, round_: Round, now: Seconds) -> None:
    """Learn from the round, and reshape the local engines if the plan for the next one is another."""
    local = desk.state.fleet.local()
    if not desk.config.parallelism.enabled or not local or round_.num_planned == 0:
        return
    _note(desk, round_, local)
    if round_.farthest > 0:
        desk.state.round_lengths[round_.kind].observe(round_.farthest, finished=True)
    _note_rewards(desk, round_)
    _hear_preemptions(desk, round_, local)
    plan = _plan(desk, desk.planner.next_kind(desk.state.tail), local)
    if plan is None or plan.tp == local[0].num_devices or any(worker.leases for worker in local):
        return
    for worker in local:
        desk.state.fleet.start_drain(worker, now)
        membership.lose(desk, worker, "the local engines are reshaped", now, tell=False)
    desk.state.parallelism.num_preemptions = 0
    desk.commands.append(Reshape(plan.tp, plan.replicas, plan.why))


def _note(desk: Desk, round_: Round, local: list[Worker]) -> None:
    state = desk.state.parallelism
    state.num_samples_by_kind[round_.kind] = round_.num_planned
    if state.home_tp == 0:
        state.home_tp = local[0].num_devices


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
    work = _work(desk, kind, local)
    if work is None or config.model is None or config.speed is None:
        return None
    return parallelism.plan(
        config,
        state.parallelism,
        kind,
        work,
        shape=config.model,
        devices=_devices(desk, local),
        speed=config.speed,
        progress=_progress(desk, kind),
        kinds=("short",) if desk.config.rounds.tail_batching == "off" else ("short", "long"),
    )


def _predict(desk: Desk, kind: RoundKind, local: list[Worker]) -> Seconds | None:
    config, work = desk.config.parallelism, _work(desk, kind, local)
    if work is None or config.model is None or config.speed is None:
        return None
    tp, devices = local[0].num_devices, _devices(desk, local)
    capacity = parallelism.capacity_tokens(config.model, tp, devices.memory_bytes, devices.fraction)
    return parallelism.round_time_s(
        config.speed, _progress(desk, kind), work, tp=tp, replicas=len(local), capacity=capacity
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
    advice = watch.after_round(local[0].num_devices, share, allowed=allowed)
    if advice.tp != local[0].num_devices:
        state.min_tp_by_kind[round_.kind] = advice.tp


def _devices(desk: Desk, local: list[Worker]) -> LocalDevices:
    config = desk.config.parallelism
    num = sum(worker.num_devices for worker in local)
    return LocalDevices(num, int(config.memory_gb * 1e9), config.memory_fraction, config.max_tp)
