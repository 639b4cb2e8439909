"""The algorithms once more, in numpy and float64, written from the papers' formulas and sharing no code with ours.

Losses as functions of the log-probabilities of a sample's tokens, and their derivatives by each, in closed form.
The tables at the end say which names have a reference here; what has none is a name that nothing vouches for.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]
Gain = float | Floats
"""Of a sample, or of each of its tokens."""


# Advantages. Of a group, from its rewards: GRPO (2402.03300), Dr. GRPO (2503.20783), RLOO (2402.14740)


def grpo(rewards: Floats) -> Floats:
    num = len(rewards)
    mean = sum(rewards) / num
    std = (sum((r - mean) ** 2 for r in rewards) / (num - 1)) ** 0.5
    return np.array([(r - mean) / (std + 1e-6) for r in rewards])


def dr_grpo(rewards: Floats) -> Floats:
    return np.array([r - sum(rewards) / len(rewards) for r in rewards])


def rloo(rewards: Floats) -> Floats:
    num = len(rewards)
    return np.array([rewards[i] - sum(rewards[j] for j in range(num) if j != i) / (num - 1) for i in range(num)])


def advantages(name: str, rewards: Floats) -> Floats:
    return GROUP_ADVANTAGES[name](rewards)


# Of a step, from the rewards of its tokens, group by group and sample by sample: REINFORCE++ (2501.03262). Samples that
# are not trained are left out of mean and standard deviation.

Step = list[list[Floats]]


def reinforce_plus_plus(rewards: Step, kept: list[list[bool]]) -> Step:
    """A_t = r - beta sum over i >= t of KL(i), which is the sum of the rewards from token t on; then normalised."""
    return _white([[np.array([sum(one[t:]) for t in range(len(one))]) for one in group] for group in rewards], kept)


def reinforce_plus_plus_baseline(rewards: Step, kept: list[list[bool]]) -> Step:
    out: Step = []
    for group in rewards:
        mean = sum(sum(one) for one in group) / len(group)
        out.append([np.full(len(one), sum(one) - mean) for one in group])
    return _white(out, kept)


def _white(gains: Step, kept: list[list[bool]]) -> Step:
    pairs = [pair for row in zip(gains, kept, strict=True) for pair in zip(*row, strict=True)]
    tokens = [number for one, keep in pairs if keep for number in one]
    mean = sum(tokens) / len(tokens)
    std = (sum((number - mean) ** 2 for number in tokens) / (len(tokens) - 1)) ** 0.5
    return [[(one - mean) / (std + 1e-6) for one in group] for group in gains]


def gae(rewards: Floats, values: Floats, gamma: float, gae_lambda: float) -> tuple[Floats, Floats]:
    """Sums written out: A_t = sum over l of (gamma lambda)^l d_(t+l). And the returns (1506.02438)."""
    num = len(rewards)
    after = [*values[1:], 0.0]
    errors = [rewards[t] + gamma * after[t] - values[t] for t in range(num)]
    gains = [sum((gamma * gae_lambda) ** (s - t) * errors[s] for s in range(t, num)) for t in range(num)]
    return np.array(gains), np.array(gains) + values


def gae_of_step(rewards: Step, kept: list[list[bool]], values: Step, gamma: float, lam: float) -> tuple[Step, Step]:
    """Advantages, normalised over the step's tokens; and the returns."""
    pairs = [
        [gae(one, its, gamma, lam) for one, its in zip(*row, strict=True)] for row in zip(rewards, values, strict=True)
    ]
    return _white([[one for one, _ in group] for group in pairs], kept), [[one for _, one in group] for group in pairs]


# Losses: of each token, and their sum's derivative by each token's log-probability


def ppo_clip(
    logp: Floats, old: Floats, gain: Gain, low: float, high: float, dual: float | None = None
) -> tuple[Floats, Floats]:
    """PPO (1707.06347), with the second clip for A < 0 (1912.09729)."""
    gains = np.broadcast_to(gain, len(logp))
    loss, slope = np.zeros(len(logp)), np.zeros(len(logp))
    for t in range(len(logp)):
        ratio = np.exp(logp[t] - old[t])
        if gains[t] >= 0:
            free = ratio <= 1 + high
            loss[t] = -gains[t] * min(ratio, 1 + high)
        else:
            free = ratio >= 1 - low
            loss[t] = -gains[t] * max(ratio, 1 - low)
            if dual is not None and ratio > dual:
                free, loss[t] = False, -gains[t] * dual
        slope[t] = -gains[t] * ratio if free else 0.0
    return loss, slope


