"""Leaves out samples whose log-probabilities no engine with our weights can have given, and names their writers.

A worker's engine, and the digest of its weights, are its own claim; the log-probabilities it reports are compared with
those of our own model. The measure is the mean |log-ratio| over the tokens of one segment of a sample, charged to the
worker that wrote the segment. Engines that round differently differ by hundredths of a nat; a worker with other
weights, or none, differs by several nats. Older weights may differ more: for weights that are k versions behind, the
bound is k + 1 times as large.

Rules kept here: a step comes out as if the samples beyond the bound had never arrived (step.py trains it again without
them). With one training sequence, its whole episode is left out. A segment answers for its own tokens only. Where our
own model gives NaN no worker is to blame: that gradient moves nothing (optimizer.py). Our own log-probabilities are
those of the step's starting weights.

Left out: with one update, samples that are masked. The pass that trains computes no log-probabilities for them.
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
"""A shorter segment is averaged over this many tokens: a single rare token may differ by nats in an honest engine."""
_BEYOND = 1e9
"""The nats charged for a token whose difference is not finite: beyond any bound, but still a number to add."""


class MismatchGuard:
    """The guard of one step. `bound` is in nats per token; 0 turns the guard off."""

    def __init__(self, bound: float, step: int, few_tokens: int = FEW_TOKENS) -> None:
        self._bound, self._step, self._few_tokens = bound, step, few_tokens
        self._names: list[str] = []
        self._excess: list[Tensor] = []
        """The mean difference of each segment, divided by its bound."""
        self._numbers: list[int] = []
        """The number of the episode that each segment belongs to."""
        self.is_over = not bound
        """Whether no more samples are compared."""

    def look(self, ours: Tensor, theirs: Tensor, samples: Sequence[TrainSample], numbers: Sequence[int]) -> None:
        """Compare samples, given the numbers of their episodes within the step. Does not wait for the device."""
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
        """Return the numbers of the episodes beyond the bound; and their workers, each with the mean difference of its
        worst segment, in nats per token, divided by its versions behind + 1. Ranks exchange their findings."""
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
    """Return tokens, age and worker of each segment. A sample of unknown writers is one segment without a name."""
    segments = [(one.num_tokens, max(0, step - one.version), one.worker) for one in sample.written_by if one.num_tokens]
    if sum(segment[0] for segment in segments) != sample.num_drawn:
        return [(sample.num_drawn, 0, "")]
    return segments
