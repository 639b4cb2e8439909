"""The autoscaler's rule: how many workers pay off, and which of them are the least useful.

The model of a step. Its samples take W worker-seconds to generate. The trainer trains for t seconds; the rest of the
step its devices generate too, as R workers. With n workers, of whose paid time a share a is left after preparing and
being lost,

    step(n) = max(t, (W + R t) / (a n + R)) + other        a = 1 / (1 + losses an hour * seconds to prepare / 3600)
    cost(n) = (trainer + workers) $ an hour * step(n)

Measured steps beat the model, if the fleet did not change within them: a fleet size that was measured has its measured
time, and other sizes have the model's time, corrected by the nearest measured size.

`cheapest` is the n with the least cost a step; `fastest` the fewest workers that come within 1% of the shortest step.
Where the trainer has no price, its time is taken to be worth everything: `cheapest` is then `fastest`.

Rules kept here:
- Never below `min_workers`, never above `max_workers`, whatever it costs or saves.
- Workers never cost more than `max_usd_per_hour` an hour; when another step would bring them above `max_usd` in all,
  only `min_workers` stay. Both act at once.
- Every other change saves `min_gain` of the cost (or of the time, for `fastest`), and waits until `num_steps` steps
  in a row asked for it, on the same side. A change of the price is known and not measured: it acts at once.
  A fleet smaller than asked for, because the market offers no more, is a normal state.
- The least useful workers go first: those that leave anyhow, then the most expensive per token, then the newest.

Left out: acting on it (run/keeping.py, sim/holding.py), and forecasts of a market.
"""

import math
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from polyrl.ids import Seconds, WorkerName

_HOUR_S = 3600.0
_PRIOR_LOSSES = 0.1
_PRIOR_HOURS = 0.5
"""Before anything is known, a worker is lost every five hours; the guess weighs as much as half an hour of a worker."""
_NEAR_SHORTEST = 1.01

Aim = Literal["cheapest", "fastest"]


class ScaledWorker(Struct, frozen=True):
    """A worker as the rule sees it."""

    name: WorkerName
    seat: int
    usd_per_hour: float
    rate: float = 0.0
    """Tokens a second when it is full; 0: not seen yet."""
    leaves: bool = False
    """Its machine is about to go."""


class StepModel(Struct, frozen=True):
    """How long a step takes with how many workers."""

    worker_s: Seconds
    """Worker-seconds that generate a step's samples."""
    train_s: Seconds
    other_s: Seconds
    """The part of a step that stays, however many workers there are: publishing, pulling weights."""
    num_reserved: float
    """The number of workers that the trainer's own devices are worth."""
    share: float
    """Of a worker's paid time that it can generate in."""
    seen: dict[int, Seconds] = {}
    """The time of a step like this one, by the number of workers that it was seen with."""

    def step_s(self, num_workers: int) -> Seconds:
        """Return how long a step takes with so many workers: as seen, or as the model says."""
        if not self.seen:
            return self.expected_s(num_workers)
        nearest = min(self.seen, key=lambda number: (abs(number - num_workers), number))
        expected = self.expected_s(nearest)
        if not 0.0 < expected < math.inf:
            return self.expected_s(num_workers)
        return self.expected_s(num_workers) * self.seen[nearest] / expected

    def window_s(self, num_workers: int) -> Seconds:
        """Return how long the trainer's devices should generate first, with so many workers."""
        speed = num_workers + self.num_reserved
        return max(0.0, (self.worker_s + self.num_reserved * self.train_s) / max(1e-9, speed) - self.train_s)

    def expected_s(self, num_workers: int) -> Seconds:
        speed = self.share * num_workers + self.num_reserved
        if speed <= 0.0:
            return math.inf
        return max(self.train_s, (self.worker_s + self.num_reserved * self.train_s) / speed) + self.other_s

    @property
    def useful(self) -> float:
        """Workers that generate a step's samples in the time that it trains."""
        return self.worker_s / (self.share * self.train_s)


class FleetChoice(Struct, frozen=True):
    num_workers: int
    at_once: bool
    """A limit is exceeded: it does not wait for another step."""
    why: str


class Prices(Struct, frozen=True):
    trainer: float
    offered: float
    """Dollars an hour of a worker that is not held yet."""
    spent: float
    """Dollars of workers so far."""


class ScalingLimits(Struct, frozen=True):
    least: int
    most: int
    usd_per_hour: float | None
    usd: float | None


def losses_per_hour(num_lost: int, worker_s: Seconds) -> float:
    """Return how often an hour a worker is lost, as seen, with a guess that fades."""
    return (num_lost + _PRIOR_LOSSES) / (worker_s / _HOUR_S + _PRIOR_HOURS)


