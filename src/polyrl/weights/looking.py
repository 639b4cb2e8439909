"""Facts about versions that lie in directories: what one consists of, whether it is whole, how two differ. No torch."""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from polyrl.errors import UserError
from polyrl.weights import delta, folder
from polyrl.weights.manifest import Layout


def inspect(directory: Path) -> dict[str, Any]:
    """Of a model directory without a manifest, whatever a manifest would say is None."""
    manifest = folder.read_manifest(directory)
    layout = folder.layout_in(directory) if manifest is None else manifest.layout
    num_elements: dict[str, int] = {}
    for one in layout.tensors:
        num_elements[one.dtype] = num_elements.get(one.dtype, 0) + one.num_elements
    return {
        "version": manifest and manifest.version,
        "digest": manifest and manifest.digest,
        "parent": manifest and manifest.parent,
        "adapter": manifest and manifest.adapter and msgspec.to_builtins(manifest.adapter),
        "architecture": layout.architecture,
        "fingerprint": layout.fingerprint,
        "num_tensors": len(layout.tensors),
        "num_elements": num_elements,
        "num_bytes": layout.num_bytes,
        "num_chunks": manifest and manifest.chunks.num_chunks,
        "hash": manifest and manifest.chunks.hash,
        "tied": layout.tied,
        "tensors": [
            {"name": one.name, "dtype": one.dtype, "shape": one.shape, "start": one.start} for one in layout.tensors
        ],
    }


def verify(directory: Path, digest: str | None, *, threads: int) -> dict[str, Any]:
    """Read every byte. Raises UserError when one is not the manifest's, or the manifest is not the `digest`'s."""
    if folder.read_manifest(directory, digest) is None:
        raise UserError(f"{directory}: no {folder.MANIFEST} there; expected a version to verify")
    manifest, _ = folder.read(directory, digest, threads=threads)
    return {
        "version": manifest.version,
        "digest": manifest.digest,
        "num_bytes": manifest.layout.num_bytes,
        "num_chunks": manifest.chunks.num_chunks,
        "hash": manifest.chunks.hash,
    }


class VersionDifference(NamedTuple):
    """`facts` is None between versions of different layouts, which have no delta."""

    facts: dict[str, Any] | None
    changed: dict[str, tuple[int, int]]
    """Of each tensor that changed: how many elements, and of how many."""
    layouts: dict[str, tuple[str | None, str | None]]
    """Of each tensor whose dtype or shape differs: before, and after; None where it is not there."""


def compare(old_directory: Path, new_directory: Path, *, threads: int) -> VersionDifference:
    old, old_view = folder.read(old_directory, threads=threads)
    new, new_view = folder.read(new_directory, threads=threads)
    if old.layout.tensors != new.layout.tensors:
        return VersionDifference(None, {}, _compare_layouts(old.layout, new.layout))
    tensors = new.layout.tensors
    encoded = delta.encode(old_view, new_view, new.layout, threads=threads)
    num_delta_bytes = sum(part.num_bytes for part in encoded.parts)
    changed = {
        tensors[index].name: (delta.count_changes(old_view, new_view, tensors[index]), tensors[index].num_elements)
        for index in dict.fromkeys(part.tensor for part in encoded.parts)
    }
    facts = {
        "num_tensors": len(tensors),
        "num_changed_tensors": len(changed),
        "num_elements": sum(one.num_elements for one in tensors),
        "num_changed": sum(number for number, _ in changed.values()),
        "delta_bytes": num_delta_bytes,
        "ratio": round(new.layout.num_bytes / num_delta_bytes, 1) if num_delta_bytes else None,
    }
    return VersionDifference(facts, changed, {})


def _compare_layouts(old: Layout, new: Layout) -> dict[str, tuple[str | None, str | None]]:
    before, after = ({one.name: f"{one.dtype} {list(one.shape)}" for one in layout.tensors} for layout in (old, new))
    names = sorted({**before, **after})
    return {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}
