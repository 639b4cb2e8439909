"""Checkpoints: everything that only the trainer knows, on disk, complete or not there at all.

    RUN/checkpoints/step-000012/     state.json              the next step, and the digest of the other file
                                     optimizer.safetensors   float32 weights and both moments; none before step 0.
                                                             Several ranks write a shard each (sharded.py)
    RUN/checkpoints/redo/            what the steps since then were trained on (redo.py)
    RUN/checkpoints/published.json   the digests of the versions published last
    RUN/checkpoints/best.json        which step validated best so far
    RUN/checkpoints/data-ended       the step that there was no data for, once that is known
    RUN/checkpoints/run-id           the run that all this belongs to

Data order, deferred prompts, the open round and the ledger are in the manager's journal, and are not repeated here.

Rules kept here: a checkpoint is written next to the others under a temporary name, flushed, and then renamed: whenever
the process is killed, the last checkpoint is complete. It is verified when it is read. A full disk leaves the old ones
usable. Old ones are removed by a rule (`Keep`), only after the new one is there.
"""

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import blake3
import msgspec
import torch
from msgspec import Struct
from safetensors import SafetensorError
from safetensors.torch import load_file

from polyrl.disk import sync_folder, write_synced, write_whole
from polyrl.errors import UserError
from polyrl.trainer.state import entries
from polyrl.trainer.state.entries import name_of, step_of
from polyrl.weights.folder import header_of
from polyrl.weights.manifest import Spec

if TYPE_CHECKING:
    from polyrl.trainer.model import Policy

FOLDER = "checkpoints"
_STATE = "state.json"
_TENSORS = "optimizer.safetensors"
_BEST = "best.json"
_PUBLISHED = "published.json"
_DATA_ENDED = "data-ended"
_RUN_ID = "run-id"
_FORMAT = 2
_PIECE_BYTES = 64 << 20

Tensor = torch.Tensor
T = TypeVar("T")


class Stopped(Exception):
    """Raised when a write was stopped because its result is no longer needed."""


class TrainerState(Struct, frozen=True, kw_only=True):
    """The part of a checkpoint that is not tensors."""

    next_step: int
    run: str = ""
    """The run's id, drawn when it began. A journal knows nothing of the weights of another run."""
    fingerprint: str = ""
    """The fingerprint of the trained model: the names and shapes of its tensors."""
    base: str = ""
    """With LoRA, the fingerprint of the base weights, which are not in the checkpoint."""
    tokenizer: str = ""
    """The digest of the tokenizer's files."""
    prompts: tuple[str, ...] = ()
    """The digest of each domain's prompts, in order: the journal refers to prompts by number."""
    models: str = ""
    """The digest of all model files. Set before step 0 only, where a run still continues from these files."""
    reference: str = ""
    """The digest of the KL reference's files, if there is a reference: no checkpoint holds its weights."""
    files: dict[str, str] = {}
    format: int = _FORMAT


class Keep(NamedTuple):
    """Which checkpoints stay: the `last` ones, one in every `every` steps, and the best. `samples_bytes` bounds what is
    kept of the samples of older steps."""

    last: int = 2
    every: int | None = None
    samples_bytes: int = entries.DEFAULT_SAMPLES_BYTES

    def is_for_good(self, step: int) -> bool:
        return bool(self.every and step and step % self.every == 0)


class Best(Struct, frozen=True):
    """The step whose version validated best."""

    step: int
    metric: str
    value: float


class _Sealed(Struct, frozen=True):
    digest: str
    state: msgspec.Raw


def save(
    run_dir: Path, state: TrainerState, tensors: Mapping[str, Tensor], *, stop: threading.Event | None = None
) -> Path:
    """Write a checkpoint. `tensors` are in host memory; there may be none.

    Raises OSError, or Stopped if `stop` is set before all is written. The old checkpoints stay complete.
    """

    def fill(fresh: Path) -> dict[str, str]:
        return {_TENSORS: write_tensors(fresh / _TENSORS, tensors, stop)} if tensors else {}

    return save_with(run_dir, state, fill)


def unfinished(run_dir: Path, next_step: int) -> Path:
    """Return the folder of a checkpoint that is being written."""
    return run_dir / FOLDER / f".{name_of(next_step)}"


