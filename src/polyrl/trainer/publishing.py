"""Offering the trainer's present weights as a version: to the local engine, which shares them, and to the fleet.

Rules kept here: the snapshot is taken in a thread, while nobody changes the weights, and ends before who waits for it
leaves: what it writes into is not closed under it. The layout is the model's, and
never changes; tied tensors are sent once, in the dtype that they are served in. An engine with weights of its own
(lora.py) is given them first: what is sent may be read from there.
"""

import asyncio
import functools
from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from polyrl.engines.engine import Weights
from polyrl.engines.finishing import finish_first
from polyrl.ids import Version
from polyrl.trainer.local_engine import LocalEngine
from polyrl.trainer.loop import Offer
from polyrl.trainer.model import Policy
from polyrl.weights import tensors
from polyrl.weights.server import WeightServer


class Publishing:
    """`engine` is the local one, if there is one."""

    def __init__(
        self,
        policy: Policy,
        server: WeightServer,
        engine: LocalEngine | None,
        known: Mapping[int, str] | None = None,
        gather: Callable[[], Iterator[tuple[str, Tensor]]] | None = None,
    ) -> None:
        """`known` are digests of versions that a process before this one published: one of them is a parent. `gather`
        gives weights that several ranks hold, one after the other, and has the local engine's copy take them.
        """
        self._gather = gather
        self._policy, self._server, self._engine = policy, server, engine
        self._known = dict(known or {})
        self._layout = tensors.layout_of(policy.published(), policy.published_dtype)

    async def publish(self, version: int) -> Offer:
        parent = self._known.get(version - 1, "")
        publish = functools.partial(
            self._server.publish, version, self._layout, self._fill, parent=parent, adapter=self._policy.adapter
        )
        if self._gather is None:
            await self._install(version)
        offer = await finish_first(asyncio.to_thread(publish))
        if self._gather is not None:  # it was gathered on the way
            await self._install(version)
        self._known = {version: offer.digest}
        return Offer(offer.version, offer.digest, offer.addresses)

    async def _install(self, version: int) -> None:
        write = self._policy.engine_writer()
        if self._engine is not None:
            await self._engine.install(Weights(Version(version), in_place=True, write=write))
        elif write is not None:
            await finish_first(asyncio.to_thread(write))

    def _fill(self, out: memoryview) -> None:
        weights = self._policy.published() if self._gather is None else self._gather()
        tensors.snapshot(weights, self._layout, out)
