"""Load a checkpoint into the models of all ranks, whether or not they see the files.

Where they do, each rank reads the rows that it needs. Where only rank zero does, it sends every tensor to all, one at a
time: ranks ask for them in the same order, since they hold the same models.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from polyrl.trainer import sharding
from polyrl.trainer.leading import Learner
from polyrl.trainer.ranks import Ranks
from polyrl.trainer.sharding import StoredTensors
from polyrl.trainer.state import checkpoint

Tensor = torch.Tensor


def restore(
    learner: Learner, ranks: Ranks, folder: Path, *, is_shared: bool, tensors: Mapping[str, Tensor] | None = None
) -> None:
    """Load a checkpoint, at all ranks together. `tensors` are those that rank zero has opened. Raises UserError."""
    if is_shared and tensors is None:
        tensors = checkpoint.load(folder, verify=False)[1]
    if not is_shared:
        tensors = SentTensors(ranks, tensors)
    assert tensors is not None
    if tensors:
        learner.restore(tensors)


class SentTensors(StoredTensors):
    """Tensors that rank zero has and the others receive. All ranks ask for the same ones in the same order."""

    def __init__(self, ranks: Ranks, given: Mapping[str, Tensor] | None, known: dict[str, Any] | None = None) -> None:
        self._ranks, self._given = ranks, given
        if known is None:
            ours = {name: (_dtype(one), tuple(one.shape)) for name, one in (given or {}).items()}
            known = msgspec.msgpack.decode(ranks.broadcast(msgspec.msgpack.encode(ours)), type=dict[str, Any])
        self._known = known

    def under(self, prefix: str) -> "SentTensors":
        known = {name.removeprefix(prefix): one for name, one in self._known.items() if name.startswith(prefix)}
        given = self._given
        if given is not None:
            given = given.under(prefix) if isinstance(given, StoredTensors) else _Named(given, prefix)
        return SentTensors(self._ranks, given, known)

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def __getitem__(self, name: str) -> Tensor:
        dtype, shape = self._known[name]
        data = b""
        if self._given is not None:
            data = self._given[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        data = bytearray(self._ranks.broadcast(data))
        return torch.frombuffer(data, dtype=getattr(torch, dtype)).view(tuple(shape)) if data else torch.empty(shape)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._known[name][1])

    def part(self, name: str, other: Tensor) -> Tensor:
        return sharding.like(self[name], other)


class _Named(Mapping[str, Tensor]):
    """Tensors whose names begin so, by the rest of their names."""

    def __init__(self, given: Mapping[str, Tensor], prefix: str) -> None:
        self._given, self._prefix = given, prefix

    def __getitem__(self, name: str) -> Tensor:
        return self._given[self._prefix + name]

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._given if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
