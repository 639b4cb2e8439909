"""Weights for tokens that another policy drew: an engine that rounds differently, or older weights.

With w = p_old / p_engine of a token, its loss is multiplied by a weight without a gradient:

    tis-token       min(w, high)
    tis-sequence    min(product of w over the training sequence, high), for all its tokens
    icepop          w where low <= w <= high, otherwise 0
    sequence-mask   1 where the geometric mean of w over the training sequence is within low and high, otherwise 0

Only the policy loss is weighted, not KL and entropy. A token of weight 0 still counts in the denominators: these are
known as soon as its sample is, and say how much was drawn.
"""

import torch

from polyrl.config.recipe import AlgorithmConfig
from polyrl.trainer.objectives.losses import mean_of_samples
from polyrl.trainer.objectives.registry import TokenBatch

Tensor = torch.Tensor

_MAX_LOG_RATIO = 20.0


@torch.no_grad()
def weigh(batch: TokenBatch, config: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Return the (tokens,) weights, the numbers whose means are metrics, and the ratios before any cap or mask."""
    low, high = config.correction_range
    log_ratio = batch.old_logprobs - batch.behaviour_logprobs
    if config.correction in ("tis-sequence", "sequence-mask"):
        log_ratio = mean_of_samples(log_ratio, batch)
    if config.correction == "tis-sequence":
        log_ratio = log_ratio * batch.num_tokens.index_select(0, batch.sample)
    ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    if config.correction in ("tis-token", "tis-sequence"):
        weights = ratio.clamp(max=high)
        return weights, {"correction_mean": weights, "correction_capped": ratio > high}, ratio
    inside = (ratio >= low) & (ratio <= high)
    weights = torch.where(inside, ratio, 0.0) if config.correction == "icepop" else inside.to(ratio.dtype)
    return weights, {"correction_mean": weights, "correction_masked": ~inside}, ratio
