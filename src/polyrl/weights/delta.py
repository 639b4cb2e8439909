"""The difference between two versions, lossless and in about a hundredth of the bytes.

A step of RL changes about one element in a hundred, mostly by one unit in the last place. So each tensor is cut into
parts of PART_ELEMENTS, and each part is written in the smallest of these encodings. Unchanged parts are not written.

    sparse   positions: the number of unchanged elements before each change, in bytes; 255 means 255 and more to come.
             differences: those of the bits as integers, zigzag (0 -1 1 -2 2 ...), in bytes; 255 marks a wide one.
             Both are compressed with zstd; the wide differences follow uncompressed.
    planes   the zigzag differences of all elements, all their lowest bytes first; each plane is compressed with zstd
    raw      the new bytes

Rules kept here: elements are treated as integers only, so NaN payloads, signed zeros and denormals survive. The output
depends on the input alone, for any number of threads. Blobs are not trusted: sizes are checked before memory is
allocated, and positions before they are written to. After BadDelta the target is neither version. The caller checks
the result against the chunk digests of the target's manifest.
"""

import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import zstandard

from polyrl.weights.chunks import CHUNK_BYTES, HashName, View, in_threads, table_of
from polyrl.weights.manifest import DeltaManifest, DeltaPart, Encoding, Layout, Manifest, TensorEntry, check_delta

Bits: TypeAlias = np.ndarray[Any, Any]
"""Elements as unsigned integers of the same size."""

PART_ELEMENTS = 1 << 21
"""The elements of a part: enough that its header costs nothing beside it, few enough that threads share evenly."""
_WORD_BYTES = 8
_BLOCK_WORDS = 1 << 15
"""The words compared at once: old, new and the mask stay in a core's cache."""
ESCAPE = 255
ZSTD_LEVEL = 1
_SPARSE = struct.Struct("<IIIII")
_PLANE = struct.Struct("<I")


class BadDelta(ValueError):
    """A blob that cannot be applied. The message names the part, the tensor and the reason, in one line."""


class Piece(NamedTuple):
    """The place of a part in a version, before its encoding is chosen."""

    tensor: int
    first: int
    num_elements: int
    item_bytes: int
    start: int
    """The piece's first byte in a version."""


class Encoded(NamedTuple):
    """A delta without its digests. The blob is the segments, one after the other."""

    parts: tuple[DeltaPart, ...]
    segments: list[bytes]


def make(base: Manifest, target: Manifest, old: View, new: View, *, threads: int = 1) -> tuple[DeltaManifest, bytes]:
    """Return the delta between two versions, with its digests. Raises ValueError if their layouts differ."""
    if base.layout.fingerprint != target.layout.fingerprint:
        raise ValueError("two versions of different layouts have no delta")
    encoded = encode(old, new, target.layout, threads=threads)
    return seal(encoded, base, target, threads=threads)


def seal(
    encoded: Encoded,
    base: Manifest,
    target: Manifest,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    hash: HashName | None = None,
    threads: int = 1,
) -> tuple[DeltaManifest, bytes]:
    """Join the segments and compute their digests, with the target's hash unless another is given."""
    blob = b"".join(encoded.segments)
    chunks = table_of(blob, chunk_bytes, target.chunks.hash if hash is None else hash, threads)
    return DeltaManifest(base.digest, target.digest, target.layout.fingerprint, encoded.parts, chunks), blob


def encode(old: View, new: View, layout: Layout, *, threads: int = 1, part_elements: int = PART_ELEMENTS) -> Encoded:
    """Return the parts that turn `old` into `new`; both are versions of this layout."""
    old_bytes, new_bytes = _version_bytes(old, layout), _version_bytes(new, layout)

    def write(piece: Piece) -> tuple[Encoding, bytes] | None:
        return encode_piece(_bits(old_bytes, piece), _bits(new_bytes, piece))

    pieces = list(pieces_of(layout, part_elements))
    return assemble(pieces, in_threads(write, pieces, threads))