def gspo(
    logp: Floats, old: Floats, gain: Gain, low: float, high: float, dual: float | None = None
) -> tuple[Floats, Floats]:
    """GSPO-token (2507.18071, equations 13 and 14): s_t = sg[s] p_t / sg[p_t], so that ds_t / dlog p_t = s."""
    num = len(logp)
    s = np.exp(sum(logp[t] - old[t] for t in range(num)) / num)
    held = min(max(s, 1 - low), 1 + high)
    loss, slope = np.zeros(num), np.zeros(num)
    for t, gain_t in enumerate(np.broadcast_to(gain, num)):
        is_free = min(s * gain_t, held * gain_t) == s * gain_t
        loss[t] = -min(s * gain_t, held * gain_t)
        slope[t] = -s * gain_t if is_free else 0.0
    return loss, slope


def cispo(
    logp: Floats, old: Floats, gain: Gain, low: float, high: float, dual: float | None = None
) -> tuple[Floats, Floats]:
    """CISPO (2506.13585)."""
    weight = np.array([min(max(np.exp(a - b), 1 - low), 1 + high) for a, b in zip(logp, old, strict=True)])
    return -gain * weight * logp, -gain * weight


def value_loss(values: Floats, old: Floats, returns: Floats, clip: float) -> tuple[Floats, Floats]:
    loss, slope = (values - returns) ** 2 / 2, values - returns
    for t in range(len(values)) if clip else ():
        held = min(max(values[t], old[t] - clip), old[t] + clip)
        if (held - returns[t]) ** 2 / 2 > loss[t]:
            loss[t], slope[t] = (held - returns[t]) ** 2 / 2, 0.0 if held != values[t] else slope[t]
    return loss, slope


# Weights of each token of one sample, from the ratios of old to engine


def no_correction(ratios: list[float], low: float, high: float) -> list[float]:
    return [1.0 for _ in ratios]


def tis_token(ratios: list[float], low: float, high: float) -> list[float]:
    return [min(one, high) for one in ratios]


def tis_sequence(ratios: list[float], low: float, high: float) -> list[float]:
    return [min(float(np.prod(ratios)), high) for _ in ratios]


def icepop(ratios: list[float], low: float, high: float) -> list[float]:
    return [one if low <= one <= high else 0.0 for one in ratios]


def sequence_mask(ratios: list[float], low: float, high: float) -> list[float]:
    return [float(low <= np.prod(ratios) ** (1 / len(ratios)) <= high) for _ in ratios]


def correction(name: str, old: Floats, engine: Floats, low: float, high: float) -> Floats:
    ratios = [float(np.exp(a - b)) for a, b in zip(old, engine, strict=True)]
    return np.array(CORRECTIONS[name](ratios, low, high))


def kl(name: str, logp: Floats, ref: Floats) -> tuple[Floats, Floats]:
    """Schulman's three estimators, and their derivatives by log p."""
    d = logp - ref
    return {
        "k1": lambda: (d, np.ones(len(d))),
        "k2": lambda: (d**2 / 2, d),
        "k3": lambda: (np.exp(-d) - 1 + d, 1 - np.exp(-d)),
    }[name]()


def weights_and_denominator(name: str, lengths: list[int], fixed: int) -> tuple[list[float], float]:
    """The weight of every token of each sample, and what the sum is divided by."""
    num = float(len(lengths))
    return {
        "token-mean": lambda: ([1.0 for _ in lengths], float(sum(lengths))),
        "seq-mean-token-sum": lambda: ([1.0 for _ in lengths], num),
        "seq-mean-token-mean": lambda: ([1.0 / one for one in lengths], num),
        "fixed": lambda: ([1.0 for _ in lengths], num * fixed),
    }[name]()


GROUP_ADVANTAGES: dict[str, Callable[[Floats], Floats]] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}
STEP_ADVANTAGES: dict[str, Callable[[Step, list[list[bool]]], Step]] = {
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
}
LOSSES: dict[str, Callable[..., tuple[Floats, Floats]]] = {"ppo_clip": ppo_clip, "gspo": gspo, "cispo": cispo}
CORRECTIONS: dict[str, Callable[[list[float], float, float], list[float]]] = {
    "none": no_correction,
    "tis-token": tis_token,
    "tis-sequence": tis_sequence,
    "icepop": icepop,
    "sequence-mask": sequence_mask,
}