def save_with(run_dir: Path, state: TrainerState, fill: Callable[[Path], dict[str, str]]) -> Path:
    """Write a checkpoint whose files `fill` writes into a folder, and returns the digests of. Raises what that does."""
    folder = run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for rest in folder.glob(".step-*"):  # left by a process that was killed
        shutil.rmtree(rest, ignore_errors=True)
    final, fresh = folder / name_of(state.next_step), unfinished(run_dir, state.next_step)
    fresh.mkdir()
    try:
        state = msgspec.structs.replace(state, files=fill(fresh))
        write_synced(fresh / _STATE, _seal(state))
        sync_folder(fresh)
        if final.exists():
            shutil.rmtree(final)
        fresh.rename(final)
        sync_folder(folder)
    except (OSError, Stopped):
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    return final


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], stop: threading.Event | None, metadata: Mapping[str, str] | None = None
) -> str:
    """Write a safetensors file, and return its digest. The library's writer would copy everything once more."""
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))  # so that each is aligned
    specs = (Spec(name, str(one.dtype).removeprefix("torch."), tuple(one.shape)) for name, one in ordered.items())
    hashing = blake3.blake3()
    with path.open("wb", buffering=0) as file:
        for piece in _pieces(header_of(specs, metadata), ordered):
            if stop is not None and stop.is_set():
                raise Stopped
            hashing.update(piece)
            rest = piece
            while rest:
                rest = rest[file.write(rest) :]
            # Gigabytes queued for the disk would delay the few megabytes of the redo log, which a step waits for.
            os.fdatasync(file.fileno())
    return hashing.hexdigest()


