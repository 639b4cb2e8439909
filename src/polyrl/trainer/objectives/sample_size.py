"""Effective sample size: how many samples of the current policy the samples of an update are worth.

With w the product of p / p_engine over a training sequence, n sequences are worth (sum w)^2 / (sum w^2) samples that
the current policy would have drawn. The share of n is 1 if all w are equal, and 1/n if one sequence outweighs all
others. Stale samples lower it. VCPO (arXiv 2602.17616) multiplies the learning rate of an update by the square root of
the share.

Sums stay on the device until the update. Ranks add theirs up.
"""

from collections.abc import Sequence

import msgspec
import torch

from polyrl.trainer.objectives.registry import TokenBatch
from polyrl.trainer.ranks import ALONE, Peers

Tensor = torch.Tensor

_MAX_LOG_RATIO = 20.0


class SampleSize:
    """The sums over the sequences of one update."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, ours: Tensor, batch: TokenBatch) -> None:
        """Add the sequences of a pack. `ours` are log-probabilities of their tokens by the trainer."""
        apart = ours.detach().double() - batch.behaviour_logprobs
        sums = apart.new_zeros(len(batch.num_tokens)).index_add(0, batch.sample, apart)
        ratio = sums.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
        self._sums += torch.stack([torch.ones_like(ratio).sum(), ratio.sum(), ratio.square().sum()])

    def share(self, peers: Peers = ALONE) -> float:
        """Return the effective share of the samples: 1 without samples, 0 if a ratio is not a number."""
        mine: list[float] = self._sums.tolist()
        told: Sequence[Sequence[float]] = [mine]
        if peers.size > 1:
            told = [
                msgspec.msgpack.decode(one, type=list[float]) for one in peers.exchange(msgspec.msgpack.encode(mine))
            ]
        num, total, squares = (sum(numbers) for numbers in zip(*told, strict=True))
        if not num:
            return 1.0
        share = total * total / (num * squares) if squares else 0.0
        return min(1.0, share) if share == share else 0.0
