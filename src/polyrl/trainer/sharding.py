"""A model divided between ranks with FSDP2: each holds a part of every tensor; a layer is whole only while it runs.

    whole = shard(model, ranks, torch.bfloat16)      in place: its parameters are now parts
    whole(lambda: model(...))                        within this, what belongs to no layer is whole too
    for name, tensor in gather(parameters): ...      one whole tensor at a time, at every rank

Parts are float32, and computed with in the model's own precision: they are the masters that the optimizer moves.
Gradients of ranks are added, not averaged; whoever knows all samples divides once, as with one rank.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from polyrl.trainer.ranks import Ranks

Tensor = torch.Tensor
T = TypeVar("T")


class WholeEnds(torch.nn.Module):
    """What runs in here finds embedding, last norm and head whole."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], T]) -> T:
        return work()


def shard(model: Any, ranks: Ranks, dtype: torch.dtype) -> WholeEnds:
    """A decoder of transformers, in place. It may be on the CPU: layers go to the device one by one, as parts."""
    is_trained = any(one.requires_grad for one in model.parameters())
    if is_trained:
        model.float()
    precision = MixedPrecisionPolicy()
    if is_trained and dtype != torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    whole = WholeEnds(model)
    for module in (*model.model.layers, whole):
        _shard(module, ranks, precision)
    return whole


def shard_head(head: torch.nn.Module, ranks: Ranks) -> None:
    """A module of its own, in float32 throughout."""
    _shard(head, ranks, MixedPrecisionPolicy())


def _shard(module: Any, ranks: Ranks, precision: MixedPrecisionPolicy) -> None:
    # The root too is parted again after a forward pass: whole, it would not hear of the next update.
    fully_shard(module, mesh=ranks.mesh, mp_policy=precision, reshard_after_forward=True)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def gather(named: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Each tensor whole, in another precision if that is wanted; all ranks must go through it to the end together."""
    for name, one in named.items():
        part = one.detach()
        if dtype is not None and part.is_floating_point():
            part = part.to(dtype)
        yield name, part.full_tensor() if isinstance(part, DTensor) else part


def is_part(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


def total(tensor: Tensor) -> Tensor:
    """A number that is known in parts."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(value: Tensor, other: Tensor) -> Tensor:
    """A copy of a whole tensor, as the other one is: in its precision, on its device, and parted if that is."""
    kind: dict[str, Any] = {"device": other.device, "dtype": other.dtype}
    if not isinstance(other, DTensor):
        return value.to(**kind, copy=True)
    mesh = other.device_mesh
    rows = -(-value.shape[0] // mesh.size())  # as torch.chunk does it
    first = min(mesh.get_local_rank() * rows, value.shape[0])
    part = value[first : first + rows].to(**kind, copy=True)
    shape, stride = value.shape, value.contiguous().stride()
    return DTensor.from_local(part, mesh, other.placements, run_check=False, shape=shape, stride=stride)
