"""How much better a sample is than its siblings. Group-local: a group's advantages need nothing but its rewards.

A group of one has nothing to be compared with: its advantage is zero. Left out: what needs the whole batch.
"""

import torch

from polyrl.config.recipe import AlgorithmConfig
from polyrl.trainer.registry import advantage

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
