"""Scaling: how many workers are worth holding.

The samples of a step take a certain number of worker-seconds to generate. As many workers as generate them in
the time that the trainer trains keep both busy; one more only waits.

Rules kept here:
- Advice is rare: only when the number differed from the last advice, on the same side, for two steps in a row.
- Advice stays within `min_workers` and `max_workers`, and a step that measured nothing advises nothing.
- No worker is advised for what is written in less time than a worker needs to begin (`BEGIN_S`). The steps of a tiny
  model train in milliseconds; a fleet that keeps pace with that would only fetch weights.

Left out: prices (`polyrl plan` weighs them), and acting on advice. A person, or a driver with a cloud's API, starts and
stops workers; a fleet that is smaller than advised is a normal state.
"""

import math

import msgspec

from polyrl.ids import Seconds
from polyrl.scheduling.core.bounds import AtLeastOne, Count
from polyrl.scheduling.rules.seeding import StepTimes

BEGIN_S = 0.5
"""Seconds of a step in which a worker does not write: it fetches weights, gets samples, and delivers them."""


class ScalingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    min_workers: Count = 0
    max_workers: Count = 64
    num_steps: AtLeastOne = 2
    """The number of steps in a row that must ask for another number before it is advised."""

    def __post_init__(self) -> None:
        if self.min_workers > self.max_workers:
            raise ValueError(f"min_workers {self.min_workers} is more than max_workers {self.max_workers}")


class ScalingState(msgspec.Struct):
    last_advice: int | None = None
    num_above: int = 0
    """Steps in a row that asked for more than the last advice, and below: for fewer."""
    num_below: int = 0


class Advice(msgspec.Struct, frozen=True):
    num_workers: int
    why: str


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
