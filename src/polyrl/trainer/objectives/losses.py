"""Policy losses of each token. Sums and denominators are in aggregation.py.

With r = p / p_old and clip(r) = r clamped to between 1 - low and 1 + high:

    ppo_clip   max(-A r, -A clip(r)); for A < 0 at most -A c, with dual clip c
    gspo       the same with s, the geometric mean of a sample's r, in place of r. A token's s has the gradient of its
               own log p only (GSPO-token): with one A per sample this is GSPO, and a token keeps its own weight. The
               mean is over a training sequence: an episode of several sequences has a ratio for each
    cispo      -A [clip(r)] log p, without a gradient through the brackets: clipped tokens still contribute, with a
               bounded weight
"""

import torch

from polyrl.config.recipe import AlgorithmConfig
from polyrl.trainer.objectives.registry import TokenBatch, loss

Tensor = torch.Tensor

_MAX_LOG_RATIO = 20.0
"""A ratio beyond e^20 means that something else is broken. It must not become infinite here."""


def mean_of_samples(numbers: Tensor, batch: TokenBatch) -> Tensor:
    """Return, for each token, the mean over its training sequence."""
    sums = torch.zeros(len(batch.num_tokens), dtype=numbers.dtype, device=numbers.device)
    means = sums.index_add(0, batch.sample, numbers) / batch.num_tokens
    return means.index_select(0, batch.sample)


@loss("ppo_clip")
def ppo_clip(batch: TokenBatch, config: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    log_ratio = batch.logprobs - batch.old_logprobs
    losses, stats = _clipped(log_ratio, batch.advantages, config)
    if config.dual_clip is not None:
        gain = batch.advantages
        most = -gain * config.dual_clip
        stats["clip_frac_dual"] = (gain < 0) & (losses > most)
        losses = torch.where(gain < 0, torch.minimum(losses, most), losses)
    return losses, stats | {"ppo_kl": -log_ratio}


@loss("gspo")
def gspo(batch: TokenBatch, config: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Use the ratio of the sample for every token. With `seq-mean-token-mean` this is the paper's mean over samples."""
    log_ratio = (batch.logprobs - batch.old_logprobs).detach()
    of_token = mean_of_samples(log_ratio, batch) + (batch.logprobs - batch.logprobs.detach())
    losses, stats = _clipped(of_token, batch.advantages, config)
    return losses, stats | {"ppo_kl": -log_ratio}


@loss("cispo")
def cispo(batch: TokenBatch, config: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    low, high = config.clip_range
    log_ratio = (batch.logprobs - batch.old_logprobs).detach()
    ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    losses = -batch.advantages * ratio.clamp(1 - low, 1 + high) * batch.logprobs
    return losses, {"clip_frac_low": ratio < 1 - low, "clip_frac_high": ratio > 1 + high, "ppo_kl": -log_ratio}


def _clipped(log_ratio: Tensor, gain: Tensor, config: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    low, high = config.clip_range
    ratio = log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    losses = torch.maximum(-gain * ratio, -gain * ratio.clamp(1 - low, 1 + high))
    return losses, {
        "clip_frac_low": (gain < 0) & (ratio < 1 - low),
        "clip_frac_high": (gain > 0) & (ratio > 1 + high),
    }
