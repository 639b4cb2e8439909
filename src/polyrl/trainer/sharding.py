"""A model sharded over ranks with FSDP2: each rank holds a part of every tensor; a layer is whole only while it runs.

    whole = shard(model, ranks, torch.bfloat16)      in place: its parameters are now shards
    whole(lambda: model(...))                        within this, parameters outside the layers are whole too
    for name, tensor in gather(parameters.items()):  one whole tensor at a time, at every rank

Trained shards are float32, and computed with in the model's own precision: they are the masters that the optimizer
updates. A frozen base with low-rank changes (lora.py) stays in its own precision, and the changes, float32, compute in
theirs. Gradients of ranks are summed, not averaged. They are divided once, when all samples are known, as with one
rank.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from polyrl.trainer import families
from polyrl.trainer.ranks import RankGroup

Tensor = torch.Tensor
T = TypeVar("T")


class StoredTensors(Mapping[str, Tensor], ABC):
    """Tensors on disk, which a rank reads its own rows of (state/sharded.py). `[name]` reads one whole."""

    @abstractmethod
    def under(self, prefix: str) -> "StoredTensors":
        """Return those whose names begin so, by the rest of their names."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]: ...

    @abstractmethod
    def part(self, name: str, other: Tensor) -> Tensor:
        """Return this rank's rows, with the dtype, the device and the sharding of another tensor."""


def shape_of(state: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    return state.shape(name) if isinstance(state, StoredTensors) else tuple(state[name].shape)


def part_of(state: Mapping[str, Tensor], name: str, other: Tensor) -> Tensor:
    """Return a copy of a tensor, or of this rank's rows of it, as `other` has them."""
    return state.part(name, other) if isinstance(state, StoredTensors) else like(state[name], other)


class WholeEnds(torch.nn.Module):
    """Runs a function with the embedding, the last norm and the head gathered."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], T]) -> T:
        return work()


def shard(model: Any, ranks: RankGroup, dtype: torch.dtype) -> WholeEnds:
    """Shard a decoder of transformers in place. It may be on the CPU: layers go to the device one by one, as shards."""
    is_trained = all(one.requires_grad for one in model.parameters())
    precision = MixedPrecisionPolicy()
    if is_trained and dtype != torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    whole = WholeEnds(model)
    for module in (*families.layers_of(model), whole):
        if is_trained:  # layer by layer: the whole model in float32 would take twice the host memory
            module.float()
        _shard(module, ranks, precision)
    return whole


def shard_head(head: torch.nn.Module, ranks: RankGroup) -> None:
    """Shard a separate module, which computes in float32."""
    _shard(head, ranks, MixedPrecisionPolicy())


def _shard(module: Any, ranks: RankGroup, precision: MixedPrecisionPolicy) -> None:
    # The root too is resharded after a forward pass: kept whole, it would miss the next update.
    fully_shard(module, mesh=ranks.mesh, mp_policy=precision, reshard_after_forward=True)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def gather(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor whole. All ranks must iterate to the end together."""
    for name, one in named:
        yield name, total(one.detach())


def part_like(rows: Tensor, other: Tensor) -> Tensor:
    """Return this rank's rows as a part of a tensor that is sharded as another one, of the same shape, is."""
    if not isinstance(other, DTensor):
        return rows
    kind: dict[str, Any] = {"run_check": False, "shape": other.shape, "stride": other.stride()}
    return DTensor.from_local(rows, other.device_mesh, other.placements, **kind)


def away_like(rows: Tensor, other: Tensor) -> Tensor:
    """Return `part_like` of rows that stay where they are, as in the host's memory, where `part_like` would move them
    to the device of the ranks. They have the other's dtype."""
    return DTensor(rows, other._spec, requires_grad=False) if isinstance(other, DTensor) else rows


def first_row(tensor: Tensor) -> int:
    """Return the number of the first row that this rank has of a sharded tensor."""
    assert isinstance(tensor, DTensor)
    mesh = tensor.device_mesh
    rows = -(-tensor.shape[0] // mesh.size())  # as torch.chunk splits
    return min(mesh.get_local_rank() * rows, tensor.shape[0])


def rows_of(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a tensor; all of them, if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, not copied; all of one that is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_part(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


def total(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor that may be spread over ranks, on the device of the ranks."""
    if not isinstance(tensor, DTensor):
        return tensor
    is_away = tensor.device.type != tensor.device_mesh.device_type
    return total(part_like(tensor.to_local(), tensor)) if is_away else tensor.full_tensor()


def like(value: Tensor, other: Tensor) -> Tensor:
    """Return a copy of a whole tensor, with the dtype, the device and the sharding of another one."""
    kind: dict[str, Any] = {"device": other.device, "dtype": other.dtype}
    if not isinstance(other, DTensor):
        return value.to(**kind, copy=True)
    first = first_row(other)
    part = value[first : first + other.to_local().shape[0]].to(**kind, copy=True)
    return part_like(part, other)
