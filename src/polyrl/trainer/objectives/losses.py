"""What is minimised, for each token. Sums and denominators are aggregation's.

With r = p / p_old and clip(r) = r held within 1 - low and 1 + high:

    ppo_clip   max(-A r, -A clip(r)); for A < 0 at most -A c, with dual clip c
    gspo       the same with s, the geometric mean of a sample's r, in place of r. A token's s has the gradient of its
               own log p alone (GSPO-token): with one A for a sample that is GSPO, and a token keeps its own weight
    cispo      -A [clip(r)] log p, where what is in brackets has no gradient: clipped tokens pull too, but no harder
"""

import torch

from polyrl.config.recipe import AlgorithmConfig
from polyrl.trainer.objectives.registry import TokenBatch, loss

Tensor = torch.Tensor

_MAX_LOG_RATIO = 20.0
"""A ratio beyond e^20 says that something is broken elsewhere; it must not become infinite here."""


def mean_of_samples(numbers: Tensor, batch: TokenBatch) -> Tensor:
    """The mean over each token's sample, for each token."""
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
    """Every token has its sample's ratio; with `seq-mean-token-mean` it is the paper's mean over samples."""
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
