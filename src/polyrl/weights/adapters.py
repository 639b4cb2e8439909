"""Adapters: versions that hold low-rank (LoRA) changes to a base model, and merging them with that base.

    merge         base + scaling * (b @ a), in place: the same arithmetic for the trainer and for workers
    fingerprint   the digest of a model's numbers, by which an adapter names the base it was trained on
    pair_up       a model's tensors, each with its new value from base and adapter

Rules kept here: merging gives the same bits on every device. A library's matrix product does not: it chooses its own
order of addition, and a fused multiply-add rounds once where separate operations round twice. So products are added in
the order of the rank, each multiplication and each addition is rounded by itself, and the sum is rounded once to the
base's dtype. An adapter for another base is refused (BadTensors).
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch
import xxhash
from torch import Tensor

from polyrl.weights.chunks import View
from polyrl.weights.manifest import AdapterFacts, Manifest, changes_in
from polyrl.weights.tensors import BadTensors, entry_tensor

_BLOCK_ELEMENTS = {"cuda": 4 << 20, "cpu": 64 << 10}
"""The number of elements merged at a time: few enough to stay in the cache while all ranks are added."""


@torch.no_grad()
def merge(base: Tensor, a: Tensor, b: Tensor, scaling: float, out: Tensor) -> None:
    """Write base + scaling * (b @ a) into `out`.

    `a` is (rank, columns) and `b` is (rows, rank). All tensors are on one device.
    """
    a, b = a.detach().float(), b.detach().float() * torch.tensor(scaling, dtype=torch.float32, device=b.device)
    num_rows = max(1, _BLOCK_ELEMENTS.get(base.device.type, 64 << 10) // max(1, base.shape[1]))
    product = torch.empty((min(num_rows, base.shape[0]), base.shape[1]), dtype=torch.float32, device=base.device)
    for start in range(0, base.shape[0], num_rows):
        rows = slice(start, min(start + num_rows, base.shape[0]))
        its = product[: rows.stop - rows.start]
        change = b[rows, 0:1] * a[0]
        for number in range(1, a.shape[0]):
            torch.mul(b[rows, number : number + 1], a[number], out=its)
            change.add_(its)
        out[rows].copy_(change.add_(base[rows].float()))


def fingerprint(parameters: Mapping[str, Tensor]) -> str:
    """Return the digest of names, shapes, dtypes and every number. `named_parameters` lists tied tensors once."""
    facts = [(name, str(one.dtype), list(one.shape), _digest(one)) for name, one in sorted(parameters.items())]
    return hashlib.blake2b(msgspec.json.encode(facts), digest_size=32).hexdigest()


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().view(-1)
    data: Any = flat.view(torch.uint8).numpy()
    return xxhash.xxh3_128_hexdigest(memoryview(data))


class Base:
    """The weights that adapters are merged with, in this machine's memory. They take as much memory as the model."""

    def __init__(self, parameters: Mapping[str, Tensor], name: str) -> None:
        self.parameters = {key: one.detach() for key, one in parameters.items()}
        self.name = name
        self.fingerprint = fingerprint(self.parameters)

    def pair_up(
        self, model: Mapping[str, Tensor], manifest: Manifest, view: View, *, changed_only: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the model's tensors, each with its new value, on the model's device.

        `changed_only` yields only the tensors that the adapter changes, for a model that already has another adapter of
        the same base and layout. All checks are made when the first pair is asked for. Raises BadTensors.
        """
        assert manifest.adapter is not None
        self._check(manifest.adapter)
        changes = {one.target: one for one in changes_in(manifest.layout)}
        for name, change in changes.items():
            shape = (change.b.shape[0], change.a.shape[1])
            if name not in self.parameters or tuple(self.parameters[name].shape) != shape:
                raise BadTensors(f"{name}: not in the base as {list(shape)}, which the adapter changes")
        for name, ours in model.items():
            change = changes.get(name)
            if change is None and changed_only:
                continue
            near = self.parameters[name].to(ours.device, non_blocking=True)
            if change is not None:
                a, b = (entry_tensor(one, view).to(ours.device, non_blocking=True) for one in (change.a, change.b))
                base, near = near, torch.empty_like(near)
                merge(base, a, b, manifest.adapter.scaling, near)
            yield ours, near

    def _check(self, facts: AdapterFacts) -> None:
        dtype = str(next(iter(self.parameters.values())).dtype).removeprefix("torch.")
        if facts.dtype != dtype:
            raise BadTensors(f"an adapter for a base in {facts.dtype}; {self.name} is loaded in {dtype}")
        if facts.base != self.fingerprint:
            raise BadTensors(
                f"an adapter for another base: {facts.base[:16]}..., and {self.name} is {self.fingerprint[:16]}...; "
                "expected the model that the run is trained from"
            )
