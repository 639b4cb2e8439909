"""A version as a directory: safetensors in shards, named as Hugging Face names them, and `manifest.json`.

For engines that load from disk, for shared directories and object stores, and for inspecting versions by hand. A plain
model directory, which has no manifest, can be read too: it counts as version 0.

Rules kept here: a directory appears whole, under its final name, or not at all. Its content is not trusted: file names
must be plain names, offsets must lie in their file and not overlap, and with a manifest every chunk is checked before
bytes are returned. Errors are one line with the path (BadFolder). The format is read and written here, without the
safetensors library, which supports bfloat16 only with torch; a test compares the two. Left out: pickled weights.
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from polyrl.config.model_dir import read_or_nothing
from polyrl.disk import whole_folder
from polyrl.errors import UserError
from polyrl.not_data import NOT_DATA
from polyrl.weights.chunks import View, bad_chunks, table_of
from polyrl.weights.manifest import (
    DTYPE_BYTES,
    BadManifest,
    Layout,
    Manifest,
    Spec,
    TensorEntry,
    decode_manifest,
    encode,
    lay_out,
)

MANIFEST = "manifest.json"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 << 30
_MAX_HEADER_BYTES = 100_000_000
_LENGTH = struct.Struct("<Q")

_SAFETENSORS_NAMES: Mapping[str, str] = {
    "float64": "F64",
    "int64": "I64",
    "float32": "F32",
    "int32": "I32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int16": "I16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_OUR_NAMES = {theirs: ours for ours, theirs in _SAFETENSORS_NAMES.items()}


class BadFolder(UserError):
    """A directory that holds no version, or a damaged one. The message starts with its path."""


class Place(NamedTuple):
    """The place of a tensor's bytes."""

    file: Path
    offset: int


class Found(NamedTuple):
    """The tensors in a directory's safetensors files, and their places."""

    specs: dict[str, Spec]
    places: dict[str, Place]


def write(
    folder: Path,
    manifest: Manifest,
    view: View,
    *,
    beside: Mapping[str, bytes] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a version into a new directory. `beside` holds other small files: a config, a tokenizer.

    Tied names are left out, as Hugging Face does. Raises BadFolder if the directory exists.
    """
    if folder.exists():
        raise BadFolder(f"{folder}: is there already; a version is written into a new directory")
    try:
        with whole_folder(folder) as fresh:
            _write_shards(fresh, manifest.layout, memoryview(view).cast("B"), shard_bytes)
            for name, content in {**(beside or {}), MANIFEST: encode(manifest)}.items():
                _write_file(fresh / name, [content])
    except OSError as error:
        raise BadFolder(f"{folder}: cannot be written: {error}") from error


def _write_shards(folder: Path, layout: Layout, view: memoryview, shard_bytes: int) -> None:
    shards = list(_shards(layout, shard_bytes))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        head = header_of((Spec(one.name, one.dtype, one.shape) for one in shard), {"format": "pt"})
        _write_file(folder / name, [head, *(view[one.start : one.end] for one in shard)])
        weight_map.update({one.name: name for one in shard})
    if len(shards) > 1:
        total = sum(one.num_bytes for one in layout.tensors)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_file(folder / INDEX, [json.dumps(index, indent=2).encode()])


def _shards(layout: Layout, shard_bytes: int) -> Iterator[list[TensorEntry]]:
    """Yield the tensors in order, with a new shard where the next tensor would not fit.

    A tensor larger than a shard gets a shard of its own.
    """
    shard: list[TensorEntry] = []
    num_bytes = 0
    for one in layout.tensors:
        if shard and num_bytes + one.num_bytes > shard_bytes:
            yield shard
            shard, num_bytes = [], 0
        shard.append(one)
        num_bytes += one.num_bytes
    yield shard


def header_of(tensors: Iterable[Spec], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the header of a safetensors file that holds these tensors one after the other."""
    entries: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + math.prod(shape) * DTYPE_BYTES[dtype]
        entries[name] = {"dtype": _SAFETENSORS_NAMES[dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    head = msgspec.json.encode(entries)
    head += b" " * (-len(head) % 8)
    return _LENGTH.pack(len(head)) + head


def _write_file(path: Path, pieces: list[bytes | memoryview]) -> None:
    with path.open("xb", buffering=0) as file:
        for piece in pieces:
            rest = memoryview(piece)
            while rest.nbytes:
                rest = rest[file.write(rest) :]


def read_manifest(folder: Path, digest: str | None = None) -> Manifest | None:
    """Return the directory's manifest, or None if it has none. Raises BadFolder, also if the digest is not `digest`."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        return decode_manifest(path.read_bytes(), digest)
    except (OSError, BadManifest) as error:
        raise BadFolder(f"{path}: {error}") from error


def layout_in(folder: Path, found: Found | None = None) -> Layout:
    """Return the layout of a plain model directory, from its files' headers alone. Raises BadFolder."""
    specs = (scan(folder) if found is None else found).specs
    try:
        return lay_out(specs.values(), architecture=_architecture(folder))
    except BadManifest as error:
        raise BadFolder(f"{folder}: {error}") from error


def read(folder: Path, digest: str | None = None, *, threads: int = 1) -> tuple[Manifest, bytearray]:
    """Read a directory's version, and check it against its manifest if there is one. Raises BadFolder.

    Without a digest from elsewhere this detects damage, but not a deliberate change of both files and manifest.
    """
    found = scan(folder)
    manifest = read_manifest(folder, digest)
    if manifest is None and digest is not None:
        raise BadFolder(f"{folder}: no {MANIFEST} there; expected that of {digest[:16]}...")
    layout = layout_in(folder, found) if manifest is None else manifest.layout
    view = bytearray(layout.num_bytes)
    copy_into(layout, found, folder, view)
    if manifest is None:
        return Manifest(0, layout, table_of(view, threads=threads), ""), view
    bad = bad_chunks(view, manifest.chunks, threads)
    if bad:
        names = ", ".join(_tensors_in(manifest, bad[0]))
        raise BadFolder(f"{folder}: {len(bad)} of {manifest.chunks.num_chunks} chunks are damaged, first {names}")
    return manifest, view


def copy_into(layout: Layout, found: Found, folder: Path, view: View) -> None:
    """Read every tensor of a layout into its place in `view`. The caller checks digests. Raises BadFolder."""
    out = memoryview(view).cast("B")
    for one in layout.tensors:
        spec = found.specs.get(one.name)
        if spec != Spec(one.name, one.dtype, one.shape):
            what = "is not there" if spec is None else f"is {spec.dtype} {list(spec.shape)}"
            raise BadFolder(f"{folder}: {one.name} {what}; expected {one.dtype} {list(one.shape)}")
        place = found.places[one.name]
        try:
            _read_bytes(place, out[one.start : one.end])
        except OSError as error:
            raise BadFolder(f"{place.file}: {error}") from error


def _read_bytes(place: Place, out: memoryview) -> None:
    with place.file.open("rb", buffering=0) as file:
        file.seek(place.offset)
        while out.nbytes:
            num_bytes = file.readinto(out)
            if not num_bytes:
                raise BadFolder(f"{place.file}: ends {out.nbytes} bytes early")
            out = out[num_bytes:]


def scan(folder: Path) -> Found:
    """Return all tensors in a directory's safetensors files, from the headers. Raises BadFolder."""
    if not folder.is_dir():
        raise BadFolder(f"{folder}: no such directory")
    files = _files(folder)
    if not files:
        raise BadFolder(f"{folder}: no *.safetensors there; expected a model directory or a version")
    specs: dict[str, Spec] = {}
    places: dict[str, Place] = {}
    for file in files:
        for spec, offset in _scan_file(file):
            if spec.name in specs:
                raise BadFolder(f"{file}: {spec.name} is in {places[spec.name].file.name} too")
            specs[spec.name], places[spec.name] = spec, Place(file, offset)
    return Found(specs, places)


def _files(folder: Path) -> list[Path]:
    """Return the files that the index names, or all safetensors files if there is no index."""
    index = folder / INDEX
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values()))
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadFolder(f"{index}: {error}") from error
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise BadFolder(f"{index}: {name!r}; expected the plain name of a safetensors file")
    return [folder / name for name in names]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Entry(msgspec.Struct):
    dtype: str
    shape: Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 48)]], Meta(max_length=8)]
    data_offsets: tuple[Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=0)]]