def assemble(pieces: Sequence[Piece], written: Iterable[tuple[Encoding, bytes] | None]) -> Encoded:
    """Combine the encoded pieces into parts and segments. None stands for an unchanged piece."""
    parts: list[DeltaPart] = []
    segments: list[bytes] = []
    for piece, one in zip(pieces, written, strict=True):
        if one is not None:
            encoding, segment = one
            parts.append(DeltaPart(piece.tensor, piece.first, piece.num_elements, encoding, len(segment)))
            segments.append(segment)
    return Encoded(tuple(parts), segments)


def pieces_of(layout: Layout, part_elements: int = PART_ELEMENTS) -> Iterator[Piece]:
    """Yield the pieces of a layout, in the order of their bytes."""
    for index, tensor in enumerate(layout.tensors):
        size = tensor.item_bytes
        for first in range(0, tensor.num_elements, part_elements):
            num = min(part_elements, tensor.num_elements - first)
            yield Piece(index, first, num, size, tensor.start + first * size)


def apply(delta: DeltaManifest, layout: Layout, blob: View, target: View, *, threads: int = 1) -> None:
    """Turn the base in `target` into the delta's target version, in place. Raises BadDelta or BadManifest.

    The caller checks digests: those of the blob before this call, those of the target after it.
    """
    check_delta(delta, layout)
    blob = memoryview(blob).cast("B")
    if blob.nbytes != delta.chunks.num_bytes:
        raise BadDelta(f"a blob of {blob.nbytes} bytes; expected {delta.chunks.num_bytes}")
    target_bytes = _version_bytes(target, layout)

    def read(placed: tuple[DeltaPart, int]) -> None:
        part, start = placed
        tensor = layout.tensors[part.tensor]
        size = tensor.item_bytes
        piece = Piece(part.tensor, part.first, part.num_elements, size, tensor.start + part.first * size)
        try:
            _READERS[part.encoding](blob[start : start + part.num_bytes], _bits(target_bytes, piece))
        except (BadDelta, zstandard.ZstdError, struct.error) as error:
            raise BadDelta(f"{tensor.name} from element {part.first}, {part.encoding}: {error}") from error

    starts = np.cumsum([0, *(part.num_bytes for part in delta.parts)]).tolist()
    in_threads(read, list(zip(delta.parts, starts, strict=False)), threads)


def encode_piece(old: Bits, new: Bits) -> tuple[Encoding, bytes] | None:
    """Return the smallest encoding of one piece, or None if nothing changed."""
    words = _unequal_words(old, new)
    num_words = new.nbytes // _WORD_BYTES
    if len(words) > num_words * 7 // 8 and np.count_nonzero(old != new) > len(new) // 2:
        return _smallest([("planes", _pack_planes(zigzag(new - old)))], new)
    positions, differences = _changes_in(words, old, new)
    num_changes = len(positions)
    if num_changes == 0:
        return None
    codes, wide = split_wide(differences)
    ways: list[tuple[Encoding, bytes]] = []
    if num_changes <= len(new) // 2:
        ways.append(("sparse", pack_sparse(gap_bytes(positions), codes, wide)))
    if not is_surely_sparse(len(new), num_changes, len(wide)):
        ways.append(("planes", _pack_planes(zigzag(new - old))))
    return _smallest(ways, new)


def _smallest(ways: list[tuple[Encoding, bytes]], new: Bits) -> tuple[Encoding, bytes]:
    best = min(ways, key=lambda way: len(way[1]))
    return best if len(best[1]) < new.nbytes else ("raw", new.tobytes())


def count_changes(old: View, new: View, tensor: TensorEntry) -> int:
    """Return how many elements of a tensor differ between two versions."""
    kind = f"<u{tensor.item_bytes}"
    before, after = (np.frombuffer(view, kind, tensor.num_elements, tensor.start) for view in (old, new))
    return int(np.count_nonzero(before != after))


