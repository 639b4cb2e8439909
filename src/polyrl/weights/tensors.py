"""A model's weights into the bytes of a version, and back into a model, with torch.

    layout_of   the places of a model's tensors in the serving dtype; tensors that share memory appear once
    snapshot    cast a model's tensors, and copy them into the bytes of a version
    pair_up     a model's tensors, each with the version's: all of them, or those that changed

Rules kept here: everything is checked before anything is paired or written, so a model is loaded whole or left alone
(BadTensors). A dtype is never converted on loading: an engine computes with the dtype that the manifest states.
"""

import contextlib
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyrl.weights.buffers import Buffer
from polyrl.weights.chunks import View
from polyrl.weights.manifest import DTYPE_BYTES, Layout, Spec, TensorEntry, lay_out

TORCH_DTYPES: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

_STAGING_BYTES = 64 << 20

# A host copy may be mapped read-only. Tensors over it are only read.
warnings.filterwarnings("ignore", message="The given buffer is not writable")


class BadTensors(ValueError):
    """A model and a layout that do not fit. The message names the tensor, what was found and what was expected."""


def layout_of(state: Mapping[str, Tensor], dtype: str = "bfloat16", *, architecture: str = "") -> Layout:
    """Return the layout of a model's versions, from its state dict or `named_parameters`.

    Floating-point tensors take the serving dtype, others keep theirs. Of several names that share memory, the first
    owns the bytes and the others are tied to it. A tensor sharded over ranks has no memory of its own, and is not tied.
    """
    specs: list[Spec] = []
    tied: dict[str, str] = {}
    owners: dict[tuple[object, ...], str] = {}
    for name, tensor in state.items():
        owner = owners.setdefault(_identity(tensor), name) if tensor.numel() and tensor.data_ptr() else name
        if owner != name:
            tied[name] = owner
            continue
        kind = dtype if tensor.is_floating_point() else _dtype_name(name, tensor)
        specs.append(Spec(name, kind, tuple(tensor.shape)))
    return lay_out(specs, architecture=architecture, tied=tied)


