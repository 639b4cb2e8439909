"""A blob as chunks of fixed size with a digest each: the unit that is verified, requested again and passed on.

A blob is a named run of bytes: a full version, or a delta. There are two hashes. `xxh3-128` detects every hardware or
software fault at the speed of memory, but a forged chunk with the same digest takes only milliseconds to make.
`blake3` cannot be forged, so bytes relayed by a worker on another machine are accepted only under `blake3`.

A table whose numbers do not agree cannot be built, and therefore cannot be decoded. The manifest says which blob a
table belongs to, and what vouches for it.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, TypeAlias, TypeVar

import blake3
import msgspec
import xxhash

HashName = Literal["xxh3-128", "blake3"]
View: TypeAlias = bytes | bytearray | memoryview
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

CHUNK_BYTES = 4 << 20
MAX_CHUNK_BYTES = 64 << 20
MAX_BLOB_BYTES = 1 << 46
_MAX_CHUNKS = 1 << 24


def _xxh3_128(view: View) -> bytes:
    return xxhash.xxh3_128_digest(view)


def _blake3(view: View) -> bytes:
    return blake3.blake3(view).digest()


_HASHES: dict[HashName, tuple[int, Callable[[View], bytes]]] = {"xxh3-128": (16, _xxh3_128), "blake3": (32, _blake3)}


UNFORGEABLE: tuple[HashName, ...] = ("blake3",)
"""Hashes that are safe against forged bytes with the same digest."""


class ChunkTable(msgspec.Struct, frozen=True):
    """The digests of a blob's chunks, in order. The last chunk may be shorter; an empty blob has none."""

    num_bytes: int
    chunk_bytes: int
    hash: HashName
    digests: bytes
    """The digests one after the other, 16 or 32 bytes each."""

    def __post_init__(self) -> None:
        if not 0 <= self.num_bytes <= MAX_BLOB_BYTES:
            raise ValueError(f"a blob of {self.num_bytes} bytes; expected 0 to {MAX_BLOB_BYTES}")
        if not 1 <= self.chunk_bytes <= MAX_CHUNK_BYTES:
            raise ValueError(f"chunks of {self.chunk_bytes} bytes; expected 1 to {MAX_CHUNK_BYTES}")
        if self.num_chunks > _MAX_CHUNKS:
            raise ValueError(f"{self.num_chunks} chunks; expected at most {_MAX_CHUNKS}")
        expected = self.num_chunks * digest_bytes(self.hash)
        if len(self.digests) != expected:
            raise ValueError(f"{len(self.digests)} bytes of digests for {self.num_chunks} chunks; expected {expected}")

    @property
    def num_chunks(self) -> int:
        return -(-self.num_bytes // self.chunk_bytes)

    def range_of(self, index: int) -> tuple[int, int]:
        """Return the first byte of a chunk, and the byte after its last."""
        start = index * self.chunk_bytes
        return start, min(start + self.chunk_bytes, self.num_bytes)

    def digest_of(self, index: int) -> bytes:
        size = digest_bytes(self.hash)
        return self.digests[index * size : (index + 1) * size]

    def holds(self, index: int, chunk: View) -> bool:
        """Return whether `chunk` has the digest of the chunk at `index`."""
        return digest_function(self.hash)(chunk) == self.digest_of(index)


def digest_bytes(hash: HashName) -> int:
    return _HASHES[hash][0]


def digest_function(hash: HashName) -> Callable[[View], bytes]:
    return _HASHES[hash][1]


def table_of(view: View, chunk_bytes: int = CHUNK_BYTES, hash: HashName = "xxh3-128", threads: int = 1) -> ChunkTable:
    """Hash every chunk. The table does not depend on the number of threads."""
    view = memoryview(view).cast("B")
    digests = digests_of(view, range(view.nbytes), chunk_bytes, hash, threads)
    return ChunkTable(num_bytes=view.nbytes, chunk_bytes=chunk_bytes, hash=hash, digests=digests)


def digests_of(view: memoryview, within: range, chunk_bytes: int, hash: HashName, threads: int = 1) -> bytes:
    """Return the digests of the chunks within a range of bytes that begins and ends with one."""
    digest = digest_function(hash)

    def at(start: int) -> bytes:
        return digest(view[start : min(start + chunk_bytes, within.stop)])

    return b"".join(in_threads(at, range(within.start, within.stop, chunk_bytes), threads))


def bad_chunks(view: View, table: ChunkTable, threads: int = 1) -> list[int]:
    """Return the chunks whose bytes do not match the table: all of them if the blob has another size."""
    view = memoryview(view).cast("B")
    if view.nbytes != table.num_bytes:
        return list(range(max(1, table.num_chunks)))

    def is_right(index: int) -> bool:
        start, stop = table.range_of(index)
        return table.holds(index, view[start:stop])

    rights = in_threads(is_right, range(table.num_chunks), threads)
    return [index for index, right in enumerate(rights) if not right]


def in_threads(function: Callable[[ItemT], ResultT], items: Sequence[ItemT], threads: int) -> list[ResultT]:
    """Apply a function to every item, in threads. Hashing, zstd and numpy release the GIL, so threads help."""
    if threads <= 1 or len(items) <= 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(threads, len(items))) as pool:
        return list(pool.map(function, items))
