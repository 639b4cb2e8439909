"""Samples whose log-probabilities no engine with our weights can have given: left out of the loss, their writers named.

A worker's engine, and the digest of its weights, are its own word; what it says of its tokens is held against what our
own model says of them. The measure is the mean of |log-ratio| over the tokens of one segment of a sample, by the name
of the worker that wrote it. Engines that round otherwise differ by hundredths of a nat; whoever has other weights, or
none, by several. Older weights may differ more: the bound is as many times as large as they are versions behind, plus
one.

Rules kept here: nothing is looked at before the step is over. A sample beyond the bound is treated as if our own model
had drawn it, so that its ratios are finite, and has no weight in the loss. A segment answers for its own tokens alone;
and where our own model has no number nobody is to blame: that gradient moves nothing (optimizer.py).
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from polyrl.trainer.batch import TrainSample
from polyrl.trainer.ranks import ALONE, Peers

Tensor = torch.Tensor

FEW_TOKENS = 16
"""A shorter segment counts as one of so many tokens: a single rare token may differ by nats in an honest engine."""
_BEYOND = 1e9
"""Nats of a token that is no number: beyond any bound, and finite, so that it adds up with others'."""


class MismatchGuard:
    """Of one step. `bound` is in nats a token; 0: nobody is looked at."""

    def __init__(self, bound: float, step: int, few_tokens: int = FEW_TOKENS) -> None:
        self._bound, self._step, self._few_tokens = bound, step, few_tokens
        self._names: list[str] = []
        self._excess: list[Tensor] = []
        """Of each segment, its mean over its bound."""

    def keeps(
        self, ours: Tensor, theirs: Tensor, samples: Sequence[TrainSample], sample_of: Tensor, *, blames: bool = True
    ) -> Tensor | None:
        """Of each token, whether its sample is trained on; None: all are. `sample_of` numbers each token's sample.

        Without `blames` nobody is named: an update has moved our own weights since the step began.
        """
        if not self._bound:
            return None
        segments = [(number, *segment) for number, one in enumerate(samples) for segment in _segments(one, self._step)]
        numbers, lengths, ages = (np.array([segment[at] for segment in segments], np.int64) for at in (0, 1, 2))

        def send(array: "np.ndarray[Any, Any]") -> Tensor:
            return torch.from_numpy(array).to(ours.device, non_blocking=True)

        apart = (ours.detach() - theirs).abs().double().nan_to_num(_BEYOND, posinf=_BEYOND)
        sums = torch.where(ours.isnan(), 0.0, apart).cumsum(0)[send(np.cumsum(lengths) - 1)]
        excess = torch.diff(sums, prepend=sums.new_zeros(1)) / send(
            np.maximum(lengths, self._few_tokens) * (1.0 + ages) * self._bound
        )
        if blames:
            self._names += [segment[3] for segment in segments]
            self._excess.append(excess)
        most = sums.new_zeros(len(samples)).scatter_reduce(0, send(numbers), excess, "amax")
        return (most <= 1.0)[sample_of]

    def too_far(self, peers: Peers = ALONE) -> dict[str, float]:
        """Workers beyond the bound: the mean difference of their worst segment, in nats a token of these weights."""
        found: dict[str, float] = {}
        excess = torch.cat(self._excess).tolist() if self._excess else []
        for name, number in zip(self._names, excess, strict=True):
            if number > 1.0:
                found[name] = max(found.get(name, 0.0), number * self._bound)
        if peers.size > 1:
            for theirs in peers.exchange(msgspec.msgpack.encode(found)):
                for name, number in msgspec.msgpack.decode(theirs, type=dict[str, float]).items():
                    found[name] = max(found.get(name, 0.0), number)
        return dict(sorted(found.items()))


def _segments(sample: TrainSample, step: int) -> list[tuple[int, int, str]]:
    """Tokens, age and worker of each segment. Where nobody says who wrote it, it is one segment of nobody's."""
    segments = [(one.num_tokens, max(0, step - one.version), one.worker) for one in sample.written_by if one.num_tokens]
    if sum(segment[0] for segment in segments) != len(sample.answer):
        return [(len(sample.answer), 0, "")]
    return segments
