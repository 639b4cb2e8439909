"""The server's side of an install: a version that a worker holds in memory goes into the model of this process.

Runs inside a server's processes, one of them a rank, in the environment that the server was installed in: it may use
the standard library, torch and `between`, and nothing else of PolyRL. `handing` is the worker's side:

    rank -> worker   who I am                      (how many we are; which slice of the model is mine)
    worker -> rank   the version's tensors, where each lies, and the file they are in, as a descriptor
    rank -> worker   ready, or why not             nothing has been written so far
    worker -> rank   go                            once all are ready; a connection that is closed means: leave it
    rank -> worker   done, or what went wrong      and digests of parameters, read back

Rules kept here: the file is mapped for reading only, and only one that nobody can shorten. Tensors are views of it;
none is left when an install has ended, since the next version may take its place. Nothing is raised: a server that
hears an exception here may die of it, so the worker is told instead.
"""

import fcntl
import gc
import hashlib
import json
import math
import mmap
import os
import socket
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from polyrl.engines.served.between import HEAD_BYTES, LENGTH, peer_uid

_PATIENCE_S = 900.0

Tensors = Iterator[tuple[str, torch.Tensor]]
Load = Callable[[Tensors], None]


class Rank(NamedTuple):
    """Who takes: one of `num_ranks` processes, with one of `num_slices` slices of every layer that it holds."""

    rank: int
    num_ranks: int
    slice: int
    num_slices: int


