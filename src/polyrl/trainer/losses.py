"""What is minimised, for each token. Sums and denominators are aggregation's."""

import torch

from polyrl.config.recipe import AlgorithmConfig
from polyrl.trainer.registry import TokenBatch, loss

Tensor = torch.Tensor

_MAX_LOG_RATIO = 20.0
"""A ratio beyond e^20 says that something is broken elsewhere; it must not become infinite here."""


@loss("ppo_clip")
def ppo_clip(batch: TokenBatch, config: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)); for A < 0 at most -A c, with dual clip c."""
    log_ratio = (batch.logprobs - batch.old_logprobs).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio, gain = log_ratio.exp(), batch.advantages
    losses = torch.maximum(-gain * ratio, -gain * ratio.clamp(1 - config.clip_low, 1 + config.clip_high))
    stats = {
        "clip_frac_low": (gain < 0) & (ratio < 1 - config.clip_low),
        "clip_frac_high": (gain > 0) & (ratio > 1 + config.clip_high),
        "ppo_kl": -log_ratio,
    }
    if config.dual_clip is not None:
        most = -gain * config.dual_clip
        stats["clip_frac_dual"] = (gain < 0) & (losses > most)
        losses = torch.where(gain < 0, torch.minimum(losses, most), losses)
    return losses, stats
