"""An advantage and a loss as a user would write them; and two that are wrong."""

import torch

from polyrl.config.recipe import AlgorithmConfig
from polyrl.trainer.registry import TokenBatch


def plain(rewards: torch.Tensor, config: AlgorithmConfig) -> torch.Tensor:
    return rewards


def reinforce(batch: TokenBatch, config: AlgorithmConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return -batch.advantages * batch.logprobs, {}


def wrong_advantage(rewards: torch.Tensor, config: AlgorithmConfig) -> torch.Tensor:
    return rewards[:1]


def wrong_loss(batch: TokenBatch, config: AlgorithmConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return batch.logprobs.sum(), {}
