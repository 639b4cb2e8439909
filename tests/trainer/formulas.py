"""The algorithms once more, in numpy and float64, written from the papers' formulas and sharing no code with ours.

A step's loss as a function of the log-probabilities of its tokens, and its derivative by each of them, in closed form.
"""

from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]


def advantages(name: str, rewards: Floats) -> Floats:
    num = len(rewards)
    out = np.zeros(num)
    for i in range(num):
        if name == "grpo":
            mean = sum(rewards) / num
            std = (sum((r - mean) ** 2 for r in rewards) / (num - 1)) ** 0.5
            out[i] = (rewards[i] - mean) / (std + 1e-6)
        elif name == "dr_grpo":
            out[i] = rewards[i] - sum(rewards) / num
        else:
            others = [rewards[j] for j in range(num) if j != i]
            out[i] = rewards[i] - sum(others) / (num - 1)
    return out


def ppo_clip(
    logp: Floats, old: Floats, gain: float, low: float, high: float, dual: float | None
) -> tuple[Floats, Floats]:
    """The loss of each token, and its derivative by the token's log-probability."""
    loss, slope = np.zeros(len(logp)), np.zeros(len(logp))
    for t in range(len(logp)):
        ratio = np.exp(logp[t] - old[t])
        if gain >= 0:
            free = ratio <= 1 + high
            loss[t] = -gain * min(ratio, 1 + high)
        else:
            free = ratio >= 1 - low
            loss[t] = -gain * max(ratio, 1 - low)
            if dual is not None and ratio > dual:
                free, loss[t] = False, -gain * dual
        slope[t] = -gain * ratio if free else 0.0
    return loss, slope


def kl(name: str, logp: Floats, ref: Floats) -> tuple[Floats, Floats]:
    d = logp - ref
    if name == "k1":
        return d, np.ones(len(d))
    if name == "k2":
        return d**2 / 2, d
    return np.exp(-d) - 1 + d, 1 - np.exp(-d)


def weights_and_denominator(name: str, lengths: list[int], fixed: int) -> tuple[list[float], float]:
    """The weight of every token of each sample, and what the sum is divided by."""
    if name == "token-mean":
        return [1.0] * len(lengths), float(sum(lengths))
    if name == "seq-mean-token-sum":
        return [1.0] * len(lengths), float(len(lengths))
    if name == "seq-mean-token-mean":
        return [1.0 / one for one in lengths], float(len(lengths))
    return [1.0] * len(lengths), float(len(lengths) * fixed)
