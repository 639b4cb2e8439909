"""Offering the trainer's present weights as a version: to the local engine, which shares them, and to the fleet.

Rules kept here: the snapshot is taken in a thread, while nobody changes the weights, and ends before who waits for it
leaves: what it writes into is not closed under it. The layout is the model's, and never changes; tied tensors are sent
once, in the dtype that they are served in. An engine with weights of its own (lora.py) is given them first: what is
sent may be read from there.

What changed since the version before is found on the host, by whoever serves it, or on the device, if that is asked for
and there is room. What the device holds is always the version that was offered last, or it is let go.
"""

import asyncio
import functools
import logging
from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from polyrl.engines.engine import Weights
from polyrl.engines.finishing import finish_first
from polyrl.ids import Version
from polyrl.trainer.local_engine import LocalEngine
from polyrl.trainer.model import Policy, is_about_memory
from polyrl.weights import tensors
from polyrl.weights.delta import Encoded
from polyrl.weights.server import Offer, WeightServer
from polyrl.weights.tensors_gpu import GpuDeltaEncoder

log = logging.getLogger("polyrl.trainer")


class Publishing:
    """`engine` is the local one, if there is one."""

    def __init__(
        self,
        policy: Policy,
        server: WeightServer,
        engine: LocalEngine | None,
        known: Mapping[int, str] | None = None,
        gather: Callable[[], Iterator[tuple[str, Tensor]]] | None = None,
        *,
        encodes: bool = False,
    ) -> None:
        """`known` are digests of versions that a process before this one published: one of them is a parent. `gather`
        gives weights that several ranks hold, one after the other, and has the local engine's copy take them.
        `encodes`: deltas are made where the weights are.
        """
        assert gather is None or not encodes, "what comes one after the other is compared by the host"
        self._gather = gather
        self._policy, self._server, self._engine = policy, server, engine
        self._known = dict(known or {})
        self._layout = tensors.layout_of(policy.published(), policy.published_dtype)
        self._encodes = encodes
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
        if self._gather is not None:  # it was gathered on the way
            await self._install(version)
        self._known = {version: offer.digest}
        return offer

    async def _install(self, version: int) -> None:
        write = self._policy.engine_writer()
        if self._engine is not None:
            await self._engine.install(Weights(Version(version), in_place=True, write=write))
        elif write is not None:
            await finish_first(asyncio.to_thread(write))

    def _fill(self, out: memoryview) -> Encoded | None:
        if self._gather is not None:
            tensors.snapshot(self._gather(), self._layout, out)
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
