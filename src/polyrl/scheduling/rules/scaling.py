"""Scaling: how many workers are worth holding.

The samples of a step take a certain number of worker-seconds to generate. As many workers as generate them in
the time that the trainer trains keep both busy; one more only waits.

Rules kept here:
- Advice is rare: only when the number differed from the last advice, on the same side, for two steps in a row.
- Advice stays within `min_workers` and `max_workers`, and a step that measured nothing advises nothing.
- No worker is advised for work that takes less time than a worker needs to begin (`BEGIN_S`). The steps of a tiny
  model train in milliseconds; a fleet that keeps pace with that would only fetch weights.

- With `enabled`, prices, losses and the time to prepare are weighed (autoscaling.py), and the driver acts on it.

Left out: acting on advice. Without `enabled` a person starts and stops workers; a fleet that is smaller than advised is
a normal state.
"""

import math
from typing import Annotated

import msgspec
from msgspec import Meta

from polyrl.ids import Seconds, WorkerName
from polyrl.scheduling.core.bounds import AtLeastOne, NotNegative, Share
from polyrl.scheduling.rules import autoscaling
from polyrl.scheduling.rules.autoscaling import Aim, Prices, ScaledWorker, ScalingLimits, StepModel
from polyrl.scheduling.rules.seeding import SAME_FLEET, SeedingState, StepTimes

_GAIN = 0.3
_FORGET_STEPS = 100
"""Steps after which a measured step time of a fleet size is forgotten."""
_HOLD_S = 60.0
"""An advice stands for at least so long, and for twice the time to prepare: a worker should be there before it goes."""
_OTHER_PRICE = 0.1
"""A price that differs by this share is another one."""

BEGIN_S = 0.5
"""Seconds of a step in which a worker does not write: it fetches weights, gets samples, and delivers them."""


class ScalingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    enabled: bool = False
    """The autoscaler: start and end workers as is advised, and weigh prices, losses and the time to prepare."""
    aim: Aim = "cheapest"
    """With `enabled`: the least dollars a token, or the most tokens a second within the budget."""
    min_workers: Annotated[int, Meta(ge=0, le=10_000)] = 0
    max_workers: Annotated[int, Meta(ge=0, le=10_000)] = 64
    max_usd_per_hour: NotNegative | None = None
    """The most that workers may cost an hour, with `enabled`; none: no limit."""
    max_usd: NotNegative | None = None
    """The most that workers may cost in all, with `enabled`; then only `min_workers` stay. None: no limit."""
    num_steps: AtLeastOne = 2
    """The number of steps in a row that must ask for another number before it is advised."""
    min_gain: Share = 0.03
    """With `enabled`, the share of the cost, or of the time, that a change must save."""

    def __post_init__(self) -> None:
        if self.min_workers > self.max_workers:
            raise ValueError(f"min_workers {self.min_workers} is more than max_workers {self.max_workers}")


class ScalingState(msgspec.Struct):
    last_advice: int | None = None
    num_above: int = 0
    """Steps in a row that asked for more workers than the last advice, and in the next field for fewer."""
    num_below: int = 0
    offered_usd_per_hour: float | None = None
    """The price of another worker, as the driver said last."""
    offered: int | None = None
    """How many workers could be had in all, as the driver said last."""
    num_lost: int = 0
    """Workers that were lost or taken since the run began, and in the next field the worker-seconds of that time."""
    worker_s: Seconds = 0.0
    prepare_s: Seconds = 0.0
    """The mean time from a worker's start until it can write; 0: not seen yet."""

    local_speed: float = 1.0
    """How fast the trainer's own engines are, against a worker: a moving mean."""
    advised_at: Seconds = -math.inf
    """When the autoscaler advised last."""
    priced: float | None = None
    """The price of another worker when the last advice was given."""
    seen: dict[int, tuple[float, int]] = {}
    """By number of workers: seconds of a step a token, and the number of the step that was measured last."""
    models: dict[str, StepModel] = {}
    """By kind of round: the model of a step."""

    def saw_step(self, num_workers: int, s_per_token: float, step: int) -> None:
        """Learn from a step whose fleet did not change."""
        before = self.seen.get(num_workers)
        known = s_per_token if before is None else before[0] + (s_per_token - before[0]) * _GAIN
        self.seen[num_workers] = known, step
        self.seen = {number: one for number, one in self.seen.items() if step - one[1] <= _FORGET_STEPS}

    def saw_ready(self, prepare_s: Seconds) -> None:
        """Learn how long a worker took from its start until it could write."""
        self.prepare_s = prepare_s if self.prepare_s == 0.0 else self.prepare_s + (prepare_s - self.prepare_s) * _GAIN


class Advice(msgspec.Struct, frozen=True):
    num_workers: int
    why: str
    let_go: tuple[WorkerName, ...] = ()


class ScalingFacts(msgspec.Struct, frozen=True):
    """The facts that the autoscaler weighs, beside a step's times."""

    held: tuple[ScaledWorker, ...]
    now: Seconds
    step: int
    kind: str
    step_s: Seconds
    num_tokens: int
    """Tokens that the step trained."""
    local_speed: float
    """How fast the trainer's own engines were, against a worker."""
    trainer_usd_per_hour: float
    spent_usd: float


def useful_workers(times: StepTimes, t_seed_s: Seconds, begin_s: Seconds = BEGIN_S) -> float:
    """Return how many workers generate a step's samples in the time it trains, which is taken to be `begin_s` at least.

    0 when nothing was measured. `t_seed_s` is what the trainer's devices really spent on generating. math.inf stands
    for the whole round, which is taken to be as long as the fleet generated.
    """
    if times.train_s <= 0.0:
        return 0.0
    seeded_s = t_seed_s if math.isfinite(t_seed_s) else times.remote_s
    return (times.remote_s * times.mean_workers + seeded_s * times.num_reserved) / max(begin_s, times.train_s)