def take(name: str, rank: Rank, model: torch.nn.Module, load: Load) -> None:
    """Install what the worker that listens at `name` hands over."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as worker:
            worker.settimeout(_PATIENCE_S)
            worker.connect("\0" + name)
            if peer_uid(worker) not in (os.getuid(), 0):
                return
            _converse(worker, rank, model, load)
    except OSError:  # the worker is gone; it knows from the broken connection that this rank did not answer
        return


def _converse(worker: socket.socket, rank: Rank, model: torch.nn.Module, load: Load) -> None:
    _tell(worker, rank._asdict())
    offer, fd = _hear_offer(worker)
    try:
        problem = _misfit(offer, fd, rank, model)
        _tell(worker, {"problem": problem})
        if not problem and _hear(worker).get("go"):
            _tell(worker, _install(offer, fd, model, load))
    finally:
        os.close(fd)


def _install(offer: dict[str, Any], fd: int, model: torch.nn.Module, load: Load) -> dict[str, Any]:
    try:
        mapping = _load(offer, fd, load)
        if mapping() is not None:
            gc.collect()  # tensors that a loader left in a cycle
        if mapping() is not None:
            return {"problem": "the server keeps tensors of the version that lie in the worker's memory"}
        return {"problem": "", "heads": read_back(model, offer)}
    except Exception as error:  # noqa: BLE001  whatever a server's loaders raise: see the module
        return {"problem": _line(error)}


def _load(offer: dict[str, Any], fd: int, load: Load) -> "weakref.ref[mmap.mmap]":
    """The mapping is not closed, which would pull it away from under a tensor: it goes with the last of them."""
    mapped = mmap.mmap(fd, max(offer["num_bytes"], 1), prot=mmap.PROT_READ)
    load(_tensors(offer, memoryview(mapped)))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return weakref.ref(mapped)


def _misfit(offer: dict[str, Any], fd: int, rank: Rank, model: torch.nn.Module) -> str:
    """Why the version is not for this model; empty when it is.

    Parameters are compared that have their names of the version. Of the rest, which a server fuses and packs, the
    worker has compared names and shapes with those of the model's directory.
    """
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        return "the worker's file can be shortened while it is read"
    if os.fstat(fd).st_size < offer["num_bytes"]:
        return f"a file of {os.fstat(fd).st_size} bytes for {offer['num_bytes']} bytes of weights"
    parameters = dict(model.named_parameters())
    for name, dtype, shape, _, scale in offer["tensors"]:
        ours = parameters.get(name)
        if ours is None or ours.numel() == 0:
            continue
        if (name in offer["probes"] or name.endswith("norm.weight")) and not _is_slice(ours, shape, rank.num_slices):
            return f"{name} has shape {shape} in the version, {list(ours.shape)} in the server: it is of another model"
        if scale is not None or not ours.is_floating_point():
            continue
        if ours.dtype != _dtype(dtype) and not offer["any_dtype"]:
            return f"{name}: {dtype} in the version, {str(ours.dtype)[6:]} in the server; start it with --dtype {dtype}"
    return ""


def _is_slice(ours: torch.Tensor, shape: list[int], num_slices: int) -> bool:
    """Whether a table or a vector may be a rank's part of one of that shape. A table's rows are cut, and padded."""
    if ours.dim() != len(shape):
        return False
    if ours.dim() == 1:
        return ours.shape[0] in (shape[0], shape[0] // num_slices)
    return ours.shape[0] * num_slices >= shape[0] and list(ours.shape[1:]) == shape[1:]


def _tensors(offer: dict[str, Any], view: memoryview) -> Tensors:
    for name, dtype, shape, start, scale in offer["tensors"]:
        tensor = _tensor(view, dtype, shape, start)
        if scale is not None:  # a byte an element, with a scale a row
            tensor = tensor.float() * _tensor(view, "float32", shape[:1], scale)[:, None]
        yield name, tensor


def _tensor(view: memoryview, dtype: str, shape: list[int], start: int) -> torch.Tensor:
    kind, count = _dtype(dtype), math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=kind)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(view, dtype=kind, count=count, offset=start).view(shape)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return found


def read_back(model: torch.nn.Module, offer: dict[str, Any]) -> dict[str, tuple[str, list[int], str]]:
    """Dtype, shape and a digest of the first bytes of parameters; of those that this model still has as they are."""
    parameters: Mapping[str, torch.Tensor] = dict(model.named_parameters())
    dtypes = {name: _dtype(dtype) for name, dtype, _, _, scale in offer["tensors"] if scale is None}
    found: dict[str, tuple[str, list[int], str]] = {}
    for name in offer["probes"]:
        ours = parameters.get(name)
        if ours is None or ours.numel() == 0 or not ours.is_contiguous():
            continue
        dtype = dtypes.get(name, ours.dtype)
        if torch.promote_types(dtype, ours.dtype) != ours.dtype:
            dtype = ours.dtype  # the server has rounded it: nobody can compare its bytes
        head = ours.detach().view(-1)[: HEAD_BYTES // dtype.itemsize].cpu()
        narrow = head.to(dtype)
        if not torch.equal(narrow.to(head.dtype), head):
            narrow = head  # no number of the version's: its digest is another, too
        digest = hashlib.blake2b(narrow.view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()
        found[name] = (str(dtype)[6:], list(ours.shape), digest)
    return found


def _tell(worker: socket.socket, what: dict[str, Any]) -> None:
    raw = json.dumps(what).encode()
    worker.sendall(LENGTH.pack(len(raw)) + raw)


def _hear(worker: socket.socket) -> dict[str, Any]:
    return json.loads(_exactly(worker, LENGTH.unpack(_exactly(worker, LENGTH.size))[0]))


def _hear_offer(worker: socket.socket) -> tuple[dict[str, Any], int]:
    head, fds, _, _ = socket.recv_fds(worker, LENGTH.size, 1)
    try:
        if len(fds) != 1:
            raise ConnectionError("an offer without a file")
        head += _exactly(worker, LENGTH.size - len(head))
        return json.loads(_exactly(worker, LENGTH.unpack(head)[0])), fds[0]
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def _exactly(worker: socket.socket, num_bytes: int) -> bytes:
    raw = bytearray()
    while len(raw) < num_bytes:
        more = worker.recv(min(num_bytes - len(raw), 1 << 20))
        if not more:
            raise ConnectionError("the worker hung up")
        raw += more
    return bytes(raw)


def _line(error: BaseException) -> str:
    said = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {said}"[:500]
