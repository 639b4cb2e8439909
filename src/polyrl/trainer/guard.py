"""Samples whose log-probabilities no engine with our weights can have given: left out of the step, their writers named.

A worker's engine, and the digest of its weights, are its own word; what it says of its tokens is held against what our
own model says of them. The measure is the mean of |log-ratio| over the tokens of one segment of a sample, by the name
of the worker that wrote it. Engines that round otherwise differ by hundredths of a nat; whoever has other weights, or
none, by several. Older weights may differ more: the bound is as many times as large as they are versions behind, plus
one.

Rules kept here: a step is what it would be if the samples beyond the bound had never come (step.py trains it once more
without them). A segment answers for its own tokens alone; and where our own model has no number nobody is to blame:
that gradient moves nothing (optimizer.py). Our own log-probabilities are those of the step's starting weights.

Left out: samples that are masked anyway, of which our model has no log-probabilities.
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
        self._numbers: list[int] = []
        """Of each segment, its sample."""
        self.is_over = not bound
        """Nobody is looked at any more."""

    def look(self, ours: Tensor, theirs: Tensor, samples: Sequence[TrainSample], numbers: Sequence[int]) -> None:
        """Compare samples, of which these are the numbers in the step. Nothing is waited for."""
        if self.is_over or not samples:
            return
        segments = [(number, *segment) for number, one in enumerate(samples) for segment in _segments(one, self._step)]
        lengths, ages = (np.array([segment[at] for segment in segments], np.int64) for at in (1, 2))

        def send(array: "np.ndarray[Any, Any]") -> Tensor:
            return torch.from_numpy(array).to(ours.device, non_blocking=True)

        apart = (ours.detach() - theirs).abs().double().nan_to_num(_BEYOND, posinf=_BEYOND)
        sums = torch.where(ours.isnan(), 0.0, apart).cumsum(0)[send(np.cumsum(lengths) - 1)]
        self._excess.append(
            torch.diff(sums, prepend=sums.new_zeros(1))
            / send(np.maximum(lengths, self._few_tokens) * (1.0 + ages) * self._bound)
        )
        self._numbers += [numbers[segment[0]] for segment in segments]
        self._names += [segment[3] for segment in segments]

    def found(self, peers: Peers = ALONE) -> tuple[frozenset[int], dict[str, float]]:
        """Return the numbers of samples beyond the bound; and their workers, each with the mean difference of its worst
        segment, in nats a token of the present weights. Ranks tell each other of theirs."""
        numbers: set[int] = set()
        named: dict[str, float] = {}
        excess = torch.cat(self._excess).tolist() if self._excess else []
        for number, name, most in zip(self._numbers, self._names, excess, strict=True):
            if most > 1.0:
                numbers.add(number)
                named[name] = max(named.get(name, 0.0), most * self._bound)
        if peers.size > 1 and self._bound:
            for theirs in peers.exchange(msgspec.msgpack.encode((sorted(numbers), named))):
                its_numbers, its_named = msgspec.msgpack.decode(theirs, type=tuple[list[int], dict[str, float]])
                numbers.update(its_numbers)
                for name, most in its_named.items():
                    named[name] = max(named.get(name, 0.0), most)
        return frozenset(numbers), dict(sorted(named.items()))


def _segments(sample: TrainSample, step: int) -> list[tuple[int, int, str]]:
    """Tokens, age and worker of each segment. Where nobody says who wrote it, it is one segment of nobody's."""
    segments = [(one.num_tokens, max(0, step - one.version), one.worker) for one in sample.written_by if one.num_tokens]
    if sum(segment[0] for segment in segments) != len(sample.answer):
        return [(len(sample.answer), 0, "")]
    return segments