def is_surely_sparse(num_elements: int, num_changes: int, num_wide: int) -> bool:
    """Return whether changes are so few and mostly so small that the planes encoding need not be tried."""
    return num_changes <= num_elements // 3 and num_wide <= num_changes // 8


def _unequal_words(old: Bits, new: Bits) -> Bits:
    """Return the indices of the 8-byte words that differ.

    Most words are equal, and comparing words looks at several elements at once.
    """
    num_words = new.nbytes // _WORD_BYTES
    old, new = (one.view(np.uint8)[: num_words * _WORD_BYTES].view(np.uint64) for one in (old, new))
    found = [np.empty(0, np.int64)]
    for start in range(0, num_words, _BLOCK_WORDS):
        stop = start + _BLOCK_WORDS
        found.append(np.flatnonzero(old[start:stop] != new[start:stop]) + start)
    return np.concatenate(found)


def _changes_in(words: Bits, old: Bits, new: Bits) -> tuple[Bits, Bits]:
    """Return positions and zigzag differences of the changed elements in these words and after the last whole word."""
    per_word = _WORD_BYTES // old.itemsize
    head = len(new) // per_word * per_word
    old_near = old[:head].view(np.uint64).take(words).view(old.dtype)
    new_near = new[:head].view(np.uint64).take(words).view(old.dtype)
    near = np.flatnonzero(old_near != new_near)
    shift = per_word.bit_length() - 1
    positions = (words.take(near >> shift) << shift) + (near & (per_word - 1))
    differences = new_near.take(near) - old_near.take(near)
    if head < len(old):
        tail = np.flatnonzero(old[head:] != new[head:])
        positions = np.concatenate([positions, tail + head])
        differences = np.concatenate([differences, new[head:][tail] - old[head:][tail]])
    return positions, zigzag(differences)


