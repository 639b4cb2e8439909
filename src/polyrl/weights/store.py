"""The blobs that a process holds, their verified chunks, and their readers.

A blob is here as soon as its manifest is known. Chunks are marked when they are verified, and only marked chunks are
read, so a relay passes on what it has while the rest still arrives. A reader holds a lease for one answer. The owner
decides when a blob is given up: there are no new leases, current readers get a short grace period and are then cut.

After that the blob's memory may be written to. Bytes that `sendfile` has queued but the reader has not received can
then change in transit: the reader finds a wrong chunk, asks whether the blob is still held, and learns that it is gone.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import numpy as np

from polyrl.weights.buffers import Buffer
from polyrl.weights.chunks import ChunkTable
from polyrl.weights.protocol import BlobEntry, Code, Holdings, SourceRefused


class Blob:
    """A full version's bytes or a delta's, in a buffer, and which of its chunks are right."""

    def __init__(
        self,
        name: str,
        kind: Literal["full", "delta"],
        version: int,
        manifest: bytes,
        table: ChunkTable,
        buffer: Buffer,
        *,
        complete: bool,
        right: range | None = None,
        base: str = "",
        target: str = "",
    ) -> None:
        """`right`: these chunks are there, and no others will come."""
        self.name, self.version = name, version
        self.kind: Literal["full", "delta"] = kind
        self.manifest, self.table, self.buffer = manifest, table, buffer
        self.base, self.target = base, target
        self.right = np.full(table.num_chunks, complete, dtype=np.bool_)
        if right is not None:
            self.right[right.start : right.stop] = True
        self.num_right = int(self.right.sum())
        self.claimed = np.zeros(table.num_chunks, dtype=np.bool_)
        """The chunks that this process is getting from the trainer."""
        self.revision = 1

    @property
    def view(self) -> memoryview:
        return self.buffer.view[: self.table.num_bytes]

    @property
    def complete(self) -> bool:
        return self.num_right == self.table.num_chunks

    def chunk(self, index: int) -> memoryview:
        start, stop = self.table.range_of(index)
        return self.view[start:stop]

    def entry(self) -> BlobEntry:
        return BlobEntry(
            self.name, self.kind, self.version, self.table.num_bytes, self.complete, self.base, self.target
        )


class FileSpan(NamedTuple):
    """The bytes of a file that may be read while the lease lasts."""

    fd: int
    start: int
    num_bytes: int


class Store:
    """All blobs of one process. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._blobs: dict[str, Blob] = {}
        self._manifests: dict[str, bytes] = {}
        self._leases: dict[int, tuple[str, Callable[[str], None]]] = {}
        self._next_lease = 0
        self._changed = threading.Condition()

    def add(self, blob: Blob) -> None:
        with self._changed:
            self._blobs[blob.name] = blob
            self._changed.notify_all()

    def find(self, name: str) -> Blob | None:
        with self._changed:
            return self._blobs.get(name)

    def entries(self) -> tuple[BlobEntry, ...]:
        with self._changed:
            return tuple(blob.entry() for blob in self._blobs.values())

    def announce(self, name: str, manifest: bytes) -> None:
        """Make known the manifest of the one version that is on its way here, so that waiting peers can read it."""
        with self._changed:
            self._manifests = {name: manifest}

    def manifest_of(self, name: str) -> bytes:
        with self._changed:
            announced = self._manifests.get(name)
            return self._held(name).manifest if announced is None else announced

    def mark(self, blob: Blob, index: int) -> None:
        """Mark a chunk as verified. Its bytes must not change from now on."""
        with self._changed:
            if not blob.right[index]:
                blob.right[index] = True
                blob.claimed[index] = False
                blob.num_right += 1
                self._note(blob)

    def claim(self, blob: Blob, run: range, *, claimed: bool) -> None:
        """Note that these chunks are on their way here from the trainer, or are not any more."""
        with self._changed:
            place = slice(run.start, run.stop)
            blob.claimed[place] = ~blob.right[place] if claimed else False
            self._note(blob)

    def _note(self, blob: Blob) -> None:
        blob.revision = min(blob.revision + 1, (1 << 32) - 1)
        self._changed.notify_all()

    def have(self, name: str, revision: int, wait_s: float) -> Holdings:
        """Return which chunks are here, as soon as that is newer than `revision`, or after `wait_s`."""
        deadline = time.monotonic() + wait_s
        with self._changed:
            while True:
                blob = self._held(name)
                left = deadline - time.monotonic()
                if blob.revision > revision or blob.complete or left <= 0:
                    right, claimed = (np.packbits(one, bitorder="little") for one in (blob.right, blob.claimed))
                    return Holdings(blob.revision, right.tobytes(), claimed.tobytes())
                self._changed.wait(left)

    @contextmanager
    def lease(self, name: str, first: int, count: int, cut: Callable[[str], None]) -> Iterator[FileSpan]:
        """Lease chunks for reading. `cut` is called if the blob is given up and the reader does not finish in time."""
        with self._changed:
            blob = self._held(name)
            if count < 1 or first + count > blob.table.num_chunks:
                raise SourceRefused(Code.NONSENSE, f"chunks {first} to {first + count} of {blob.table.num_chunks}")
            if not blob.right[first : first + count].all():
                raise SourceRefused(Code.NOT_YET, "not all of these chunks have arrived here")
            number = self._next_lease
            self._next_lease += 1
            self._leases[number] = (name, cut)
        start, stop = blob.table.range_of(first)[0], blob.table.range_of(first + count - 1)[1]
        try:
            yield FileSpan(blob.buffer.fd, start, stop - start)
        finally:
            with self._changed:
                del self._leases[number]
                self._changed.notify_all()

    def give_up(self, name: str, grace_s: float) -> Blob | None:
        """Remove a blob, and return when it has no reader any more. Readers are cut after `grace_s`."""
        with self._changed:
            blob = self._blobs.pop(name, None)
            if blob is None:
                return None
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._readers(name), grace_s)
            late = self._readers(name)
        for cut in late:
            cut("the version was given up")
        with self._changed:
            while not self._changed.wait_for(lambda: not self._readers(name), 1.0):
                for cut in self._readers(name):
                    cut("the version was given up")
        return blob

    def names(self) -> list[str]:
        with self._changed:
            return list(self._blobs)

    def _readers(self, name: str) -> list[Callable[[str], None]]:
        return [cut for leased, cut in self._leases.values() if leased == name]

    def _held(self, name: str) -> Blob:
        blob = self._blobs.get(name)
        if blob is None:
            raise SourceRefused(Code.GONE, "this version or delta is not held here")
        return blob
