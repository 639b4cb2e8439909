"""The critic: a copy of the model that predicts, before each answer token, the reward still to come.

    critic = Critic(Policy.load("DIR"), optimizer_config, num_steps)
    values = critic.values(pack)                    one for each answer token of the pack

It is a decoder without its vocabulary head, with a linear head that starts at zero: at first every value is zero, and
advantages are plain returns. It has its own optimizer, whose state holds all of its weights, so a checkpoint needs
nothing else.

Left out: advantages (gae.py), and when it is trained (step.py): along with the policy, mini-batch by mini-batch.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from polyrl.config.recipe import OptimizerConfig
from polyrl.trainer import sharding
from polyrl.trainer.model import Policy
from polyrl.trainer.optimizer import Optimizer
from polyrl.trainer.packing import Pack
from polyrl.trainer.ranks import RankGroup

Tensor = torch.Tensor
Floats = np.ndarray[Any, np.dtype[np.float32]]


class ValueLosses(NamedTuple):
    """The value loss of each token."""

    losses: Tensor
    clipped: Tensor
    """Whether the clipped loss is the larger one."""


class Critic:
    """A value model. It takes over `trunk`, removes its vocabulary head, and shares no parameter with the policy."""

    def __init__(self, trunk: Policy, config: OptimizerConfig, num_steps: int, ranks: RankGroup | None = None) -> None:
        """`ranks` are those that share the trunk, if it is sharded."""
        self._trunk = trunk
        width = trunk.model.config.get_text_config().hidden_size
        trunk.model.set_output_embeddings(torch.nn.Identity())
        self._head = torch.nn.Linear(width, 1).to(trunk.device)
        torch.nn.init.zeros_(self._head.weight)
        torch.nn.init.zeros_(self._head.bias)
        if ranks is not None:
            sharding.shard_head(self._head, ranks)
        self.optimizer = Optimizer(self.parameters(), config, num_steps)

    def parameters(self) -> dict[str, Tensor]:
        parameters: dict[str, Tensor] = dict(self._trunk.model.base_model.named_parameters())
        parameters |= {f"value_head.{name}": one for name, one in self._head.named_parameters()}
        return parameters

    def values(self, pack: Pack) -> Tensor:
        """Return (answer tokens,) float32, with gradients if torch has them enabled."""
        return self._trunk.whole(self._head(self._trunk.hidden(pack).float())[:, 0], pack)

    @torch.no_grad()
    def values_only(self, pack: Pack) -> Tensor:
        return self.values(pack)


def explained_variance(values: Sequence[Floats], returns: Sequence[Floats]) -> float:
    """Return the share of the returns' variance, over tokens, that the values explain. 0 if there is no variance."""
    if not values:
        return 0.0
    said, came = np.concatenate(values).astype(np.float64), np.concatenate(returns).astype(np.float64)
    spread = float(came.var())
    return 1 - float((came - said).var()) / spread if spread > 0 else 0.0


def value_losses(values: Tensor, old: Tensor, returns: Tensor, clip: float) -> ValueLosses:
    """Return (v - R)^2 / 2; with a clip, the larger of that and the same for v held within `clip` of the old value."""
    losses = 0.5 * (values - returns).square()
    if clip == 0:
        return ValueLosses(losses, torch.zeros_like(losses, dtype=torch.bool))
    held = 0.5 * (old + (values - old).clamp(-clip, clip) - returns).square()
    return ValueLosses(torch.maximum(losses, held), held > losses)
