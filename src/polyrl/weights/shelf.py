"""The weights that a worker keeps: the held version, the previous one, the one being built, and a few deltas.

There are two buffers of a version's size. The previous version stays on offer until its buffer is needed for the next
one. A buffer that is still read outside of the store (`HostCopy`) is left to its reader, and a new one is made.
"""

from polyrl.weights.buffers import Buffer
from polyrl.weights.manifest import DeltaManifest, Manifest, encode
from polyrl.weights.store import Blob, Store


class HostCopy:
    """A verified version in memory.

    Its bytes do not change; close it after the install, so that its buffer is reused.
    """

    def __init__(
        self, blob: Blob, manifest: Manifest, *, base: str = "", changed: frozenset[str] | None = None
    ) -> None:
        self.manifest = manifest
        self.base = base
        """The digest of the version that it was built from by deltas; empty when it came in full."""
        self.changed = changed
        """The tensors that differ from `base`; None when that is not known."""
        self.view = blob.view.toreadonly()
        self._buffer: Buffer | None = blob.buffer
        blob.buffer.use()

    @property
    def fd(self) -> int:
        """The file behind `view`, which another process may map."""
        if self._buffer is None:
            raise ValueError("this copy is closed")
        return self._buffer.fd

    def tensor(self, name: str) -> memoryview:
        """Return a tensor's bytes. Tied names work too."""
        entry = self.manifest.layout.by_name[name]
        return self.view[entry.start : entry.end]

    def close(self) -> None:
        """Release the buffer, which may then be written to again."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self.view = memoryview(b"")
            buffer.leave()

    def __enter__(self) -> "HostCopy":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Shelf:
    """A worker's buffers. One pull at a time uses them; neighbours read through the store at any time."""

    def __init__(self, store: Store, num_deltas: int, grace_s: float) -> None:
        self.store = store
        self._num_deltas, self._grace_s = num_deltas, grace_s
        self.held: tuple[Blob, Manifest] | None = None
        self._before: Blob | None = None
        self._building: Blob | None = None
        self._spare: Buffer | None = None
        self._deltas: list[Blob] = []

    def build(self, manifest: Manifest, canonical: bytes) -> Blob:
        """Return a full version to be filled. A build of the same version that was broken off is continued."""
        if self._building is not None and self._building.name == manifest.digest:
            return self._building
        buffer = self.take_buffer(manifest.layout.num_bytes)
        blob = Blob(manifest.digest, "full", manifest.version, canonical, manifest.chunks, buffer, complete=False)
        self._building = blob
        self.store.add(blob)
        return blob

    def take_built(self) -> Buffer:
        """Return the buffer of the full version that was just built, from which deltas lead to the wanted one."""
        assert self._building is not None
        blob, self._building = self._building, None
        self.store.give_up(blob.name, self._grace_s)
        return blob.buffer

    def take_buffer(self, num_bytes: int) -> Buffer:
        """Return a buffer without readers, to build a version in."""
        candidates: list[Buffer] = []
        for blob in (self._building, self._before):
            if blob is not None:
                self.store.give_up(blob.name, self._grace_s)
                candidates.append(blob.buffer)
        self._building = self._before = None
        if self._spare is not None:
            candidates.append(self._spare)
            self._spare = None
        fitting = [one for one in candidates if one.num_bytes == num_bytes and not one.is_used]
        for one in candidates:
            if one not in fitting[:1]:
                one.close()
        return fitting[0] if fitting else Buffer(num_bytes)

    def return_buffer(self, buffer: Buffer) -> None:
        """Keep a buffer for later, after what was built in it proved wrong."""
        self._spare = buffer

    def add_delta(self, delta: DeltaManifest, canonical: bytes, version: int) -> Blob:
        """Return a delta that is to be filled, or is here already.

        It stays at least for the pull that wants it: a chain may be longer than the number of deltas that are kept.
        """
        known = self.store.find(delta.digest)
        if known is not None:
            return known
        buffer = Buffer(delta.chunks.num_bytes)
        blob = Blob(
            delta.digest,
            "delta",
            version,
            canonical,
            delta.chunks,
            buffer,
            complete=False,
            base=delta.base,
            target=delta.target,
        )
        self._deltas.append(blob)
        self.store.add(blob)
        return blob

    def trim_deltas(self) -> None:
        """Drop all but the newest deltas of earlier pulls, which are kept for neighbours. Called before a pull."""
        while len(self._deltas) > self._num_deltas:
            self.drop_delta(self._deltas[0])

    def drop_delta(self, blob: Blob) -> None:
        if blob in self._deltas:
            self._deltas.remove(blob)
            self.store.give_up(blob.name, self._grace_s)
            blob.buffer.close()

    def swap(self, manifest: Manifest, buffer: Buffer | None = None) -> Blob:
        """Hold this complete and verified version: the one built here, or the one in `buffer`."""
        if buffer is None:
            assert self._building is not None and self._building.complete
            blob, self._building = self._building, None
        else:
            digest, version, chunks = manifest.digest, manifest.version, manifest.chunks
            blob = Blob(digest, "full", version, encode(manifest), chunks, buffer, complete=True)
            self.store.add(blob)
        self._before = None if self.held is None else self.held[0]
        self.held = (blob, manifest)
        return blob

    def close(self) -> None:
        blobs = [self._before, self._building, None if self.held is None else self.held[0], *self._deltas]
        for name in self.store.names():
            self.store.give_up(name, 0.0)
        for blob in blobs:
            if blob is not None:
                blob.buffer.close()
        if self._spare is not None:
            self._spare.close()
        self.held = self._before = self._building = self._spare = None
        self._deltas.clear()
