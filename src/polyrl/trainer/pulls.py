"""How hard each sample pulls at the weights: the square of the gradient that it gives with an advantage of 1.

The optimal baseline of a group (objectives/advantages.py) weighs rewards with it. The gradient is that of the loss as
it is trained, correction and token weights included: with `tis-sequence` below its cap, and each token's weight 1, it
is w^2 |grad log p|^2 of VCPO (arXiv 2602.17616). Under a loss that clips, tokens beyond the upper bound pull nothing.

Each sample has a forward and a backward pass of its own, by the weights at the step's start, and leaves nothing in the
gradient that is trained: twice the work, and more where many short answers would fit into a pack. An episode of several
sequences is one sample, and its gradient their sum.

Left out: ranks that share a model. None of them has the gradient of one sample.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch.nn.utils import get_total_norm

from polyrl.trainer.model import Policy
from polyrl.trainer.pack_loss import PackLoss, weighed
from polyrl.trainer.packing import make_packs
from polyrl.trainer.ready import Ready, ReadyEpisode, episodes_of

Tensor = torch.Tensor


class Pulls:
    """Measures samples for the optimal baseline; `max_tokens` go through the model at once."""

    def __init__(self, policy: Policy, of_pack: PackLoss, *, max_tokens: int, temperature: float) -> None:
        self._policy, self._of_pack = policy, of_pack
        self._max_tokens, self._temperature = max_tokens, temperature

    def measured(self, groups: Sequence[Sequence[Ready]]) -> list[list[Ready]]:
        """Return the groups with the pull of every episode."""
        episodes = [episode for group in groups for episode in episodes_of(group)]
        if not episodes:
            return [[] for _ in groups]
        norms = torch.stack([self._norm(episode) for episode in episodes]).double()
        pulls = {episode[0].number: pull for episode, pull in zip(episodes, norms.square().tolist(), strict=True)}
        return [[one._replace(pull=pulls[one.number]) for one in group] for group in groups]

    def _norm(self, episode: ReadyEpisode) -> Tensor:
        """Return the norm of an episode's gradient."""
        ready = [one._replace(gains=np.ones(one.sample.num_drawn, np.float32)) for one in episode]
        parameters = [one for one in self._policy.parameters().values() if one.requires_grad]
        total: list[Tensor | None] = [None] * len(parameters)
        for pack in make_packs([one.sample for one in ready], self._max_tokens):
            members = [ready[number] for number in pack.samples]
            scores = self._policy.score(pack, self._temperature)
            batch = self._of_pack.batch(pack, members, scores.logprobs)
            losses, _, _ = self._of_pack.losses(batch)
            loss = weighed(losses, self._of_pack.weights(batch, members))
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
            total = [_sum(before, one) for before, one in zip(total, found, strict=True)]
        return get_total_norm([one.float() for one in total if one is not None])


def _sum(before: Tensor | None, more: Tensor | None) -> Tensor | None:
    if before is None or more is None:
        return more if before is None else before
    return before + more
