"""The contents of a weight version and of a delta: canonical bytes, and one digest for the whole.

    Layout          the tensors and their places in the bytes; the same for every version of a model
    Manifest        a version: a layout, the digests of its chunks, its parent; for an adapter, also its base
    DeltaManifest   a difference: base and target version, its parts, the digests of its chunks

Rules kept here: a value has one encoding (JSON without spaces, fields in order), and decoding refuses any other bytes
for it, so that a digest names a value. Every decoded value has been checked: names are sorted and unique, every start
follows from the sizes before it, ranges lie inside their tensors, all numbers are bounded. Bytes between tensors are
zero. Errors are one line (BadManifest). Left out: the bytes of the tensors themselves, and what vouches for a digest.
"""

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta, Struct

from polyrl.not_data import NOT_DATA
from polyrl.weights.chunks import ChunkTable

FORMAT: Literal[1] = 1
ALIGN_BYTES = 64
"""Tensors start at multiples of this: a cache line, and enough for every vector load instruction."""

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

MAX_VERSION_BYTES = 1 << 44
MAX_MANIFEST_BYTES = 1 << 28
MAX_TENSORS = 1 << 20
MAX_PARTS = 1 << 22
MAX_PART_ELEMENTS = 1 << 22
"""The most elements of a part. It bounds the memory that applying a part takes, even if the delta is hostile."""

Name = Annotated[str, Meta(min_length=1, max_length=512)]
Hex = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
HexOrNone = Annotated[str, Meta(pattern="^([0-9a-f]{64})?$")]
Count = Annotated[int, Meta(ge=0, le=MAX_VERSION_BYTES)]
TensorShape = Annotated[tuple[Count, ...], Meta(max_length=8)]

Encoding = Literal["raw", "planes", "sparse"]


class BadManifest(ValueError):
    """Bytes that are not a manifest, or a manifest that contradicts itself. The message is one line."""


class WrongBytes(BadManifest):
    """Bytes that are not those asked for. The source that gave them is at fault."""


