"""The trainer's side: copies a new version into a free buffer, offers it, and makes its delta while it is being served.

`publish` takes as long as filling and hashing take. Buffers are few and reused (`num_full`, two by default): a new
version replaces the oldest, whose readers get a short grace period and are then cut. Deltas from the kept versions are
made in a thread and offered when they are ready. The next publish ends that thread, because it needs the buffer.
If the function that fills the buffer knows what changed, its answer becomes the delta.

Several nodes may publish together (shares.py): each fills, hashes, compares and serves its share of the bytes, and they
tell each other digests and changes. The version is the same as one node's, digest for digest; a worker gets every chunk
from the node that has it, and a delta from any.
"""

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from polyrl.errors import UserError
from polyrl.weights import delta as codec
from polyrl.weights.buffers import Buffer
from polyrl.weights.chunks import ChunkTable, digests_of
from polyrl.weights.manifest import AdapterFacts, Encoding, Layout, Manifest, encode
from polyrl.weights.sender import Sender
from polyrl.weights.settings import Tls, WeightSettings
from polyrl.weights.shares import OneNode, ServingNodes, VersionShare, share_of
from polyrl.weights.store import Blob, Store

log = logging.getLogger("polyrl.weights")

_MAX_THREADS = 8
_LARGEST_DELTA = 2
"""With several nodes, a delta is less than the version divided by this, or is not made."""

Fill: TypeAlias = Callable[[memoryview], codec.Encoded | None]
"""Writes all tensors of a version, or the bytes of them that are `held` here. Returns the changes since the version
published before, if it knows them."""
_Written: TypeAlias = list[tuple[Encoding, bytes] | None]


class Offer(NamedTuple):
    """A published version, as workers are told of it."""

    version: int
    digest: str
    num_bytes: int
    addresses: tuple[str, ...]


class _Kept(NamedTuple):
    manifest: Manifest
    buffer: Buffer
    share: VersionShare


class _Published(msgspec.Struct, frozen=True):
    """The facts that nodes exchange about their shares of a version."""

    digests: bytes
    addresses: tuple[str, ...]


_PUBLISHED = msgspec.msgpack.Decoder(_Published)
_WRITTEN = msgspec.msgpack.Decoder(_Written)


