"""Offers the trainer's current weights as a version: to the local engine, which shares them, and to the fleet.

Rules kept here: the snapshot is taken in a thread, while the weights do not change. It ends before its caller goes on,
even if cancelled, so that the buffer it writes into is not closed under it. The layout is the model's, and never
changes; tied tensors are sent once, in the dtype that they are served in. An engine with its own copy of the weights
(lora.py) is written first: the snapshot may be read from there.

Where the trainer has several nodes, each may hold and serve its share of a version (weights/shares.py). All ranks
gather the same tensors then; the first rank of each node keeps its own bytes of them.

The difference to the previous version is computed on the host, by the weight server, or on the device, if that is asked
for and there is room. The device's copy is always the version offered last, or it is dropped.
"""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping

import torch
from msgspec import Struct
from torch import Tensor

from polyrl.engines.engine import Weights
from polyrl.engines.finishing import finish_first
from polyrl.ids import Version
from polyrl.trainer import families
from polyrl.trainer.local_engine import LocalEngine
from polyrl.trainer.model import Policy, is_about_memory
from polyrl.weights import tensors
from polyrl.weights.delta import Encoded
from polyrl.weights.manifest import AdapterFacts, Layout
from polyrl.weights.server import Offer, WeightServer
from polyrl.weights.tensors_gpu import GpuDeltaEncoder

log = logging.getLogger("polyrl.trainer")


class VersionFacts(Struct, frozen=True):
    """The facts of a version that the other nodes need to serve their shares."""

    version: int
    parent: str
    key: bytes
    """The run's, without which no worker gets weights."""
    layout: Layout
    adapter: AdapterFacts | None


class NodeShare:
    """A node's share of every version, held and served by its first rank. `start` makes its server, for a key."""

    def __init__(self, policy: Policy, start: Callable[[bytes], WeightServer], *, as_in_files: bool) -> None:
        self._policy, self._start, self._as_in_files = policy, start, as_in_files
        self._server: WeightServer | None = None

    def offer(self, facts: VersionFacts, gathered: Iterable[tuple[str, Tensor]]) -> None:
        """Keep this node's bytes of the tensors, and serve them. The other nodes do the same meanwhile."""
        if self._server is None:
            self._server = self._start(facts.key)
        server = self._server

        def fill(out: memoryview) -> None:
            given = _renamed(self._policy, gathered) if self._as_in_files and facts.adapter is None else iter(gathered)
            tensors.snapshot(given, facts.layout, out, server.held(facts.layout))

        server.publish(facts.version, facts.layout, fill, parent=facts.parent, adapter=facts.adapter)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


class Publishing:
    """Publishes versions. `engine` is the local one, if there is one."""

    def __init__(
        self,
        policy: Policy,
        server: WeightServer,
        engine: LocalEngine | None,
        known: Mapping[int, str] | None = None,
        gather: Callable[[VersionFacts | None], Iterator[tuple[str, Tensor]]] | None = None,
        *,
        encodes: bool = False,
        as_in_files: bool = False,
        key: bytes | None = None,
        tell: Callable[[VersionFacts], Awaitable[None]] | None = None,
    ) -> None:
        """`known` are the digests of versions that an earlier process published: the next version's parent may be one
        of them. `gather` yields weights that several ranks hold, one by one, and updates the local engine's copy with
        them. `encodes`: compute deltas on the device. `as_in_files`: tensors have the names of the model's files, which
        served engines load; the builtin engine takes those of the model. `key`: other nodes serve with it, as `gather`
        is told, and `tell` tells ranks that do not gather with ours."""
        assert gather is None or not encodes, "what comes one after the other is compared by the host"
        self._gather = gather
        self._policy, self._server, self._engine = policy, server, engine
        self._known = dict(known or {})
        self._as_in_files = as_in_files and policy.adapter is None
        self._layout = tensors.layout_of(self._shapes(), policy.published_dtype)
        self._encodes = encodes and not self._as_in_files and key is None
        self._key, self._tell = key, tell
        self._encoder: GpuDeltaEncoder | None = None

    async def publish(self, version: int) -> Offer:
        parent = self._known.get(version - 1, "")
        adapter = self._policy.adapter
        facts = None if self._key is None else VersionFacts(version, parent, self._key, self._layout, adapter)
        fill = functools.partial(self._fill, facts)
        publish = functools.partial(self._server.publish, version, self._layout, fill, parent=parent, adapter=adapter)
        if self._gather is None:
            await self._install(version)
        telling = None if facts is None or self._tell is None else asyncio.ensure_future(self._tell(facts))
        try:
            offer = await finish_first(asyncio.to_thread(publish))
            if telling is not None:
                await telling
        except BaseException:
            self._encoder = None
            if telling is not None:
                telling.cancel()
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
        return {name: _empty(one) for name, one in _renamed(self._policy, empty)}

    def _fill(self, facts: VersionFacts | None, out: memoryview) -> Encoded | None:
        if self._gather is not None or self._as_in_files:
            published = self._policy.published
            given = self._gather(facts) if self._gather else ((name, one.detach()) for name, one in published().items())
            given = _renamed(self._policy, given) if self._as_in_files else given
            tensors.snapshot(given, self._layout, out, self._held(facts))
            return None
        weights = self._policy.published()
        changes = self._changes_in(weights) if self._encodes else None
        tensors.snapshot(weights, self._layout, out, self._held(facts))
        return changes

    def _held(self, facts: VersionFacts | None) -> range | None:
        return None if facts is None else self._server.held(self._layout)

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


def _renamed(policy: Policy, given: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Give tensors the names that they have in the model's files."""
    for name, one in given:
        yield from families.in_files(policy.model, name, one)


def _empty(tensor: Tensor) -> Tensor:
    """Return a tensor without memory. Parts of one would be taken for parts of another, and tied to them."""
    return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="meta")
