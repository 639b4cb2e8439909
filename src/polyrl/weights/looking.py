"""Facts about versions in directories: their content, their integrity, and the difference of two. No torch."""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from polyrl.errors import UserError
from polyrl.weights import delta, folder
from polyrl.weights.manifest import Layout


def inspect(directory: Path) -> dict[str, Any]:
    """Return the facts about a version. Without a manifest, the facts that only a manifest knows are None."""
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
    """Read and check every byte. Raises UserError if one does not match the manifest, or the manifest not `digest`."""
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
    """The difference of two versions. `facts` is None if their layouts differ: such versions have no delta."""

    facts: dict[str, Any] | None
    changed: dict[str, tuple[int, int]]
    """For each changed tensor, the number of changed elements and the number of all."""
    layouts: dict[str, tuple[str | None, str | None]]
    """For each tensor whose dtype or shape differs, the old and the new one; None where the tensor does not exist."""


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