class WeightServer:
    """The trainer's versions. One thread publishes; workers pull at any time."""

    def __init__(
        self,
        settings: WeightSettings,
        key: bytes,
        tls: Tls | None = None,
        prepare: Callable[[Buffer], object] | None = None,
        nodes: ServingNodes | None = None,
    ) -> None:
        """`prepare` is called with each new buffer. `nodes` publish together: each makes the same calls."""
        self._settings, self._prepare = settings, prepare
        self._nodes: ServingNodes = OneNode() if nodes is None else nodes
        self._store = Store()
        self._sender = Sender(self._store, settings, key, None if tls is None else tls.server, origin=True)
        self._kept: list[_Kept] = []
        """The versions that are kept, the newest last."""
        self._free: list[Buffer] = []
        self._deltas: list[str] = []
        self._encoder: threading.Thread | None = None
        self._encode_no_more = threading.Event()

    def start(self) -> None:
        self._sender.start()

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._sender.addresses

    @property
    def num_bytes_sent(self) -> int:
        return self._sender.num_bytes_sent

    @property
    def cuts(self) -> dict[str, int]:
        """The reasons for which this side cut connections, with their counts."""
        return dict(self._sender.cuts)

    def held(self, layout: Layout) -> range:
        """Return the bytes of a version that this node holds."""
        return self._share(layout).held

    def _share(self, layout: Layout) -> VersionShare:
        return share_of(layout, self._settings.chunk_bytes, self._nodes.number, self._nodes.size)

    def publish(
        self,
        version: int,
        layout: Layout,
        fill: Fill,
        *,
        parent: str | None = None,
        adapter: AdapterFacts | None = None,
    ) -> Offer:
        """Offer a version. If `fill` raises, nothing is offered, and the error is raised here.

        The parent is the version published before, unless `parent` is given.
        """
        self._end_encoding()
        share = self._share(layout)
        buffer = self._free_buffer(layout.num_bytes, share.held)
        try:
            changes = fill(buffer.view)
            assert changes is None or self._nodes.size == 1, "each node compares its own share"
            _clear_padding(layout, buffer.view, share.held)
            chunks, addresses = self._table(layout, share, buffer)
        except BaseException:
            self._free.append(buffer)
            raise
        if parent is None:
            parent = self._kept[-1].manifest.digest if self._kept else ""
        manifest = Manifest(version, layout, chunks, parent, adapter=adapter)
        blob = Blob(
            manifest.digest, "full", version, encode(manifest), chunks, buffer, complete=False, right=share.chunks
        )
        bases = [one for one in reversed(self._kept) if one.manifest.layout.fingerprint == layout.fingerprint]
        if bases and bases[0] is not self._kept[-1]:
            changes = None
        self._kept.append(_Kept(manifest, buffer, share))
        if self._settings.num_deltas:
            self._sender.coming = tuple((base.manifest.digest, manifest.digest) for base in bases)
            self._encoder = threading.Thread(
                target=self._encode, args=(bases, self._kept[-1], changes), name="weights-encode", daemon=True
            )
        self._store.add(blob)
        if self._encoder is not None:
            self._encoder.start()
        return Offer(version, manifest.digest, layout.num_bytes, addresses)

    def _table(self, layout: Layout, share: VersionShare, buffer: Buffer) -> tuple[ChunkTable, tuple[str, ...]]:
        """Return the digests of all chunks, and the addresses at which they are served."""
        settings = self._settings
        digests = digests_of(buffer.view, share.served, settings.chunk_bytes, settings.hash, _num_threads())
        told = self._nodes.exchange(msgspec.msgpack.encode(_Published(digests, self.addresses)))
        every = [_PUBLISHED.decode(one) for one in told]
        table = ChunkTable(
            layout.num_bytes, settings.chunk_bytes, settings.hash, b"".join(one.digests for one in every)
        )
        return table, tuple(address for one in every for address in one.addresses)

    def wait_for_deltas(self, timeout_s: float) -> bool:
        """Wait until no delta of the newest version is being made any more; return False if the time is up first."""
        if self._encoder is not None:
            self._encoder.join(timeout_s)
        return not self._sender.coming

    def close(self) -> None:
        self._end_encoding()
        self._sender.close()
        for name in self._store.names():
            self._store.give_up(name, 0.0)
        for buffer in [*self._free, *(one.buffer for one in self._kept)]:
            buffer.close()
        self._free.clear()
        self._kept.clear()

    def _free_buffer(self, num_bytes: int, held: range) -> Buffer:
        """Return a buffer of this size without readers, with memory for `held`: if need be that of the oldest
        version."""
        while len(self._kept) >= self._settings.num_full:
            oldest = self._kept.pop(0)
            self._store.give_up(oldest.manifest.digest, self._settings.grace_s)
            self._free.append(oldest.buffer)
        while self._free:
            buffer = self._free.pop()
            if (buffer.num_bytes, buffer.held) == (num_bytes, held):
                return buffer
            buffer.close()
        buffer = Buffer(num_bytes, held)
        if self._prepare is not None:
            self._prepare(buffer)
        return buffer

    def _encode(self, bases: list[_Kept], target: _Kept, changes: codec.Encoded | None) -> None:
        """Make and offer the deltas to the target, in a thread of its own.

        The version published last comes first: most workers hold it, and its changes may be known already. `coming` is
        emptied at the end in any case, so that no pull waits for a delta that will not come.
        """
        try:
            for base in bases:
                encoded = self._changes(base, target) if changes is None else changes
                changes = None
                if encoded is None:
                    break
                self._offer_delta(self._sealed(encoded, base, target))
        except (UserError, RuntimeError) as error:  # RuntimeError: another node is gone
            log.warning("version %d is offered without a delta: %s", target.manifest.version, error)
        finally:
            self._sender.coming = ()

    def _offer_delta(self, blob: Blob) -> None:
        self._store.add(blob)
        self._sender.coming = self._sender.coming[1:]
        self._deltas.append(blob.name)
        while len(self._deltas) > self._settings.num_deltas:
            old = self._store.give_up(self._deltas.pop(0), 0.0)
            if old is not None:
                old.buffer.close()

    def _changes(self, base: _Kept, target: _Kept) -> codec.Encoded | None:
        """Compare two versions. Return None if a publish came in between."""

        def write(piece: codec.Piece) -> tuple[Encoding, bytes] | None:
            if self._encode_no_more.is_set():
                return None
            return codec.encode_piece(_bits(base.buffer, piece), _bits(target.buffer, piece))

        with ThreadPoolExecutor(_num_threads(), "weights-encode") as pool:
            written = list(pool.map(write, target.share.pieces))
        every = self._exchange_changes(None if self._encode_no_more.is_set() else written, target.manifest.layout)
        return None if every is None else codec.assemble(list(codec.pieces_of(target.manifest.layout)), every)

    def _exchange_changes(self, own: _Written | None, layout: Layout) -> _Written | None:
        """Return the changes in all nodes' shares; None if a node has none to tell, or they are not worth keeping in
        every node's memory."""
        if self._nodes.size == 1:
            return own
        data = b"" if own is None else msgspec.msgpack.encode(own)
        sizes = [int.from_bytes(one) for one in self._nodes.exchange_beside(len(data).to_bytes(8))]
        if not all(sizes) or sum(sizes) > layout.num_bytes / _LARGEST_DELTA:
            return None
        return [one for told in self._nodes.exchange_beside(data) for one in _WRITTEN.decode(told)]

    def _sealed(self, encoded: codec.Encoded, base: _Kept, target: _Kept) -> Blob:
        found, data = codec.seal(encoded, base.manifest, target.manifest, chunk_bytes=self._settings.chunk_bytes)
        buffer = Buffer(len(data))
        buffer.view[:] = data
        return Blob(
            found.digest,
            "delta",
            target.manifest.version,
            encode(found),
            found.chunks,
            buffer,
            complete=True,
            base=found.base,
            target=found.target,
        )

    def _end_encoding(self) -> None:
        if self._encoder is None:
            return
        self._encode_no_more.set()
        self._encoder.join()
        self._encoder = None
        self._encode_no_more.clear()
        self._sender.coming = ()


def _clear_padding(layout: Layout, view: memoryview, within: range) -> None:
    """Set the bytes between tensors to zero; the buffer may have held another layout before."""
    starts = [*(one.start for one in layout.tensors[1:]), layout.num_bytes]
    for one, next_start in zip(layout.tensors, starts, strict=True):
        start, end = max(one.end, within.start), min(next_start, within.stop)
        if start < end:
            view[start:end] = bytes(end - start)


def _bits(buffer: Buffer, piece: codec.Piece) -> np.ndarray:
    return np.frombuffer(buffer.view, f"<u{piece.item_bytes}", piece.num_elements, piece.start)


def _num_threads() -> int:
    return min(_MAX_THREADS, os.cpu_count() or 1)
