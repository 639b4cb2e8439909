"""Replicas meet at the end of a step: what each has added is put together, and all make the same update.

    meeting.counts(...)          sums over replicas
    meeting.held(...)            the samples that any replica has held back, at every rank
    meeting.gradients(...)       sums over replicas, in place

Until then each replica has trained on groups of its own, and no other replica knows of them. After it all ranks hold
the same gradients, to the last bit, so they hold the same weights after the update.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import msgspec
import torch

from polyrl.trainer import sharding
from polyrl.trainer.batch import decode_arrays, encode_arrays, make_sample
from polyrl.trainer.contexts import in_contexts
from polyrl.trainer.optimizer import Optimizer
from polyrl.trainer.ranks import Ranks
from polyrl.trainer.ready import Ready
from polyrl.trainer.step_stats import Added

Tensor = torch.Tensor


class StepCounts(NamedTuple):
    added: Added
    num_open_tokens: int
    num_open_samples: int


class Meeting:
    """The replicas of a run, of which this rank belongs to one."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.everyone = in_contexts(ranks)

    def counts(self, own: StepCounts) -> StepCounts:
        """Return the sums over replicas. All ranks of a replica have counted the same."""
        every = [
            msgspec.msgpack.decode(data, type=StepCounts) for data in self._of_replicas(msgspec.msgpack.encode(own))
        ]
        added = Added()
        for one in every:
            added = added.plus(one.added)
        return StepCounts(added, sum(one.num_open_tokens for one in every), sum(one.num_open_samples for one in every))

    def held(self, own: Sequence[Sequence[Ready]]) -> list[list[Ready]]:
        """Return the groups of all replicas, in the same order at every rank."""
        return list(chain.from_iterable(decode_held(data) for data in self._of_replicas(encode_held(own))))

    def gradients(self, optimizer: Optimizer) -> None:
        """Sum the gradients over replicas. A replica that has trained nothing counts as zeros."""
        named = optimizer.gradients()
        told = msgspec.msgpack.encode(sorted(named))
        known = dict.fromkeys(chain.from_iterable(map(_names, self.ranks.exchange(told))))
        optimizer.fill_in(known)
        named = optimizer.gradients()
        self.ranks.add_up(sharding.own_part(named[name]) for name in sorted(known))

    def _of_replicas(self, data: bytes) -> list[bytes]:
        """Return what the first rank of each replica has said."""
        return self.ranks.exchange(data)[:: self.ranks.replica.size]


def encode_held(groups: Sequence[Sequence[Ready]]) -> bytes:
    return encode_arrays([[(*one._replace(sample=None), tuple(one.sample)) for one in group] for group in groups])  # type: ignore[arg-type]


def decode_held(data: bytes) -> list[list[Ready]]:
    groups = decode_arrays(data)
    return [[Ready(*fields)._replace(sample=make_sample(*sample)) for *fields, sample in group] for group in groups]


def _names(data: bytes) -> list[str]:
    return msgspec.msgpack.decode(data, type=list[str])
