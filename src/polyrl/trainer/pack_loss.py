"""The loss of a pack's tokens, as the algorithm has it: what it is given, and the weight of each token.

A token's loss is summed with its weight over all packs of an update, and divided once (step.py).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from polyrl.config.recipe import AlgorithmConfig
from polyrl.trainer.batch import TrainSample
from polyrl.trainer.objectives import aggregation, corrections
from polyrl.trainer.objectives.registry import TokenBatch, checked_loss, find_loss
from polyrl.trainer.packing import Pack
from polyrl.trainer.ready import Ready

Tensor = torch.Tensor


class PackLoss:
    """The loss of a recipe, with its correction. `ready` are the sequences of the pack, with their advantages."""

    def __init__(self, config: AlgorithmConfig, device: torch.device) -> None:
        self._config, self._device = config, device
        self._loss = find_loss(config.loss, config.loss_args)

    def batch(self, pack: Pack, ready: Sequence[Ready], logprobs: Tensor) -> TokenBatch:
        """Return what the loss is given; `logprobs` are those of the current weights, with their gradient."""
        samples = [one.sample for one in ready]
        behaviour = self._send(np.concatenate([one.logprobs for one in samples]))
        return TokenBatch(
            logprobs=logprobs,
            old_logprobs=self._old(samples, behaviour, logprobs),
            behaviour_logprobs=behaviour,
            advantages=self._send(np.concatenate([one.gains for one in ready if one.gains is not None])),
            sample=self._send(pack.sample),
            num_tokens=self._send(pack.num_drawn_tokens),
        )

    def losses(self, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
        """Return the loss of each token, weighted by the off-policy correction if there is one; numbers whose means
        are metrics; and the correction's ratios before any bound."""
        config = self._config
        losses, stats = checked_loss(self._loss(batch, config), len(batch.logprobs), config.loss)
        if config.correction in (None, "none"):
            return losses, stats, None
        weights, its_stats, ratio = corrections.weigh(batch, config)
        return losses * weights, stats | its_stats, ratio

    def weights(self, batch: TokenBatch, ready: Sequence[Ready]) -> Tensor | None:
        """Return the weight of each token in the sum. None: all are 1."""
        lengths = self._send(np.array([one.num_episode_tokens for one in ready], np.int64))
        return aggregation.token_weights(batch.sample, lengths, self._config)

    def _old(self, samples: Sequence[TrainSample], behaviour: Tensor, present: Tensor) -> Tensor:
        if self._config.old_logprobs == "engine":
            return behaviour
        given = [one.old_logprobs for one in samples if one.old_logprobs is not None]
        if len(given) == len(samples):
            return self._send(np.concatenate(given))
        return present.detach()

    def _send(self, numbers: "np.ndarray[Any, Any]") -> Tensor:
        return torch.from_numpy(numbers).to(self._device, non_blocking=True)


def weighed(numbers: Tensor, weights: Tensor | None) -> Tensor:
    return (numbers if weights is None else numbers * weights).sum()