def _pieces(beginning: bytes, tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """Yield the file in pieces small enough for a disk to take each quickly. Small tensors are joined."""
    small = bytearray(beginning)
    for one in tensors.values():
        data: Any = one.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        view = memoryview(data)
        if len(small) + len(view) <= _PIECE_BYTES:
            small += view
            continue
        yield memoryview(small)
        small = bytearray()
        for start in range(0, len(view), _PIECE_BYTES):
            yield view[start : start + _PIECE_BYTES]
    if small:
        yield memoryview(small)


def kept(steps: Sequence[int], keep: Keep, best: int | None) -> list[int]:
    """Return the steps whose checkpoints stay, out of all that have one, oldest first."""
    return [
        step
        for number, step in enumerate(steps)
        if number >= len(steps) - keep.last or step == best or keep.is_for_good(step)
    ]


def prune(run_dir: Path, keep: Keep) -> None:
    """Remove the checkpoints that `keep` does not ask for."""
    known, best = found(run_dir), read_best(run_dir)
    wanted = kept([step_of(one) for one in known], keep, best and best.step)
    for one in known:
        if step_of(one) not in wanted:
            shutil.rmtree(one, ignore_errors=True)


def note_best(run_dir: Path, candidate: Best) -> bool:
    """Record the candidate if it is better than the best so far, by the same metric. Return whether it is. Raises
    OSError."""
    before = read_best(run_dir)
    if before is not None and before.metric == candidate.metric and before.value >= candidate.value:
        return False
    write_whole(run_dir / FOLDER / _BEST, msgspec.json.encode(candidate))
    return True


def read_best(run_dir: Path) -> Best | None:
    """Return the best step. None if its record cannot be read, or its checkpoint is gone."""
    with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
        best = msgspec.json.decode((run_dir / FOLDER / _BEST).read_bytes(), type=Best)
        if is_there(run_dir, best.step):
            return best
    return None


def note_run(run_dir: Path, run: str) -> None:
    """Record the run's id. Raises OSError."""
    (run_dir / FOLDER).mkdir(parents=True, exist_ok=True)
    write_whole(run_dir / FOLDER / _RUN_ID, f"{run}\n".encode())


def check_run(run_dir: Path, state: TrainerState) -> None:
    """Raise UserError if a checkpoint does not belong to the run whose directory it is in."""
    path = run_dir / FOLDER / _RUN_ID
    ours = path.read_bytes().decode(errors="replace").strip() if path.exists() else ""
    if state.run != ours:
        folder = path.with_name(name_of(state.next_step))
        raise UserError(f"{folder}: is a checkpoint of another run: its id is not that in {path}")


def note_data_ended(run_dir: Path, step: int) -> None:
    """Record that there was no data left for this step. Raises OSError."""
    write_whole(run_dir / FOLDER / _DATA_ENDED, f"{step}\n".encode())


def has_data_ended(run_dir: Path, step: int) -> bool:
    """Return whether there is known to be no data for this step. If the file is lost, the run finds out again."""
    with contextlib.suppress(OSError, ValueError):
        return int((run_dir / FOLDER / _DATA_ENDED).read_bytes()) == step
    return False


def note_published(run_dir: Path, digests: Mapping[int, tuple[str, ...]]) -> None:
    """Record the digests that each version was published with, the newest last. A version has several if it came out
    differently when its steps were trained again. Raises OSError."""
    write_whole(run_dir / FOLDER / _PUBLISHED, _seal({str(version): one for version, one in digests.items()}))


def read_published(run_dir: Path) -> dict[int, tuple[str, ...]]:
    """Return the published digests by version; none before the first. Raises UserError."""
    path = run_dir / FOLDER / _PUBLISHED
    return _unseal(path, dict[int, tuple[str, ...]]) if path.exists() else {}


def is_there(run_dir: Path, step: int) -> bool:
    return (run_dir / FOLDER / name_of(step) / _STATE).is_file()


def found(run_dir: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first."""
    return [one for one in entries.found(run_dir / FOLDER) if (one / _STATE).is_file()]


def load(folder: Path, *, verify: bool = True) -> tuple[TrainerState, Mapping[str, Tensor]]:
    """Read and verify a checkpoint. Raises UserError if it is cut short, damaged, or not a checkpoint of ours.

    The tensors of one in shards are read when they are asked for. `verify`: false where rank zero has done it.
    """
    state = read_state(folder)
    for name, digest in state.files.items():
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path}: is missing; the checkpoint cannot be used")
        if verify and blake3.blake3(max_threads=blake3.blake3.AUTO).update_mmap(path).hexdigest() != digest:
            raise UserError(f"{path}: is damaged: its digest is not the one in {_STATE}; the checkpoint cannot be used")
    if not state.files:
        return state, {}
    try:
        if _TENSORS not in state.files:
            from polyrl.trainer.state.sharded import ShardedTensors

            return state, ShardedTensors(folder)
        return state, load_file(folder / _TENSORS)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / _TENSORS}: cannot be read: {error}") from error


def read_state(folder: Path) -> TrainerState:
    path = folder / _STATE
    state = _unseal(path, TrainerState)
    if state.format != _FORMAT:
        raise UserError(f"{path}: format {state.format}; this PolyRL reads format {_FORMAT}")
    return state


def _seal(value: Any) -> bytes:
    encoded = msgspec.json.encode(value)
    return msgspec.json.encode(_Sealed(digest_of(encoded), msgspec.Raw(encoded)))


def _unseal(path: Path, kind: type[T]) -> T:
    try:
        sealed = msgspec.json.decode(path.read_bytes(), type=_Sealed)
        if digest_of(bytes(sealed.state)) != sealed.digest:
            raise UserError(f"{path}: is damaged: its digest is another; put it back from a copy")
        return msgspec.json.decode(sealed.state, type=kind)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; expected a checkpoint of a PolyRL run") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a checkpoint of a PolyRL run: {error}") from error


def fingerprint(parameters: dict[str, Tensor]) -> str:
    """Return the digest of a model's tensor names and shapes."""
    facts: list[Any] = sorted((name, list(one.shape)) for name, one in parameters.items())
    return digest_of(msgspec.json.encode(facts))


def check_model(state: TrainerState, policy: "Policy", name: str) -> None:
    """Raise UserError if a checkpoint does not fit this model. `name` is the model's name in the message."""
    if state.fingerprint != fingerprint(policy.parameters()):
        raise UserError(f"the checkpoint is of another model than {name}: names or shapes of its tensors differ")
    if state.base != policy.base_fingerprint:
        raise UserError(f"the checkpoint holds changes to another model than {name}: its weights are not the same")


def digest_of(data: bytes) -> str:
    return blake3.blake3(data).hexdigest()
