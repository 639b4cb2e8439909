"""An advantage and a loss as a user would write them; and some that are wrong."""

import torch

from polyrl.config.recipe import AlgorithmConfig
from polyrl.trainer.objectives.registry import RewardBatch, TokenBatch, batch_advantage


def plain(rewards: torch.Tensor, config: AlgorithmConfig) -> torch.Tensor:
    return rewards


def reinforce(batch: TokenBatch, config: AlgorithmConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return -batch.advantages * batch.logprobs, {}


def bounded_by_engine(batch: TokenBatch, config: AlgorithmConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The upper clip bounds a weight that is not the importance ratio."""
    weight = (batch.logprobs.detach() - batch.behaviour_logprobs).exp().clamp(max=1 + config.clip_range[1])
    return -batch.advantages * weight * batch.logprobs, {}


def wrong_advantage(rewards: torch.Tensor, config: AlgorithmConfig) -> torch.Tensor:
    return rewards[:1]


@batch_advantage("wrong_of_step")
def wrong_of_step(batch: RewardBatch, config: AlgorithmConfig) -> torch.Tensor:
    return batch.rewards.mean()


def wrong_loss(batch: TokenBatch, config: AlgorithmConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return batch.logprobs.sum(), {}


def lonely_loss(batch: TokenBatch, config: AlgorithmConfig) -> torch.Tensor:
    return -batch.advantages * batch.logprobs


def talkative_loss(batch: TokenBatch, config: AlgorithmConfig) -> tuple[torch.Tensor, dict[str, float]]:
    return -batch.advantages * batch.logprobs, {"mean": 0.5}


def listed_advantage(rewards: torch.Tensor, config: AlgorithmConfig) -> list[float]:
    return rewards.tolist()