class TensorEntry(Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor in a version's bytes, in row-major order."""

    name: Name
    dtype: str
    shape: TensorShape
    start: Count
    num_bytes: Count

    @property
    def item_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def num_elements(self) -> int:
        return self.num_bytes // DTYPE_BYTES[self.dtype]

    @property
    def end(self) -> int:
        return self.start + self.num_bytes


class Layout(Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """The places of a model's tensors, made by `lay_out`; the same for all versions of the model."""

    architecture: Annotated[str, Meta(max_length=512)]
    tensors: Annotated[tuple[TensorEntry, ...], Meta(max_length=MAX_TENSORS)]
    tied: dict[Name, Name]
    """Names without bytes of their own, each with the tensor that it is tied to."""
    num_bytes: Count

    @cached_property
    def fingerprint(self) -> str:
        """The digest of the layout. Two models with the same fingerprint can exchange weights."""
        return _digest(msgspec.json.encode(self, order="deterministic"))

    @cached_property
    def by_name(self) -> dict[str, TensorEntry]:
        """All tensors by name, tied names included."""
        found = {one.name: one for one in self.tensors}
        return {**found, **{alias: found[name] for alias, name in self.tied.items()}}


class AdapterFacts(Struct, frozen=True, forbid_unknown_fields=True):
    """The base and the scale of the low-rank changes in an adapter version (adapters.py)."""

    base: Hex
    """The fingerprint of the base's weights: of its numbers, not only of its shapes."""
    dtype: Name
    """The dtype of the base, and of the sum."""
    scaling: Annotated[float, Meta(gt=0)]


class Manifest(Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """A weight version. Each sample records the digest of the version that generated it."""

    version: Annotated[int, Meta(ge=0, le=(1 << 53) - 1)]
    layout: Layout
    chunks: ChunkTable
    parent: HexOrNone
    """The digest of the previous version; empty for the first."""
    lossy: Literal[""] = ""
    """Always empty: the tensors are the trainer's exact numbers in the serving dtype. It is part of the digest."""
    adapter: AdapterFacts | None = None
    """None for a version that holds all of the model's tensors."""
    format: Literal[1] = FORMAT

    @cached_property
    def digest(self) -> str:
        return _digest(encode(self))


class DeltaPart(Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A range of elements of one tensor, and their encoding. Elements outside of all parts have not changed."""

    tensor: Annotated[int, Meta(ge=0, lt=MAX_TENSORS)]
    first: Count
    num_elements: Annotated[int, Meta(ge=1, le=MAX_PART_ELEMENTS)]
    encoding: Encoding
    num_bytes: Annotated[int, Meta(ge=1, le=MAX_VERSION_BYTES)]
    """The number of bytes in the blob, where the parts lie one after the other."""


class DeltaManifest(Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """The change from one version's bytes to another's."""

    base: Hex
    target: Hex
    fingerprint: Hex
    """The fingerprint of the layout of both versions."""
    parts: Annotated[tuple[DeltaPart, ...], Meta(max_length=MAX_PARTS)]
    chunks: ChunkTable
    format: Literal[1] = FORMAT

    @cached_property
    def digest(self) -> str:
        return _digest(encode(self))


_TABLE = re.compile(r"(.*\.)?(embed_tokens|lm_head|wte)\.(weight|bias)")


def is_table(name: str) -> bool:
    """Return whether a tensor has one row per token of the vocabulary: the embeddings, or the head."""
    return _TABLE.fullmatch(name) is not None


class Spec(NamedTuple):
    """A tensor that has no place in a layout yet."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def lay_out(specs: Iterable[Spec], *, architecture: str = "", tied: Mapping[str, str] | None = None) -> Layout:
    """Place every tensor, in the order of names, each at the next multiple of ALIGN_BYTES. Raises BadManifest."""
    entries: list[TensorEntry] = []
    start = 0
    for spec in sorted(specs):
        num_bytes = math.prod(spec.shape) * _item_bytes(spec.name, spec.dtype)
        entries.append(TensorEntry(spec.name, spec.dtype, tuple(spec.shape), start, num_bytes))
        start = _aligned(start + num_bytes)
    layout = Layout(architecture, tuple(entries), dict(sorted((tied or {}).items())), start)
    check_layout(layout)
    return layout


def encode(value: Manifest | DeltaManifest) -> bytes:
    """Return the canonical bytes."""
    return msgspec.json.encode(value, order="deterministic")


def decode_manifest(data: bytes | memoryview, digest: str | None = None) -> Manifest:
    """Decode and check a manifest. Raises BadManifest for another digest, non-canonical bytes or a contradiction."""
    manifest = _decode(data, Manifest, digest)
    check_layout(manifest.layout)
    if manifest.chunks.num_bytes != manifest.layout.num_bytes:
        raise BadManifest(f"chunks of {manifest.chunks.num_bytes} bytes for a layout of {manifest.layout.num_bytes}")
    if manifest.adapter is not None:
        changes_in(manifest.layout)
    return manifest


def decode_delta(data: bytes | memoryview, layout: Layout, digest: str | None = None) -> DeltaManifest:
    """Decode and check a delta. Raises BadManifest, also if it is not a delta between versions of this layout."""
    delta = _decode(data, DeltaManifest, digest)
    check_delta(delta, layout)
    return delta


def check_layout(layout: Layout) -> None:
    """Check that the layout is what `lay_out` makes of its tensors. Raises BadManifest."""
    start, before = 0, ""
    for one in layout.tensors:
        if one.name <= before:
            raise BadManifest(f"tensor {one.name!r} after {before!r}; expected names in order, each once")
        num_bytes = math.prod(one.shape) * _item_bytes(one.name, one.dtype)
        if num_bytes != one.num_bytes:
            raise BadManifest(f"tensor {one.name!r} of {one.num_bytes} bytes; expected {num_bytes} from its shape")
        if one.start != start:
            raise BadManifest(f"tensor {one.name!r} at byte {one.start}; expected {start}")
        start, before = _aligned(one.end), one.name
    if layout.num_bytes != start:
        raise BadManifest(f"a layout of {layout.num_bytes} bytes; its tensors take {start}")
    if start > MAX_VERSION_BYTES:
        raise BadManifest(f"a layout of {start} bytes; expected at most {MAX_VERSION_BYTES}")
    names = {one.name for one in layout.tensors}
    for alias, name in layout.tied.items():
        if alias in names or name not in names:
            raise BadManifest(f"{alias!r} tied to {name!r}; expected a name without bytes, tied to a tensor")


class Change(NamedTuple):
    """A low-rank change to one matrix of a model: b (rows, rank) times a (rank, columns)."""

    target: str
    """The matrix's name in the model."""
    a: TensorEntry
    b: TensorEntry


LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
"""The suffixes of an adapter's tensors, after the name of the layer that they change, as in peft."""


def changes_in(layout: Layout) -> list[Change]:
    """Return the low-rank changes of an adapter's layout. Raises BadManifest for tensors that do not form pairs."""
    found: list[Change] = []
    for one in layout.tensors:
        layer = one.name.removesuffix(LORA_A).removesuffix(LORA_B)
        a, b = layout.by_name.get(layer + LORA_A), layout.by_name.get(layer + LORA_B)
        if layer == one.name or a is None or b is None:
            raise BadManifest(f"tensor {one.name!r} in an adapter; expected pairs of {LORA_A} and {LORA_B}")
        if (len(a.shape), len(b.shape), a.dtype, b.dtype) != (2, 2, "float32", "float32") or a.shape[0] != b.shape[1]:
            raise BadManifest(f"{layer!r}: {list(b.shape)} times {list(a.shape)} is no low-rank change in float32")
        if one is a:
            found.append(Change(f"{layer}.weight", a, b))
    return found


def check_delta(delta: DeltaManifest, layout: Layout) -> None:
    """Check that parts are in order, do not overlap, and add up to the blob. Raises BadManifest."""
    if delta.fingerprint != layout.fingerprint:
        raise BadManifest("a delta of another layout")
    num_blob_bytes, place = 0, (0, 0)
    for part in delta.parts:
        if part.tensor >= len(layout.tensors):
            raise BadManifest(f"a part of tensor {part.tensor}; there are {len(layout.tensors)}")
        tensor = layout.tensors[part.tensor]
        end = part.first + part.num_elements
        if (part.tensor, part.first) < place or end > tensor.num_elements:
            raise BadManifest(f"a part of {tensor.name!r}, {part.first} to {end}, is out of order or of bounds")
        place = (part.tensor, end)
        num_blob_bytes += part.num_bytes
    if num_blob_bytes != delta.chunks.num_bytes:
        raise BadManifest(f"parts of {num_blob_bytes} bytes in a blob of {delta.chunks.num_bytes}")


def changed_tensors(deltas: Iterable[DeltaManifest], layout: Layout) -> frozenset[str]:
    """Return the tensors that any of the deltas changes, which an engine has to load again."""
    return frozenset(layout.tensors[part.tensor].name for delta in deltas for part in delta.parts)


_Kind = TypeVar("_Kind", Manifest, DeltaManifest)
_DECODERS: Mapping[type, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for kind in (Manifest, DeltaManifest)
}
"""Built once, at import: msgspec 0.22 crashes if two threads are the first to decode a type."""


def _decode(data: bytes | memoryview, kind: type[_Kind], digest: str | None) -> _Kind:
    if len(data) > MAX_MANIFEST_BYTES:
        raise WrongBytes(f"{len(data)} bytes; expected at most {MAX_MANIFEST_BYTES}")
    if digest is not None and _digest(data) != digest:
        raise WrongBytes(f"its digest is {_digest(data)[:16]}..., expected {digest[:16]}...")
    try:
        value = _DECODERS[kind].decode(data)
    except NOT_DATA as error:
        raise BadManifest(f"not a {kind.__name__}: {error}") from error
    if encode(value) != data:
        raise BadManifest("its bytes are not the canonical ones")
    return value


def _digest(data: bytes | memoryview) -> str:
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def _item_bytes(name: str, dtype: str) -> int:
    if dtype not in DTYPE_BYTES:
        raise BadManifest(f"tensor {name!r} of dtype {dtype!r}; expected one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN_BYTES) * ALIGN_BYTES
