"""How much better a sample is than others.

Most compare the samples of a group: a group's advantages need nothing but its rewards, and a group of one has nothing
to be compared with, so that its advantage is zero. `reinforce_plus_plus` compares all samples of the step, so nothing
is trained before the last one is there. Mean and standard deviation (n - 1) are over tokens that are trained: what goes
into the loss has mean 0 and standard deviation 1, however long the answers are.

Where the reward pays for KL, an answer pays for all of its tokens, as verl and TRL have it. With `reinforce_plus_plus`
a token pays for itself and for those after it, as its paper (2501.03262) and verl have it.
"""

import torch

from polyrl.config.recipe import AlgorithmConfig
from polyrl.trainer.objectives.registry import RewardBatch, advantage, batch_advantage

Tensor = torch.Tensor

_EPS = 1e-6


@advantage("grpo")
def grpo(rewards: Tensor, config: AlgorithmConfig) -> Tensor:
    """(r - mean) / (std + 1e-6), with the standard deviation of a sample (n - 1)."""
    if len(rewards) < 2:
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std() + _EPS)


@advantage("dr_grpo")
def dr_grpo(rewards: Tensor, config: AlgorithmConfig) -> Tensor:
    """r - mean. With aggregation `fixed` nothing is divided by what the answers happened to be."""
    return rewards - rewards.mean()


@advantage("rloo")
def rloo(rewards: Tensor, config: AlgorithmConfig) -> Tensor:
    """r - the mean of the others."""
    num = len(rewards)
    return torch.zeros_like(rewards) if num < 2 else (rewards - rewards.mean()) * (num / (num - 1))


@batch_advantage("reinforce_plus_plus")
def reinforce_plus_plus(batch: RewardBatch, config: AlgorithmConfig) -> Tensor:
    """(x - mean) / (std + 1e-6) of the step's tokens, where x is what is still to come from a token on."""
    return whiten(batch.to_come, batch.is_trained)


@batch_advantage("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(batch: RewardBatch, config: AlgorithmConfig) -> Tensor:
    """x = r - the group's mean; then (x - mean) / (std + 1e-6) of the step's tokens."""
    num_groups = int(batch.group.max()) + 1
    sums = torch.zeros(num_groups, dtype=batch.rewards.dtype).index_add(0, batch.group, batch.rewards)
    means = sums / torch.bincount(batch.group, minlength=num_groups)
    return whiten(batch.rewards - means[batch.group], batch.num_tokens)


def whiten(numbers: Tensor, counts: Tensor) -> Tensor:
    """Less their mean, through their standard deviation, where each number is there `counts` times."""
    num = int(counts.sum())
    if num < 2:
        return torch.zeros_like(numbers)
    centred = numbers - (numbers * counts).sum() / num
    std = ((centred.square() * counts).sum() / (num - 1)).sqrt()
    return centred / (std + _EPS)
