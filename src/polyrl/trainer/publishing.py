"""Offers the trainer's current weights as a version: to the local engine, which shares them, and to the fleet.

Rules kept here: the snapshot is taken in a thread, while the weights do not change. It ends before its caller goes on,
even if cancelled, so that the buffer it writes into is not closed under it. The layout is the model's, and never
changes; tied tensors are sent once, in the dtype that they are served in. An engine with its own copy of the weights
(lora.py) is written first: the snapshot may be read from there.

The difference to the previous version is computed on the host, by the weight server, or on the device, if that is asked
for and there is room. The device's copy is always the version offered last, or it is dropped.
"""

import asyncio
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from polyrl.engines.engine import Weights
from polyrl.engines.finishing import finish_first
from polyrl.ids import Version
from polyrl.trainer import families
from polyrl.trainer.local_engine import LocalEngine
from polyrl.trainer.model import Policy, is_about_memory
from polyrl.weights import tensors
from polyrl.weights.delta import Encoded
from polyrl.weights.server import Offer, WeightServer
from polyrl.weights.tensors_gpu import GpuDeltaEncoder

log = logging.getLogger("polyrl.trainer")


class Publishing:
    """Publishes versions. `engine` is the local one, if there is one."""

    def __init__(
        self,
        policy: Policy,
        server: WeightServer,
        engine: LocalEngine | None,
        known: Mapping[int, str] | None = None,
        gather: Callable[[], Iterator[tuple[str, Tensor]]] | None = None,
        *,
        encodes: bool = False,
        as_in_files: bool = False,
    ) -> None:
        """`known` are the digests of versions that an earlier process published: the next version's parent may be one
        of them. `gather` yields weights that several ranks hold, one by one, and updates the local engine's copy with
        them. `encodes`: compute deltas on the device. `as_in_files`: tensors have the names of the model's files, which
        served engines load; the builtin engine takes those of the model."""
        assert gather is None or not encodes, "what comes one after the other is compared by the host"
        self._gather = gather
        self._policy, self._server, self._engine = policy, server, engine
        self._known = dict(known or {})
        self._as_in_files = as_in_files and policy.adapter is None
        self._layout = tensors.layout_of(self._shapes(), policy.published_dtype)
        self._encodes = encodes and not self._as_in_files
        self._encoder: GpuDeltaEncoder | None = None

    async def publish(self, version: int) -> Offer:
        parent = self._known.get(version - 1, "")
        publish = functools.partial(
            self._server.publish, version, self._layout, self._fill, parent=parent, adapter=self._policy.adapter
        )
        if self._gather is None:
            await self._install(version)
        try:
            offer = await finish_first(asyncio.to_thread(publish))
        except BaseException:
            self._encoder = None
            raise
        if self._gather is not None:  # gathering has updated the engine's copy
            await self._install(version)
        self._known = {version: offer.digest}
        return offer

    async def _install(self, version: int) -> None:
        write = self._policy.engine_writer()
        if self._engine is not None:
            await self._engine.install(Weights(Version(version), in_place=True, write=write))
        elif write is not None:
            await finish_first(asyncio.to_thread(write))

    def _shapes(self) -> Mapping[str, Tensor]:
        """Return tensors whose names and shapes are those of a version."""
        given = self._policy.published()
        if not self._as_in_files:
            return given
        empty = ((name, _empty(one)) for name, one in given.items())
        return {name: _empty(one) for name, one in self._renamed(empty)}

    def _renamed(self, given: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, one in given:
            yield from families.in_files(self._policy.model, name, one) if self._as_in_files else [(name, one)]

    def _fill(self, out: memoryview) -> Encoded | None:
        if self._gather is not None:
            tensors.snapshot(self._renamed(self._gather()), self._layout, out)
            return None
        if self._as_in_files:
            given = ((name, one.detach()) for name, one in self._policy.published().items())
            tensors.snapshot(self._renamed(given), self._layout, out)
            return None
        weights = self._policy.published()
        changes = self._changes_in(weights) if self._encodes else None
        tensors.snapshot(weights, self._layout, out)
        return changes

    def _changes_in(self, weights: Mapping[str, Tensor]) -> Encoded | None:
        try:
            if self._encoder is not None:
                return self._encoder.encode(weights)
            self._encoder = GpuDeltaEncoder(self._layout, weights)
        except RuntimeError as error:
            if not is_about_memory(error):
                raise
            self._encoder, self._encodes = None, False
            size = self._layout.num_bytes / 2**30
            log.warning("deltas are made on the host from now on: the device has no room for %.1f GiB of weights", size)
        return None


def _empty(tensor: Tensor) -> Tensor:
    """Return a tensor without memory. Parts of one would be taken for parts of another, and tied to them."""
    return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")
