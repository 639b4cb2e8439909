"""Validation: answers to prompts that are not trained on, scored like all others. Reports the mean reward and pass@k.

pass@k of a prompt with n attempts, c of them right, is the chance that at least one of k drawn from the n is right: 1 -
C(n - c, k) / C(n, k). No unbiased estimate from the same n attempts has a lower variance.
"""

import math
from collections.abc import Sequence


def pass_at(k: int, num_attempts: int, num_right: int) -> float:
    """Return pass@k of one prompt. Raises ValueError if there are fewer than k attempts."""
    if num_attempts < k:
        raise ValueError(f"pass@{k} needs at least {k} attempts; there are {num_attempts}")
    return 1.0 - math.comb(num_attempts - num_right, k) / math.comb(num_attempts, k)


def report(rewards: Sequence[Sequence[float | None]], ks: Sequence[int], solved_above: float) -> dict[str, float]:
    """Return means over prompts: `reward/mean`, of each prompt's mean reward, and `pass@k`.

    Attempts whose reward failed are left out, and so are prompts with too few attempts.
    """
    known = [[one for one in attempts if one is not None] for attempts in rewards]
    means = [sum(attempts) / len(attempts) for attempts in known if attempts]
    told = {"reward/mean": sum(means) / len(means)} if means else {}
    for k in ks:
        usable = [attempts for attempts in known if len(attempts) >= k]
        if usable:
            each = [pass_at(k, len(attempts), sum(one > solved_above for one in attempts)) for attempts in usable]
            told[f"pass@{k}"] = sum(each) / len(each)
    return told
