"""Whether a version is of a server's model, and whether it has arrived there. Decides; reads headers, moves nothing.

Before: every tensor of the model's directory is in the version, in its shape, and the other way round; the directory of
a server that runs already has the same ones, where it can be read. After: the first
bytes of embeddings, head and norms, read back from every rank, are those of the version, as that rank's slice. Matrices
are left out: servers repack them for their kernels, and the same loop of the same loader put them in.
"""

import hashlib
import logging
from collections.abc import Iterable
from pathlib import Path

from polyrl.engines.engine import EngineError, NotOfThisModel
from polyrl.engines.served import model_files
from polyrl.engines.served.between import HEAD_BYTES
from polyrl.engines.served.handing import Answer, Offer
from polyrl.errors import UserError
from polyrl.weights import folder, shards
from polyrl.weights.chunks import View
from polyrl.weights.manifest import SCALE, Layout, Manifest, Spec

log = logging.getLogger("polyrl.engines.served")

_MOST_PROBES = 8


def offer_of(manifest: Manifest, model: Path) -> Offer:
    """What the ranks are told of a version. Raises NotOfThisModel when it is not of the model in this directory."""
    if manifest.adapter is not None:
        raise NotOfThisModel(
            f"version {manifest.version} is an adapter, which a server cannot merge; "
            'expected whole weights: lora.publish = "merged"'
        )
    layout = manifest.layout
    tensors = []
    for name in _names(manifest, model):
        entry = layout.by_name[name]
        scale = layout.by_name.get(entry.name + SCALE) if manifest.lossy else None
        tensors.append((name, entry.dtype, entry.shape, entry.start, None if scale is None else scale.start))
    return Offer(tensors, layout.num_bytes, probes_of(layout))


def check_served(model: str, served: str) -> None:
    """Raises EngineError when a server that runs already, from the directory `served`, has another model than ours."""
    ours, theirs = Path(model).resolve(), Path(served)
    if not theirs.is_absolute() or not (theirs / "config.json").is_file():
        log.warning("the server's model is %r, which is no directory here: it is taken for that in %s", served, model)
        return
    if theirs.resolve() == ours:
        return
    why = _difference(ours, theirs)
    if why:
        raise EngineError(f"the server runs the model in {served}, which is not that of --model {model}: {why}")
    log.warning("the server runs the model in %s: it is taken for that in %s", served, model)


def _difference(ours: Path, theirs: Path) -> str:
    mine, its = model_files.read(str(ours)), model_files.read(str(theirs))
    if mine.vocab != its.vocab:
        return f"a vocabulary of {its.vocab} ids; expected {mine.vocab}"
    if mine.kv_numbers != its.kv_numbers:
        return "it has other layers"
    if not (any(ours.glob("*.safetensors")) and any(theirs.glob("*.safetensors"))):
        return ""
    try:
        wanted, found = folder.scan(ours).specs, folder.scan(theirs).specs
    except UserError as error:
        raise EngineError(str(error)) from error
    for name in [*wanted, *found]:
        if name not in found:
            return f"it has no {name}"
        if name not in wanted:
            return f"it has {name}"
        if found[name].shape != wanted[name].shape:
            return f"{name} has shape {list(found[name].shape)}; expected {list(wanted[name].shape)}"
    return ""


def _names(manifest: Manifest, model: Path) -> list[str]:
    """What the server is given: the tensors that its directory has, under its names."""
    layout = manifest.layout
    scales = {name for name in layout.by_name if manifest.lossy and name.endswith(SCALE)}
    wanted: dict[str, Spec] = {}
    if any(model.glob("*.safetensors")):
        wanted = {name: one for name, one in folder.scan(model).specs.items() if not name.endswith("inv_freq")}
    if not wanted:
        return [one.name for one in layout.tensors if one.name not in scales]
    where = f"version {manifest.version} is not of the model in {model}"
    for name, spec in wanted.items():
        ours = layout.by_name.get(name)
        if ours is None:
            raise NotOfThisModel(f"{where}: it has no {name}")
        if ours.shape != spec.shape:
            raise NotOfThisModel(f"{where}: {name} has shape {list(ours.shape)}; expected {list(spec.shape)}")
    given = {layout.by_name[name].name for name in wanted}
    for one in layout.tensors:
        if one.name not in given and one.name not in scales:
            raise NotOfThisModel(f"{where}, which has no {one.name}")
    return list(wanted)


def probes_of(layout: Layout) -> list[str]:
    """Parameters that every server holds under these names: tables, and vectors from all over the model."""
    tables = [name for name in layout.by_name if shards.is_table(name)]
    vectors = [name for name, one in layout.by_name.items() if len(one.shape) == 1 and name.endswith("norm.weight")]
    step = max(1, len(vectors) // (_MOST_PROBES - 2))
    return [*tables[:2], *vectors[::step]][:_MOST_PROBES]


def compare(answers: Iterable[Answer], layout: Layout, view: View) -> int:
    """How many parameters could be compared, over all ranks. Raises EngineError for one that is wrong."""
    num_compared = 0
    for answer in answers:
        for name, head in answer.heads.items():
            rule = shards.Vocabulary(name) if shards.is_table(name) else shards.Whole(name)
            shard = shards.plan(rule, layout, answer.slice, answer.num_slices)
            if (shard.dtype, shard.shape) != (head.dtype, head.shape):
                continue  # padded or split in a way of the server's own
            if hashlib.blake2b(_head(shard, memoryview(view)), digest_size=16).hexdigest() != head.digest:
                raise EngineError(f"{name} of slice {answer.slice} is not what was handed over")
            num_compared += 1
    return num_compared


def _head(shard: shards.Shard, version: memoryview) -> bytes:
    """The first bytes of a rank's slice."""
    num_bytes = min(HEAD_BYTES, shard.num_bytes)
    return bytes(version[shard.start : min(shard.end, shard.start + num_bytes)]).ljust(num_bytes, b"\0")
