"""Putting the parallelism plan into force: when a round opens, run the local engines at the width that suits its kind.

Rules kept here: engines are reshaped only while none of them holds a sample and none of their devices trains, so
nothing is lost; the old ones leave the fleet at once and the driver joins the new ones. What the engines did is heard
too: a round in which more samples than before were thrown out of the cache asks for wider engines the next time, four
calm ones for narrower.
"""

from polyrl.ids import Seconds
from polyrl.scheduling import membership, parallelism
from polyrl.scheduling.commands import Reshape
from polyrl.scheduling.desk import Desk
from polyrl.scheduling.parallelism import Devices, PreemptionWatch, RoundShape
from polyrl.scheduling.samples import Round

_MIN_OBSERVED = 256
"""Answers that must have ended before their lengths say how a round will go."""


def round_opened(desk: Desk, round_: Round, now: Seconds) -> None:
    """Reshape the local engines if the plan for this kind of round is another."""
    config, state = desk.config.parallelism, desk.state
    local = state.fleet.local()
    if not config.enabled or config.model is None or config.speed is None or not local:
        return
    ready = all(not worker.leases and worker.duty in ("generating", "to_generating") for worker in local)
    lengths = state.lengths_by_kind[round_.kind]
    if not ready or lengths.num_observed < _MIN_OBSERVED:
        return
    state.parallelism.tp_by_kind.setdefault(round_.kind, local[0].num_devices)
    plan = parallelism.plan(
        config,
        state.parallelism,
        round_.kind,
        RoundShape(round_.num_planned, desk.config.prompt_tokens, desk.config.max_new_tokens),
        shape=config.model,
        devices=_devices(desk),
        speed=config.speed,
        survival=lengths.survival,
    )
    tp = max(plan.tp, state.parallelism.min_tp_by_kind.get(round_.kind, 1))
    if tp == local[0].num_devices:
        return
    replicas = _devices(desk).num_devices // tp
    for worker in local:
        state.fleet.start_drain(worker, now)
        membership.lose(desk, worker, "the local engines are reshaped", now, tell=False)
    state.parallelism.num_preemptions = 0
    desk.commands.append(Reshape(tp, replicas, plan.why))


def step_trained(desk: Desk, round_: Round) -> None:
    """Hear what the engines went through in the round that was trained."""
    config, state = desk.config.parallelism, desk.state
    local = state.fleet.local()
    if not config.enabled or config.model is None or not local or round_.num_planned == 0:
        return
    total = sum(worker.num_preemptions for worker in local)
    share = max(0, total - state.parallelism.num_preemptions) / round_.num_planned
    state.parallelism.num_preemptions = total
    watch = state.parallelism.watches.setdefault(round_.kind, PreemptionWatch())
    allowed = parallelism.tensor_parallel_sizes(config.model, _devices(desk))
    advice = watch.after_round(local[0].num_devices, share, allowed=allowed)
    if advice.tp != local[0].num_devices:
        state.parallelism.min_tp_by_kind[round_.kind] = advice.tp


def _devices(desk: Desk) -> Devices:
    config = desk.config.parallelism
    num = sum(worker.num_devices for worker in desk.state.fleet.local())
    return Devices(num, int(config.memory_gb * 1e9), config.memory_fraction)
