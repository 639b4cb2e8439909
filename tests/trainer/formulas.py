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


def gspo(logp: Floats, old: Floats, gain: float, low: float, high: float) -> tuple[Floats, Floats]:
    """Of one whole sample: each token has the sample's loss; the slope is that of their sum."""
    num = len(logp)
    ratio = np.exp(sum(logp[t] - old[t] for t in range(num)) / num)
    held = min(max(ratio, 1 - low), 1 + high)
    if -gain * ratio >= -gain * held:
        return np.full(num, -gain * ratio), np.full(num, -gain * ratio)
    return np.full(num, -gain * held), np.zeros(num)


def cispo(logp: Floats, old: Floats, gain: float, low: float, high: float) -> tuple[Floats, Floats]:
    weight = np.array([min(max(np.exp(a - b), 1 - low), 1 + high) for a, b in zip(logp, old, strict=True)])
    return -gain * weight * logp, -gain * weight


def correction(name: str, old: Floats, engine: Floats, low: float, high: float) -> Floats:
    """The weight of each token of one sample."""
    num = len(old)
    ratios = [np.exp(old[t] - engine[t]) for t in range(num)]
    if name == "tis-token":
        return np.array([min(one, high) for one in ratios])
    if name == "tis-sequence":
        return np.full(num, min(np.prod(ratios), high))
    if name == "icepop":
        return np.array([one if low <= one <= high else 0.0 for one in ratios])
    if name == "sequence-mask":
        return np.full(num, float(low <= np.prod(ratios) ** (1 / num) <= high))
    return np.ones(num)


def step_advantages(name: str, groups: list[Floats], lengths: list[list[int]]) -> list[Floats]:
    """REINFORCE++: one number a token, written out; a sample that is not trained has length 0."""
    if name == "reinforce_plus_plus_baseline":
        groups = [rewards - rewards.mean() for rewards in groups]
    tokens = [
        r
        for group, nums in zip(groups, lengths, strict=True)
        for r, n in zip(group, nums, strict=True)
        for _ in range(n)
    ]
    mean = np.mean(tokens)
    std = np.sqrt(sum((one - mean) ** 2 for one in tokens) / (len(tokens) - 1))
    return [(rewards - mean) / (std + 1e-6) for rewards in groups]


def gae(rewards: Floats, values: Floats, gamma: float, gae_lambda: float) -> tuple[Floats, Floats]:
    """Sums written out: A_t = sum over l of (gamma lambda)^l d_(t+l). And the returns."""
    num = len(rewards)
    after = [*values[1:], 0.0]
    errors = [rewards[t] + gamma * after[t] - values[t] for t in range(num)]
    gains = [sum((gamma * gae_lambda) ** (s - t) * errors[s] for s in range(t, num)) for t in range(num)]
    return np.array(gains), np.array(gains) + values


def value_loss(values: Floats, old: Floats, returns: Floats, clip: float) -> tuple[Floats, Floats]:
    loss, slope = (values - returns) ** 2 / 2, values - returns
    for t in range(len(values)) if clip else ():
        held = min(max(values[t], old[t] - clip), old[t] + clip)
        if (held - returns[t]) ** 2 / 2 > loss[t]:
            loss[t], slope[t] = (held - returns[t]) ** 2 / 2, 0.0 if held != values[t] else slope[t]
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