def _identity(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()


def _dtype_name(name: str, tensor: Tensor) -> str:
    if tensor.dtype not in _NAMES:
        raise BadTensors(f"{name}: {tensor.dtype} has no place in a version; expected one of {', '.join(DTYPE_BYTES)}")
    return _NAMES[tensor.dtype]


def snapshot(
    state: Mapping[str, Tensor] | Iterator[tuple[str, Tensor]], layout: Layout, out: View, within: range | None = None
) -> None:
    """Write a model's tensors into the bytes of a version; `within`: only into these. The copies are complete when it
    returns.

    Given an iterator, it holds one tensor at a time, and goes to its end. The bytes between tensors are not touched: a
    new buffer is zero. From a GPU, the cast is done on the device, and the copy goes through pinned memory, or straight
    into `out` if that is pinned (see `pin`).
    """
    if isinstance(state, Mapping):
        given = ((entry, source_of(entry, state)) for entry in layout.tensors)
    else:
        given = _one_by_one(state, layout)
    staging, devices = None, set[torch.device]()
    for entry, tensor in given:
        start, end = (entry.start, entry.end) if within is None else _overlap(entry, within)
        if start >= end:
            continue
        devices.add(tensor.device)
        value = _as_bytes(tensor.to(TORCH_DTYPES[entry.dtype]))[start - entry.start : end - entry.start]
        target = torch.frombuffer(out, dtype=torch.uint8, count=end - start, offset=start)
        if value.device.type == "cpu" or target.is_pinned():
            target.copy_(value, non_blocking=True)
        else:
            staging = _Staging(value.device) if staging is None else staging
            staging.copy(value, target)
    if staging is not None:
        staging.finish()
    _wait(devices)


def _overlap(entry: TensorEntry, within: range) -> tuple[int, int]:
    return max(entry.start, within.start), min(entry.end, within.stop)


def _one_by_one(state: Iterator[tuple[str, Tensor]], layout: Layout) -> Iterator[tuple[TensorEntry, Tensor]]:
    owners = {entry.name: entry for entry in layout.tensors}
    for name, tensor in state:
        if name in owners:
            yield owners[name], source_of(owners.pop(name), {name: tensor})
    for entry in owners.values():
        source_of(entry, {})


def source_of(entry: TensorEntry, state: Mapping[str, Tensor]) -> Tensor:
    """Return the model's tensor for an entry of a layout, not yet cast. Raises BadTensors."""
    if entry.name not in state:
        raise BadTensors(f"{entry.name}: not in the model; expected {entry.dtype} {list(entry.shape)}")
    tensor = state[entry.name].detach()
    if tuple(tensor.shape) != entry.shape:
        raise BadTensors(f"{entry.name}: shape {list(tensor.shape)}; expected {list(entry.shape)}")
    return tensor


def pair_up(
    state: Mapping[str, Tensor], layout: Layout, view: View, changed: Collection[str] | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Return a model's tensors, each with the version's tensor that belongs into it.

    `changed` restricts it to these tensors and those tied to them. Raises BadTensors if a tensor is missing or has
    another shape or dtype, also for one that is not in `changed`.
    """
    if memoryview(view).nbytes != layout.num_bytes:
        raise BadTensors(f"{memoryview(view).nbytes} bytes of weights; expected {layout.num_bytes}")
    plan = [(entry, _destinations(entry, state, layout)) for entry in layout.tensors]
    return [
        (one, entry_tensor(entry, view))
        for entry, destinations in plan
        if changed is None or entry.name in changed
        for one in destinations
    ]


def _destinations(entry: TensorEntry, state: Mapping[str, Tensor], layout: Layout) -> list[Tensor]:
    """Return the model's tensors under this name and the names tied to it, each once."""
    names = [entry.name, *(alias for alias, name in layout.tied.items() if name == entry.name)]
    found: dict[tuple[object, ...], Tensor] = {}
    for name in names:
        if name not in state:
            if name == entry.name and not any(other in state for other in names):
                raise BadTensors(f"{name}: not in the model; expected {entry.dtype} {list(entry.shape)}")
            continue
        tensor = state[name].detach()
        if tuple(tensor.shape) != entry.shape:
            raise BadTensors(f"{name}: shape {list(tensor.shape)}; expected {list(entry.shape)}")
        if tensor.dtype != TORCH_DTYPES[entry.dtype]:
            raise BadTensors(f"{name}: {tensor.dtype} in the model; the version holds {entry.dtype}")
        found[_identity(tensor)] = tensor
    return list(found.values())


def entry_tensor(entry: TensorEntry, view: View) -> Tensor:
    """Return a tensor of a version in place, without a copy."""
    return entry_bytes(entry, view).view(TORCH_DTYPES[entry.dtype]).view(entry.shape)


def entry_bytes(entry: TensorEntry, view: View) -> Tensor:
    if entry.num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(view, dtype=torch.uint8, count=entry.num_bytes, offset=entry.start)


def pin(view: View) -> bool:
    """Page-lock a buffer, so that CUDA copies straight to and from it. Return False if there is no CUDA or it refuses.

    The buffer must live until it is unpinned, or until the process ends.
    """
    if not torch.cuda.is_available():
        return False
    flat = torch.frombuffer(view, dtype=torch.uint8)
    runtime: Any = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(flat.data_ptr(), flat.numel(), 0)) == 0:
        return True
    with contextlib.suppress(RuntimeError):  # CUDA reports it at the next kernel launch: clear it here
        torch.ones(1, device="cuda").add_(1)
    return False


def pin_buffer(buffer: Buffer) -> bool:
    """Pin a buffer until it is closed. Return whether that worked."""
    used = buffer.view[buffer.held.start : buffer.held.stop]
    if not used.nbytes or not pin(used):
        return False
    address = torch.frombuffer(used, dtype=torch.uint8).data_ptr()
    buffer.before_close.append(lambda: unpin(address))
    return True


def unpin(address: int) -> None:
    """Undo `pin` for the buffer at this address. Call it before the memory is given back."""
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(address)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _wait(devices: Collection[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


class _Slot(NamedTuple):
    pinned: Tensor
    ready: torch.cuda.Event


class _Staging:
    """Copies through two pinned buffers: the device fills one while the host empties the other."""

    def __init__(self, device: torch.device) -> None:
        pinned = [torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._slots = [_Slot(one, torch.cuda.Event()) for one in pinned]
        self._device = device
        self._waiting: tuple[_Slot, Tensor] | None = None
        self._next = 0

    def copy(self, source: Tensor, target: Tensor) -> None:
        for piece, place in zip(source.split(_STAGING_BYTES), target.split(_STAGING_BYTES), strict=True):
            slot = self._slots[self._next]
            self._next = 1 - self._next
            slot.pinned[: piece.numel()].copy_(piece, non_blocking=True)
            slot.ready.record(torch.cuda.current_stream(self._device))
            self.finish()
            self._waiting = (slot, place)

    def finish(self) -> None:
        if self._waiting is not None:
            slot, place = self._waiting
            slot.ready.synchronize()
            place.copy_(slot.pinned[: place.numel()])
            self._waiting = None