def zigzag(differences: Bits) -> Bits:
    """Map differences that wrap around to small unsigned numbers: 0 -1 1 -2 2 becomes 0 1 2 3 4."""
    signed = differences.view(f"i{differences.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * differences.itemsize - 1))).view(differences.dtype)


def unzigzag(codes: Bits) -> Bits:
    return (codes >> 1) ^ np.negative(codes & 1)


def split_wide(differences: Bits) -> tuple[Bits, Bits]:
    """Return each difference as one byte, ESCAPE for a wide one, and the wide differences in full."""
    codes = np.minimum(differences, ESCAPE).astype(np.uint8)
    return codes, differences[codes == ESCAPE]


def gap_bytes(positions: Bits) -> Bits:
    """Return the number of elements between changes in bytes: 255 for every 255 of them, then the rest."""
    gaps = np.empty(len(positions), np.int32)
    gaps[0] = positions[0]
    np.subtract(positions[1:], positions[:-1], out=gaps[1:], casting="same_kind")
    gaps[1:] -= 1
    rest = gaps.astype(np.uint8)
    far = np.flatnonzero(gaps >= ESCAPE)
    if not len(far):
        return rest
    escapes = gaps[far] // ESCAPE
    rest[far] = gaps[far] - escapes * ESCAPE
    return np.insert(rest, np.repeat(far, escapes), ESCAPE)


def pack_sparse(gaps: Bits, codes: Bits, wide: Bits) -> bytes:
    packed_gaps, packed_codes = _compress(gaps), _compress(codes)
    head = _SPARSE.pack(len(gaps), len(codes), len(wide), len(packed_gaps), len(packed_codes))
    return b"".join((head, packed_gaps, packed_codes, wide.tobytes()))


def _read_sparse(data: memoryview, target: Bits) -> None:
    num_gaps, num_changes, num_wide, gap_size, code_size = _SPARSE.unpack_from(data)
    if num_changes > len(target) or num_gaps > num_changes + len(target) // ESCAPE or num_wide > num_changes:
        raise BadDelta(f"{num_changes} changes, {num_gaps} gaps, {num_wide} wide in {len(target)} elements")
    ends = [int(end) for end in np.cumsum([_SPARSE.size, gap_size, code_size, num_wide * target.itemsize])]
    if ends[-1] != len(data):
        raise BadDelta(f"{len(data)} bytes; expected {ends[-1]}")
    gaps = _decompress(data[ends[0] : ends[1]], num_gaps)
    codes = _decompress(data[ends[1] : ends[2]], num_changes)
    is_change = gaps != ESCAPE
    steps = gaps.astype(np.int32)
    steps += is_change
    positions = np.cumsum(steps, dtype=np.int64)[is_change]
    positions -= 1
    if len(positions) != num_changes or (num_changes and positions[-1] >= len(target)):
        raise BadDelta("its gaps lead to other elements than there are")
    differences = codes.astype(target.dtype)
    is_wide = np.flatnonzero(codes == ESCAPE)
    if len(is_wide) != num_wide:
        raise BadDelta(f"{len(is_wide)} escapes for {num_wide} wide differences")
    differences[is_wide] = np.frombuffer(data[ends[2] :], target.dtype)
    target[positions] += unzigzag(differences)


def _pack_planes(differences: Bits) -> bytes:
    planes = differences.view(np.uint8).reshape(len(differences), differences.itemsize)
    packed = [_compress(np.ascontiguousarray(planes[:, index])) for index in range(differences.itemsize)]
    return b"".join((*(_PLANE.pack(len(one)) for one in packed), *packed))


def _read_planes(data: memoryview, target: Bits) -> None:
    num_planes = target.itemsize
    planes = np.empty((len(target), num_planes), np.uint8)
    start = num_planes * _PLANE.size
    for index in range(num_planes):
        (size,) = _PLANE.unpack_from(data, index * _PLANE.size)
        planes[:, index] = _decompress(data[start : start + size], len(target))
        start += size
    if start != len(data):
        raise BadDelta(f"{len(data)} bytes; expected {start}")
    target += unzigzag(planes.reshape(-1).view(target.dtype))


def _read_raw(data: memoryview, target: Bits) -> None:
    if len(data) != target.nbytes:
        raise BadDelta(f"{len(data)} bytes; expected {target.nbytes}")
    target[:] = np.frombuffer(data, target.dtype)


_READERS: dict[Encoding, Callable[[memoryview, Bits], None]] = {
    "sparse": _read_sparse,
    "planes": _read_planes,
    "raw": _read_raw,
}


class _Zstd(threading.local):
    """One compressor and decompressor per thread, since neither may be shared between threads."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()


_zstd = _Zstd()


def _compress(data: Bits) -> bytes:
    return _zstd.compressor.compress(data.data)


def _decompress(data: memoryview, num_bytes: int) -> Bits:
    """Decompress one zstd frame of exactly `num_bytes`. Raises BadDelta.

    The frame states its own size, and zstd allocates that much, so the size is checked first.
    """
    found = zstandard.get_frame_parameters(data).content_size
    if found != num_bytes:
        raise BadDelta(f"a frame of {found} bytes; expected {num_bytes}")
    whole = np.frombuffer(_zstd.decompressor.decompress(data, allow_extra_data=False), np.uint8)
    if len(whole) != num_bytes:
        raise BadDelta(f"a frame of {len(whole)} bytes that claimed {num_bytes}")
    return whole


def _version_bytes(view: View, layout: Layout) -> Bits:
    found = np.frombuffer(view, np.uint8)
    if len(found) != layout.num_bytes:
        raise ValueError(f"{len(found)} bytes of weights; expected {layout.num_bytes}")
    return found


def _bits(version: Bits, piece: Piece) -> Bits:
    stop = piece.start + piece.num_elements * piece.item_bytes
    return version[piece.start : stop].view(f"<u{piece.item_bytes}")
