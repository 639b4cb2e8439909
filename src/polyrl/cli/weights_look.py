"""`polyrl weights inspect|verify|diff`: versions that lie in directories, without torch."""

import argparse
import json
from pathlib import Path
from typing import Any

from polyrl.errors import UserError

NUM_SHOWN = 10


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--digest", metavar="HEX", help="verify, serve, pull: take no version but this one")
    parser.add_argument("--all", action="store_true", help="inspect, diff: every tensor instead of the first ten")


def run(args: argparse.Namespace) -> int:
    if args.action == "diff":
        old, new = _folders(args, 2)
        return _diff(old, new, args)
    (folder,) = _folders(args, 1)
    return _inspect(folder, args) if args.action == "inspect" else _verify(folder, args)


def _folders(args: argparse.Namespace, number: int) -> list[Path]:
    if len(args.places) != number:
        expected = "one directory" if number == 1 else "two directories"
        raise UserError(f"weights {args.action}: {len(args.places)} arguments; expected {expected}")
    if args.threads < 1:
        raise UserError(f"--threads: {args.threads}; expected at least 1")
    return [Path(place) for place in args.places]


def _inspect(folder: Path, args: argparse.Namespace) -> int:
    import msgspec

    from polyrl.weights import folder as folders

    manifest = folders.read_manifest(folder)
    layout = folders.layout_in(folder) if manifest is None else manifest.layout
    by_dtype: dict[str, int] = {}
    for one in layout.tensors:
        by_dtype[one.dtype] = by_dtype.get(one.dtype, 0) + one.num_elements
    facts: dict[str, Any] = {
        "version": None if manifest is None else manifest.version,
        "digest": None if manifest is None else manifest.digest,
        "parent": None if manifest is None else manifest.parent,
        "lossy": None if manifest is None else manifest.lossy,
        "adapter": None if manifest is None or manifest.adapter is None else msgspec.to_builtins(manifest.adapter),
        "architecture": layout.architecture,
        "fingerprint": layout.fingerprint,
        "num_tensors": len(layout.tensors),
        "num_elements": by_dtype,
        "num_bytes": layout.num_bytes,
        "num_chunks": None if manifest is None else manifest.chunks.num_chunks,
        "hash": None if manifest is None else manifest.chunks.hash,
        "tied": layout.tied,
    }
    tensors = [{"name": one.name, "dtype": one.dtype, "shape": one.shape, "start": one.start} for one in layout.tensors]
    if args.json:
        print(json.dumps({**facts, "tensors": tensors}, indent=2))
        return 0
    if manifest is None:
        print(f"{folder}: a model directory without a manifest: nothing to verify it against")
    for name, value in facts.items():
        if value is not None:
            print(f"{name:<14}{_words(value)}")
    shown = tensors if args.all else tensors[:NUM_SHOWN]
    for one in shown:
        print(f"  {one['dtype']:<14} {'x'.join(map(str, one['shape'])) or 'number':<16} {one['name']}")
    _say_rest(len(tensors) - len(shown))
    return 0


def _verify(folder: Path, args: argparse.Namespace) -> int:
    from polyrl.weights import folder as folders

    if folders.read_manifest(folder, args.digest) is None:
        raise UserError(f"{folder}: no {folders.MANIFEST} there; expected a version to verify")
    manifest, _ = folders.read(folder, args.digest, threads=args.threads)
    facts = {
        "version": manifest.version,
        "digest": manifest.digest,
        "num_bytes": manifest.layout.num_bytes,
        "num_chunks": manifest.chunks.num_chunks,
        "hash": manifest.chunks.hash,
    }
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        print(
            f"ok: version {manifest.version}, {manifest.chunks.num_chunks} chunks, {_words(facts['num_bytes'])} bytes"
        )
        print(manifest.digest)
    return 0


def _diff(old_folder: Path, new_folder: Path, args: argparse.Namespace) -> int:
    """Exit code 0 when they are the same, 1 when they differ, as diff(1) does."""
    from polyrl.weights import delta
    from polyrl.weights import folder as folders

    old, old_view = folders.read(old_folder, threads=args.threads)
    new, new_view = folders.read(new_folder, threads=args.threads)
    if old.layout.tensors != new.layout.tensors:
        return _diff_layouts(old.layout, new.layout, args)
    encoded = delta.encode(old_view, new_view, new.layout, threads=args.threads)
    num_delta_bytes = sum(part.num_bytes for part in encoded.parts)
    changed = {
        new.layout.tensors[index].name: delta.count_changes(old_view, new_view, new.layout.tensors[index])
        for index in dict.fromkeys(part.tensor for part in encoded.parts)
    }
    num_elements = sum(one.num_elements for one in new.layout.tensors)
    facts = {
        "num_tensors": len(new.layout.tensors),
        "num_changed_tensors": len(changed),
        "num_elements": num_elements,
        "num_changed": sum(changed.values()),
        "delta_bytes": num_delta_bytes,
        "ratio": round(new.layout.num_bytes / num_delta_bytes, 1) if num_delta_bytes else None,
    }
    if args.json:
        print(json.dumps({**facts, "changed": changed}, indent=2))
        return 1 if changed else 0
    if not changed:
        print(f"the same: {len(new.layout.tensors)} tensors, {_words(num_elements)} elements")
        return 0
    print(f"{len(changed)} of {len(new.layout.tensors)} tensors changed, {_share(facts['num_changed'], num_elements)}")
    print(f"a delta of {_words(num_delta_bytes)} bytes, {facts['ratio']} times smaller than the version")
    shown = sorted(changed, key=lambda name: -changed[name] / new.layout.by_name[name].num_elements)
    shown = shown if args.all else shown[:NUM_SHOWN]
    for name in shown:
        print(f"  {_share(changed[name], new.layout.by_name[name].num_elements):<40} {name}")
    _say_rest(len(changed) - len(shown))
    return 1


def _diff_layouts(old: Any, new: Any, args: argparse.Namespace) -> int:
    before = {one.name: f"{one.dtype} {list(one.shape)}" for one in old.tensors}
    after = {one.name: f"{one.dtype} {list(one.shape)}" for one in new.tensors}
    differing = [name for name in sorted({**before, **after}) if before.get(name) != after.get(name)]
    if args.json:
        rows = {name: [before.get(name), after.get(name)] for name in differing}
        print(json.dumps({"layouts_differ": rows}, indent=2))
        return 1
    print(f"versions of different layouts: {len(differing)} tensors differ; there is no delta between them")
    shown = differing if args.all else differing[:NUM_SHOWN]
    for name in shown:
        print(f"  {name}: {before.get(name, 'not there')} -> {after.get(name, 'not there')}")
    _say_rest(len(differing) - len(shown))
    return 1


def _share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} elements ({part / whole:.2%})"


def _words(value: Any) -> str:
    match value:
        case dict():
            return ", ".join(f"{name}: {_words(one)}" for name, one in value.items()) or "none"
        case int():
            return f"{value:,}"
        case _:
            return str(value) or "none"


def _say_rest(number: int) -> None:
    if number > 0:
        print(f"  ... and {number} more (--all)")
