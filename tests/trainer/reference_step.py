"""A whole step once more: from log-probabilities and rewards to the derivative of its loss by each log-probability.

Plain numbers in float64, by the formulas beside this file. Whoever has a model takes the derivatives on from there.
"""

from typing import NamedTuple

import numpy as np
from tests.trainer import formulas
from tests.trainer.formulas import Floats

from polyrl.config.recipe import AlgorithmConfig


class Known(NamedTuple):
    """Of a sample: log-probabilities of its answer's tokens, and what the critic said before each of them."""

    reward: float
    is_cut: bool
    """It ended at the cap."""
    now: Floats
    """Of the weights that the gradient is taken at."""
    start: Floats
    """Of the step's first weights."""
    engine: Floats
    reference: Floats | None = None
    values: Floats | None = None


class Slopes(NamedTuple):
    loss: float
    """The policy's, without KL and entropy."""
    logprobs: list[list[Floats]]
    """What the whole loss changes by with each token's log-probability; group by group."""
    entropies: list[list[float]]
    """And with each token's entropy; one number a sample."""
    values: list[list[Floats]]
    """And the critic's loss with each value, where these are still those of the step's start."""


def slopes(config: AlgorithmConfig, groups: list[list[Known]], cap: int, only: tuple[int, ...] | None = None) -> Slopes:
    """`only` these groups are in the update; the others count for advantages alone."""
    rewards = [[_token_rewards(one, config, cap) for one in group] for group in groups]
    kept = [[config.overlong != "mask" or not one.is_cut for one in group] for group in groups]
    gains, returns = _gains(config, groups, rewards, kept)
    trained = [[keep and (only is None or number in only) for keep in group] for number, group in enumerate(kept)]
    flat = [(g, s) for g, group in enumerate(trained) for s, is_in in enumerate(group) if is_in]
    lengths = [len(groups[g][s].now) for g, s in flat]
    weights, over = formulas.weights_and_denominator(config.aggregation or "", lengths, config.fixed_tokens or cap)
    out = Slopes(
        0.0,
        [[np.zeros(len(one.now)) for one in group] for group in groups],
        [[0.0 for _ in group] for group in groups],
        [[np.zeros(len(one.now)) for one in group] for group in groups],
    )
    total = 0.0
    for (g, s), weight in zip(flat, weights, strict=True):
        one, gain = groups[g][s], gains[g][s]
        old = one.engine if config.old_logprobs == "engine" else one.start
        loss, slope = formulas.LOSSES[config.loss](one.now, old, gain, *config.clip_range, config.dual_clip)
        corrected = formulas.correction(config.correction or "none", old, one.engine, *config.correction_range)
        total += weight * float((loss * corrected).sum()) / over
        slope = slope * corrected
        if config.kl == "loss":
            assert one.reference is not None
            slope = slope + config.kl_coef * formulas.kl(config.kl_estimator or "", one.now, one.reference)[1]
        out.logprobs[g][s] = slope * weight / over
        out.entropies[g][s] = -config.entropy_coef * weight / over
        if returns is not None:
            assert one.values is not None
            its = formulas.value_loss(one.values, one.values, returns[g][s], config.critic.value_clip)[1]
            out.values[g][s] = its / sum(lengths)
    return out._replace(loss=total)


def _token_rewards(one: Known, config: AlgorithmConfig, cap: int) -> Floats:
    rewards = np.zeros(len(one.now))
    rewards[-1] = one.reward
    if config.overlong == "penalty":
        buffer = config.overlong_buffer_tokens or 0
        over = len(one.now) - (cap - buffer)
        rewards[-1] -= config.overlong_penalty * (over / buffer if over > 0 else 0.0)
    if config.kl == "reward":
        assert one.reference is not None
        old = one.engine if config.old_logprobs == "engine" else one.start
        rewards -= config.kl_coef * formulas.kl(config.kl_estimator or "", old, one.reference)[0]
    return rewards


def _gains(
    config: AlgorithmConfig, groups: list[list[Known]], rewards: formulas.Step, kept: list[list[bool]]
) -> tuple[formulas.Step, formulas.Step | None]:
    """Advantages of every token; and what a critic learns."""
    if config.advantage == "gae":
        values = [[one.values for one in group if one.values is not None] for group in groups]
        return formulas.gae_of_step(rewards, kept, values, config.critic.gamma, config.critic.gae_lambda)
    if config.advantage in formulas.STEP_ADVANTAGES:
        return formulas.STEP_ADVANTAGES[config.advantage](rewards, kept), None
    out: formulas.Step = []
    for group in rewards:
        gains = formulas.GROUP_ADVANTAGES[config.advantage](np.array([one.sum() for one in group]))
        out.append([np.full(len(one), gain) for one, gain in zip(group, gains, strict=True)])
    return out, None
