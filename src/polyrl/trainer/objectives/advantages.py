"""Advantages: how much better a sample is than others. A sample that is an episode of several calls is compared once.

Most functions compare the samples of a group. They need only the rewards of the group; a group of one has nothing to
compare with, so its advantage is zero. `reinforce_plus_plus` compares all samples of the step, so nothing is trained
before the last one arrives. Its mean and standard deviation (n - 1) are over trained tokens: advantages in the loss
have mean 0 and standard deviation 1, however long the answers are.

With the KL penalty in the reward, a sample pays for all of its drawn tokens, as in verl and TRL. With
`reinforce_plus_plus` a token pays for itself and for the tokens after it, as in its paper (2501.03262) and in verl.
"""

import torch

from polyrl.config.recipe import AlgorithmConfig
from polyrl.trainer.objectives.registry import RewardBatch, advantage, batch_advantage

Tensor = torch.Tensor

_EPS = 1e-6


@advantage("grpo")
def grpo(rewards: Tensor, config: AlgorithmConfig) -> Tensor:
    """Return (r - mean) / (std + 1e-6), with the standard deviation of a sample (n - 1)."""
    if len(rewards) < 2:
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std() + _EPS)


@advantage("dr_grpo")
def dr_grpo(rewards: Tensor, config: AlgorithmConfig) -> Tensor:
    """Return r - mean. With aggregation `fixed`, no divisor depends on the answers."""
    return rewards - rewards.mean()


@advantage("rloo")
def rloo(rewards: Tensor, config: AlgorithmConfig) -> Tensor:
    """Return r minus the mean of the others."""
    num = len(rewards)
    return torch.zeros_like(rewards) if num < 2 else (rewards - rewards.mean()) * (num / (num - 1))


def above_the_optimal(rewards: Tensor, pulls: Tensor, config: AlgorithmConfig) -> Tensor:
    """Return r - b, divided by the standard deviation for `grpo`, where b is the mean of rewards weighted by `pulls`:
    the squares of the gradients that the samples give with an advantage of 1. Of all b it leaves the sum of their
    gradients the least variance (arXiv 2602.17616). Where no sample gives any, b is the mean."""
    total = pulls.sum()
    if len(rewards) < 2:
        return torch.zeros_like(rewards)
    known = bool(torch.isfinite(total)) and bool(total > 0)
    apart = rewards - ((pulls * rewards).sum() / total if known else rewards.mean())
    return apart / (rewards.std() + _EPS) if config.advantage == "grpo" else apart


@batch_advantage("reinforce_plus_plus")
def reinforce_plus_plus(batch: RewardBatch, config: AlgorithmConfig) -> Tensor:
    """Return (x - mean) / (std + 1e-6) over the step's tokens, where x is the reward still to come at a token."""
    return whiten(batch.to_come, batch.is_trained)


@batch_advantage("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(batch: RewardBatch, config: AlgorithmConfig) -> Tensor:
    """Return (x - mean) / (std + 1e-6) over the step's tokens, where x is r minus the group's mean."""
    num_groups = int(batch.group.max()) + 1
    sums = torch.zeros(num_groups, dtype=batch.rewards.dtype).index_add(0, batch.group, batch.rewards)
    means = sums / torch.bincount(batch.group, minlength=num_groups)
    return whiten(batch.rewards - means[batch.group], batch.num_tokens)


def whiten(numbers: Tensor, counts: Tensor) -> Tensor:
    """Subtract the mean and divide by the standard deviation, where each number counts `counts` times."""
    num = int(counts.sum())
    if num < 2:
        return torch.zeros_like(numbers)
    centred = numbers - (numbers * counts).sum() / num
    std = ((centred.square() * counts).sum() / (num - 1)).sqrt()
    return centred / (std + _EPS)