def _scan_file(file: Path) -> Iterator[tuple[Spec, int]]:
    """Yield the tensors of a file, each with the offset of its first byte."""
    try:
        with file.open("rb") as opened:
            num_file_bytes = os.fstat(opened.fileno()).st_size
            length = opened.read(_LENGTH.size)
            (num_head_bytes,) = _LENGTH.unpack(length) if len(length) == _LENGTH.size else (num_file_bytes,)
            if num_head_bytes > min(_MAX_HEADER_BYTES, num_file_bytes - _LENGTH.size):
                raise BadFolder(f"{file}: a header of {num_head_bytes} bytes in a file of {num_file_bytes}")
            raw = msgspec.json.decode(opened.read(num_head_bytes), type=dict[str, msgspec.Raw])
            raw.pop("__metadata__", None)
            entries = {name: msgspec.json.decode(one, type=_Entry) for name, one in raw.items()}
    except (OSError, *NOT_DATA) as error:
        raise BadFolder(f"{file}: {error}") from error
    begin, end = _LENGTH.size + num_head_bytes, 0
    for name, one in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        if one.dtype not in _OUR_NAMES:
            raise BadFolder(f"{file}: {name} of dtype {one.dtype}; expected one of {', '.join(_OUR_NAMES)}")
        dtype = _OUR_NAMES[one.dtype]
        num_bytes = math.prod(one.shape) * DTYPE_BYTES[dtype]
        if one.data_offsets != (end, end + num_bytes):
            raise BadFolder(f"{file}: {name} at {list(one.data_offsets)}; expected {[end, end + num_bytes]}")
        if begin + end + num_bytes > num_file_bytes:
            missing = begin + end + num_bytes - num_file_bytes
            raise BadFolder(f"{file}: ends {missing} bytes before {name} does; expected a whole file")
        yield Spec(name, dtype, tuple(one.shape)), begin + end
        end += num_bytes


def _architecture(folder: Path) -> str:
    """Return the architecture that the directory's config names; empty if it names none."""
    names = read_or_nothing(folder, "config.json").get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def _tensors_in(manifest: Manifest, chunk: int) -> list[str]:
    start, stop = manifest.chunks.range_of(chunk)
    return [one.name for one in manifest.layout.tensors if one.start < stop and one.end > start][:3]