def share_of_time(lost_per_hour: float, prepare_s: Seconds) -> float:
    return 1.0 / (1.0 + lost_per_hour * max(0.0, prepare_s) / _HOUR_S)


def choose(
    model: StepModel,
    held: Sequence[ScaledWorker],
    prices: Prices,
    limits: ScalingLimits,
    asked: int,
    *,
    aim: Aim,
    min_gain: float,
) -> FleetChoice:
    """Return how many workers to hold, or as many as are asked for already."""
    costs = _workers_usd(held, prices.offered, limits.most)
    affordable = _affordable(costs, limits)
    now = min(asked, limits.most)
    if _is_spent(model, costs, prices, limits, max(min(len(held), limits.most), limits.least)):
        left = f"${prices.spent:.2f} of the ${limits.usd:.2f} for workers are spent, and a step costs more than is left"
        return FleetChoice(limits.least, max(asked, len(held)) > limits.least, left)
    values = [_value(model, costs, prices, number, aim) for number in range(limits.most + 1)]
    allowed = range(limits.least, max(limits.least, affordable) + 1)
    best = min(allowed, key=lambda number: (values[number], -number if aim == "cheapest" else number))
    if aim == "fastest" or prices.trainer <= 0.0:
        best = next(number for number in allowed if values[number] <= values[best] * _NEAR_SHORTEST)
    is_out = not limits.least <= asked <= max(limits.least, affordable)
    if not is_out and values[best] > values[now] * (1.0 - min_gain):
        best = now
    return FleetChoice(best, is_out, _why(model, costs, prices, limits, asked, best, affordable))


def least_useful(held: Sequence[ScaledWorker], num: int) -> tuple[WorkerName, ...]:
    """Return the names of `num` workers to let go, the least useful first."""
    seen = [one.rate for one in held if one.rate > 0.0]
    usual = sum(seen) / len(seen) if seen else 1.0

    def usefulness(one: ScaledWorker) -> tuple[bool, float, int]:
        rate = one.rate if one.rate > 0.0 else usual
        return not one.leaves, -one.usd_per_hour / rate if one.usd_per_hour > 0.0 else rate, -one.seat

    return tuple(one.name for one in sorted(held, key=usefulness)[: max(0, num)])


def _workers_usd(held: Sequence[ScaledWorker], offered: float, most: int) -> list[float]:
    """Return dollars an hour by number of workers: the cheapest that are held first, then what is offered."""
    prices = sorted(one.usd_per_hour for one in held)
    sums = [0.0]
    for number in range(most):
        sums.append(sums[-1] + (prices[number] if number < len(prices) else offered))
    return sums


def _affordable(costs: Sequence[float], limits: ScalingLimits) -> int:
    if limits.usd_per_hour is None:
        return limits.most
    return max(number for number, usd in enumerate(costs) if usd <= limits.usd_per_hour + 1e-9)


def _is_spent(model: StepModel, costs: Sequence[float], prices: Prices, limits: ScalingLimits, number: int) -> bool:
    if limits.usd is None:
        return False
    step_s = model.step_s(number)
    return prices.spent + (costs[number] * step_s / _HOUR_S if math.isfinite(step_s) else 0.0) >= limits.usd


def _value(model: StepModel, costs: Sequence[float], prices: Prices, number: int, aim: Aim) -> float:
    """Return what is to be small: the cost of a step, or its time."""
    step_s = model.step_s(number)
    if aim == "fastest" or prices.trainer <= 0.0:
        return step_s
    return (prices.trainer + costs[number]) * step_s / _HOUR_S


def _why(
    model: StepModel,
    costs: Sequence[float],
    prices: Prices,
    limits: ScalingLimits,
    now: int,
    best: int,
    affordable: int,
) -> str:
    def step(number: int) -> str:
        step_s = model.step_s(number)
        if math.isinf(step_s):
            return "no step without a worker"
        usd = (prices.trainer + costs[number]) * step_s / _HOUR_S
        return f"{step_s:.0f} s and ${usd:.3f} a step with {number}"

    words = [step(best)]
    if now != best and now <= limits.most:
        words.append(step(now))
    elif best < min(limits.most, affordable):
        words.append(step(best + 1))
    words.append(f"{model.useful:.1f} are useful at most")
    if affordable < limits.most:
        words.append(f"{affordable} are within ${limits.usd_per_hour:g} an hour")
    words.append(f"{model.share:.0%} of a worker's time is left after preparing")
    words.append(f"another costs ${prices.offered:.2f} an hour")
    return "; ".join(words)
