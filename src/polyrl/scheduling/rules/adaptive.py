"""Choosing the over-provisioning factors from the lengths seen, under a bound on waste and a bound on bias.

After every long round, each pair of factors on a small grid plays one period (some short rounds, one long) in a lock-
step token model: lengths drawn from the learned distribution with the learned within-prompt correlation, the same draws
for every pair. The fastest pair that stays within `max_waste` and `max_bias` is taken. The draws are a function of the
state alone.
"""

import math
from statistics import NormalDist

from msgspec import Struct

from polyrl.scheduling.core.parameters import RoundsConfig
from polyrl.scheduling.rules.lengths import LengthModel
from polyrl.scheduling.rules.order import unit

GRID = (1.0, 1.125, 1.25, 1.375, 1.5)
_MAX_PROMPTS = 64
"""A period is played with at most this many prompts a step: enough for the order statistics, 20 ms of work."""
_NORMAL = NormalDist()
_MIN_GROUPS = 32


class Correlation(Struct):
    """How alike a prompt's samples are: the share of the variance of log-length that lies between prompts."""

    num_groups: float = 0.0
    sum_means: float = 0.0
    sum_squares: float = 0.0
    sum_within: float = 0.0
    sum_inverse: float = 0.0

    def observe(self, lengths: list[int]) -> None:
        num = len(lengths)
        if num < 2:
            return
        logs = [math.log(max(1, one)) for one in lengths]
        mean = sum(logs) / num
        self.num_groups += 1.0
        self.sum_means += mean
        self.sum_squares += mean * mean
        self.sum_within += sum((one - mean) ** 2 for one in logs) / (num - 1)
        self.sum_inverse += 1.0 / num

    def value(self) -> float:
        """Return the correlation, from 0 to 0.9; 0.2 while too little was seen."""
        if self.num_groups < _MIN_GROUPS:
            return 0.2
        mean = self.sum_means / self.num_groups
        of_means = self.sum_squares / self.num_groups - mean * mean
        within = self.sum_within / self.num_groups
        between = max(0.0, of_means - within * self.sum_inverse / self.num_groups)
        return min(0.9, between / (between + within)) if between + within > 0.0 else 0.2


class Outlook(Struct, frozen=True):
    """The predicted result of a pair of factors, over a period of the token model."""

    prompts: float
    samples: float
    tokens_per_round: float
    waste: float
    bias: float


def choose_factors(
    config: RoundsConfig, lengths: LengthModel, correlation: float, cap: int, num_prompts: int
) -> Outlook | None:
    """Return the pair of factors to use from now on, or None when no pair keeps the bounds or too little was seen."""
    if lengths.num_observed < 4 * config.samples_per_prompt:
        return None
    samples = GRID if config.tail_batching in ("race", "designated") else (1.0,)
    draws = _draw(lengths, correlation, cap, min(num_prompts, _MAX_PROMPTS), config.samples_per_prompt)
    outlooks = [_play(config, draws, factor_p, factor_s, num_prompts) for factor_p in GRID for factor_s in samples]
    allowed = [one for one in outlooks if one.waste <= config.max_waste and one.bias <= config.max_bias]
    return min(allowed, key=lambda one: (one.tokens_per_round, one.prompts, one.samples)) if allowed else None


class _Draws(Struct, frozen=True):
    short: list[list[float]]
    """By prompt: lengths of the samples it would start in a short round, in order of starting."""
    again: list[list[float]]
    """By the same prompt: lengths when it is tried again."""
    mean: float


def _draw(lengths: LengthModel, correlation: float, cap: int, num_prompts: int, num_samples: int) -> _Draws:
    most_prompts = math.ceil(GRID[-1] * num_prompts)
    most_samples = math.ceil(GRID[-1] * num_samples)
    shared, own = math.sqrt(correlation), math.sqrt(1.0 - correlation)

    def length(prompt: int, visit: int, index: int, common: float) -> float:
        z = shared * common + own * _NORMAL.inv_cdf(max(1e-12, unit(prompt, visit, index + 1)))
        return min(float(cap), lengths.quantile(_NORMAL.cdf(z)))

    short: list[list[float]] = []
    again: list[list[float]] = []
    for prompt in range(most_prompts):
        common = _NORMAL.inv_cdf(max(1e-12, unit(prompt, 0, 0)))
        short.append([length(prompt, 1, index, common) for index in range(most_samples)])
        again.append([length(prompt, 2, index, common) for index in range(num_samples)])
    return _Draws(short, again, sum(map(sum, short)) / (most_prompts * most_samples))


def _play(config: RoundsConfig, draws: _Draws, factor_p: float, factor_s: float, num_prompts: int) -> Outlook:
    need = config.samples_per_prompt
    quota = min(num_prompts, _MAX_PROMPTS)
    started = math.ceil(factor_p * quota)
    num_samples = math.ceil(factor_s * need)
    groups = [sorted(one[:num_samples]) for one in draws.short[:started]]
    order = sorted(range(started), key=lambda index: (groups[index][need - 1], index))
    winners, losers = order[:quota], order[quota:]
    short_time = groups[winners[-1]][need - 1]
    kept = sum(sum(groups[index][:need]) for index in winners)
    cut = sum((num_samples - need) * groups[index][need - 1] for index in winners)
    lost = sum(sum(min(one, short_time) for one in groups[index]) for index in losers)
    if not losers:
        return _outlook(factor_p, factor_s, short_time, kept, cut + lost, kept / (quota * need), draws.mean)
    num_short = quota / len(losers)
    again = [draws.again[index] for index in losers]
    # A long round holds the losers of several short ones; those at hand stand for all of them.
    long_time = max(map(max, again))
    long_kept = sum(map(sum, again)) * num_short
    rounds = num_short + 1.0
    trained = kept * num_short + long_kept
    time = (short_time * num_short + long_time) / rounds
    mean = trained / (quota * need * rounds)
    return _outlook(factor_p, factor_s, time, trained, (cut + lost) * num_short, mean, draws.mean)


def _outlook(
    factor_p: float, factor_s: float, time: float, trained: float, discarded: float, mean: float, true_mean: float
) -> Outlook:
    waste = discarded / (trained + discarded) if trained + discarded > 0.0 else 0.0
    return Outlook(factor_p, factor_s, time, waste, max(0.0, 1.0 - mean / true_mean) if true_mean > 0.0 else 0.0)
