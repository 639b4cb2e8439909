"""Validation: answers to prompts that are not trained on, scored like all others. Told as pass@k.

pass@k of a prompt with n attempts, c of them right, is the chance that at least one of k drawn from the n is right:
1 - C(n - c, k) / C(n, k); no estimate of it from the same n attempts is better and unbiased.
"""

import math
from collections.abc import Sequence

SOLVED = 0.5
"""An attempt with a higher reward than this is right."""


def pass_at(k: int, num_attempts: int, num_right: int) -> float:
    """Of one prompt."""
    if num_attempts < k:
        raise ValueError(f"pass@{k} needs at least {k} attempts; there are {num_attempts}")
    return 1.0 - math.comb(num_attempts - num_right, k) / math.comb(num_attempts, k)


def pass_rates(rewards: Sequence[Sequence[float | None]], ks: Sequence[int]) -> dict[int, float]:
    """The mean over prompts, by k. An attempt whose reward failed is none; a prompt with too few of them is none."""
    rates: dict[int, float] = {}
    for k in ks:
        known = [[one for one in attempts if one is not None] for attempts in rewards]
        usable = [attempts for attempts in known if len(attempts) >= k]
        if usable:
            each = [pass_at(k, len(attempts), sum(one > SOLVED for one in attempts)) for attempts in usable]
            rates[k] = sum(each) / len(each)
    return rates