def advise(
    state: ScalingState,
    config: ScalingConfig,
    times: StepTimes,
    t_seed_s: Seconds,
    workers_now: int,
    begin_s: Seconds = BEGIN_S,
) -> Advice | None:
    """Return, after a step, how many workers to hold from now on, or None to leave things as they are."""
    useful = useful_workers(times, t_seed_s, begin_s)
    if useful <= 0.0:
        return None
    wanted = min(config.max_workers, max(config.min_workers, math.floor(useful + 0.5)))
    advised = workers_now if state.last_advice is None else state.last_advice
    state.num_above = state.num_above + 1 if wanted > advised else 0
    state.num_below = state.num_below + 1 if wanted < advised else 0
    if max(state.num_above, state.num_below) < config.num_steps:
        return None
    state.last_advice, state.num_above, state.num_below = wanted, 0, 0
    span = f"the {times.train_s:.0f} s it trains"
    if times.train_s < begin_s:
        span = f"the {begin_s} s that a worker needs to begin; it trains {times.train_s:.2f} s"
    return Advice(
        wanted,
        f"{useful:.1f} workers generate a step's samples in {span}"
        f" ({config.min_workers} to {config.max_workers} allowed, {workers_now} now, {advised} before)",
    )


def autoscale(
    state: ScalingState, config: ScalingConfig, times: StepTimes, t_seed_s: Seconds, facts: ScalingFacts
) -> Advice | None:
    """Return, after a step, how many workers to hold and which to let go, or None to leave things as they are."""
    state.worker_s += times.mean_workers * facts.step_s
    if abs(times.mean_workers - times.workers_now) < SAME_FLEET and facts.num_tokens:
        state.saw_step(times.workers_now, facts.step_s / facts.num_tokens, facts.step)
    model = _model(state, times, t_seed_s, facts)
    if model is None:
        return None
    state.models[facts.kind] = model
    paid = [one.usd_per_hour for one in facts.held]
    usual = sum(paid) / len(paid) if paid else 0.0
    offered = usual if state.offered_usd_per_hour is None else state.offered_usd_per_hour
    prices = Prices(trainer=facts.trainer_usd_per_hour, offered=offered, spent=facts.spent_usd)
    limits = ScalingLimits(config.min_workers, config.max_workers, config.max_usd_per_hour, config.max_usd)
    asked = len(facts.held) if state.last_advice is None else state.last_advice
    choice = autoscaling.choose(model, facts.held, prices, limits, asked, aim=config.aim, min_gain=config.min_gain)
    return _after_hysteresis(state, config, choice, facts, offered)


def _model(state: ScalingState, times: StepTimes, t_seed_s: Seconds, facts: ScalingFacts) -> StepModel | None:
    """Return the model of a step like the last one; None if nothing was measured."""
    if times.train_s <= 0.0:
        return None
    train_s = max(BEGIN_S, times.train_s)
    state.local_speed += (facts.local_speed - state.local_speed) * _GAIN
    reserved = times.num_reserved * state.local_speed
    worker_s = times.remote_s * times.mean_workers + t_seed_s * reserved
    lost = autoscaling.losses_per_hour(state.num_lost, state.worker_s)
    seen = {number: one[0] * facts.num_tokens for number, one in state.seen.items()}
    share = autoscaling.share_of_time(lost, state.prepare_s)
    model = StepModel(worker_s, train_s, 0.0, reserved, share, seen)
    at_mean = (model.worker_s + model.num_reserved * train_s) / max(1e-9, times.mean_workers + model.num_reserved)
    return msgspec.structs.replace(model, other_s=max(0.0, facts.step_s - max(train_s, at_mean)))


def _after_hysteresis(
    state: ScalingState,
    config: ScalingConfig,
    choice: autoscaling.FleetChoice,
    facts: ScalingFacts,
    offered: float,
) -> Advice | None:
    held = facts.held
    wanted, before = choice.num_workers, len(held) if state.last_advice is None else state.last_advice
    is_repriced = state.priced is not None and abs(offered - state.priced) > _OTHER_PRICE * state.priced
    if not choice.at_once and not is_repriced:  # measured, and far from what was seen: half of the way is enough
        wanted = max(before // 2, min(before * 2 + 2, wanted))
    state.num_above = state.num_above + 1 if wanted > before else 0
    state.num_below = state.num_below + 1 if wanted < before else 0
    has_held = facts.now - state.advised_at >= max(_HOLD_S, 2.0 * state.prepare_s)
    is_due = max(state.num_above, state.num_below) >= config.num_steps and has_held
    if wanted == before or not (is_due or choice.at_once or is_repriced):
        return None
    state.last_advice, state.num_above, state.num_below, state.priced = wanted, 0, 0, offered
    state.advised_at = facts.now
    let_go = autoscaling.least_useful(held, len(held) - wanted)
    return Advice(wanted, f"{choice.why} ({len(held)} now, {before} before)", let_go)


def window_s(state: ScalingState, kind: str, seed: SeedingState, learned_s: Seconds, num_workers: int) -> Seconds:
    """Return the seeding window for a fleet that has just changed: as remembered, or as the model of a step says."""
    model = state.models.get(kind)
    if model is None or num_workers in (0, seed.num_workers):
        return learned_s
    known = seed.memory.get(num_workers)
    return model.window_s(num_workers) if known is None else known
