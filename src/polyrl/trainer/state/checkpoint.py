"""Checkpoints: everything that the trainer alone knows, on disk, whole or not at all.

    RUN/checkpoints/step-000012/     state.json              the next step, and the digest of the other file
                                     optimizer.safetensors   float32 weights and both moments; none before step 0
    RUN/checkpoints/redo/            what the steps since then were trained on (redo.py)
    RUN/checkpoints/published.json   the digests of the versions published last
    RUN/checkpoints/best.json        which step validated best so far
    RUN/checkpoints/data-ended       the step that there was no data for, once that is known
    RUN/checkpoints/run-id           whose all that is

Data order, deferred prompts, the open round and the ledger are in the manager's journal, and are not repeated here.

Rules kept here: a checkpoint is written beside the others under another name, flushed, and then renamed: killed at any
moment, the last one is whole. It is verified when it is read. A disk that is full leaves the old ones usable. Old ones
go by rule (`Keep`), after the new one is there.
"""

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
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
    """Somebody has no use for it any more."""


class TrainerState(Struct, frozen=True, kw_only=True):
    """What is not tensors."""

    next_step: int
    run: str = ""
    """Drawn when the run began: of the weights of another one its journal knows nothing."""
    fingerprint: str = ""
    """Of what is trained: its tensors' names and shapes."""
    base: str = ""
    """Of LoRA: the fingerprint of the weights that are changed. They are not in the checkpoint."""
    tokenizer: str = ""
    """Of the tokenizer's files."""
    prompts: tuple[str, ...] = ()
    """Of each domain's prompts, in their order: the journal knows them by number."""
    models: str = ""
    """Of the files of all models that the run began with, where they are what it goes on from: before step 0."""
    reference: str = ""
    """Of the files of the model that KL is measured against, where it is: no checkpoint holds its weights."""
    files: dict[str, str] = {}
    format: int = _FORMAT


class Keep(NamedTuple):
    """Which checkpoints stay: the `last` ones, those of every so many steps, and the best. And so many bytes of what
    older steps were trained on."""

    last: int = 2
    every: int | None = None
    samples_bytes: int = entries.DEFAULT_SAMPLES_BYTES

    def is_for_good(self, step: int) -> bool:
        return bool(self.every and step and step % self.every == 0)


class Best(Struct, frozen=True):
    """The checkpoint that did best."""

    step: int
    metric: str
    value: float


class _Sealed(Struct, frozen=True):
    digest: str
    state: msgspec.Raw


def save(
    run_dir: Path, state: TrainerState, tensors: Mapping[str, Tensor], *, stop: threading.Event | None = None
) -> Path:
    """Write a checkpoint. `tensors` are in this machine's memory, if any.

    Raises OSError, or Stopped when `stop` is set before all is written; the old ones are whole then.
    """
    folder = run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for rest in folder.glob(".step-*"):  # of a process that was killed
        shutil.rmtree(rest, ignore_errors=True)
    final = folder / name_of(state.next_step)
    fresh = folder / f".{final.name}"
    fresh.mkdir()
    try:
        if tensors:
            digest = _write_tensors(fresh / _TENSORS, tensors, stop)
            state = msgspec.structs.replace(state, files={_TENSORS: digest})
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


def _write_tensors(path: Path, tensors: Mapping[str, Tensor], stop: threading.Event | None) -> str:
    """In safetensors' format, whose own writer makes a second copy of everything. Returns the file's digest."""
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))  # so that each is aligned
    specs = (Spec(name, str(one.dtype).removeprefix("torch."), tuple(one.shape)) for name, one in ordered.items())
    hashing = blake3.blake3()
    with path.open("wb", buffering=0) as file:
        for piece in _pieces(header_of(specs), ordered):
            if stop is not None and stop.is_set():
                raise Stopped
            hashing.update(piece)
            rest = piece
            while rest:
                rest = rest[file.write(rest) :]
            # Gigabytes that wait in memory for the disk would have the log's few, which a step waits for, wait too.
            os.fdatasync(file.fileno())
    return hashing.hexdigest()


def _pieces(beginning: bytes, tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """At most so large that a disk has each in a moment. Small tensors are sent together."""
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
    """Of all steps that have a checkpoint, in order, those whose checkpoint stays."""
    return [
        step
        for number, step in enumerate(steps)
        if number >= len(steps) - keep.last or step == best or keep.is_for_good(step)
    ]


def prune(run_dir: Path, keep: Keep) -> None:
    """Let go of those no longer wanted."""
    known, best = found(run_dir), read_best(run_dir)
    wanted = kept([step_of(one) for one in known], keep, best and best.step)
    for one in known:
        if step_of(one) not in wanted:
            shutil.rmtree(one, ignore_errors=True)


def note_best(run_dir: Path, candidate: Best) -> bool:
    """Whether it is better than all before, by the same metric. It stays then. Raises OSError."""
    before = read_best(run_dir)
    if before is not None and before.metric == candidate.metric and before.value >= candidate.value:
        return False
    write_whole(run_dir / FOLDER / _BEST, msgspec.json.encode(candidate))
    return True


def read_best(run_dir: Path) -> Best | None:
    """None where there is none that can be read, or its checkpoint is gone."""
    with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
        best = msgspec.json.decode((run_dir / FOLDER / _BEST).read_bytes(), type=Best)
        if is_there(run_dir, best.step):
            return best
    return None


def note_run(run_dir: Path, run: str) -> None:
    """Raises OSError."""
    (run_dir / FOLDER).mkdir(parents=True, exist_ok=True)
    write_whole(run_dir / FOLDER / _RUN_ID, f"{run}\n".encode())


def check_run(run_dir: Path, state: TrainerState) -> None:
    """Raises UserError if a checkpoint is not of the run whose directory it is in."""
    path = run_dir / FOLDER / _RUN_ID
    ours = path.read_bytes().decode(errors="replace").strip() if path.exists() else ""
    if state.run != ours:
        folder = path.with_name(name_of(state.next_step))
        raise UserError(f"{folder}: is a checkpoint of another run: its id is not that in {path}")


def note_data_ended(run_dir: Path, step: int) -> None:
    """There was nothing left to train this step on. Raises OSError."""
    write_whole(run_dir / FOLDER / _DATA_ENDED, f"{step}\n".encode())


def has_data_ended(run_dir: Path, step: int) -> bool:
    """Whether this step is known to have none; who has lost that file finds out again."""
    with contextlib.suppress(OSError, ValueError):
        return int((run_dir / FOLDER / _DATA_ENDED).read_bytes()) == step
    return False


def note_published(run_dir: Path, digests: Mapping[int, tuple[str, ...]]) -> None:
    """All that each version was published as, the newest last: more than one if it came out otherwise when its steps
    were trained again. Raises OSError.
    """
    write_whole(run_dir / FOLDER / _PUBLISHED, _seal({str(version): one for version, one in digests.items()}))


def read_published(run_dir: Path) -> dict[int, tuple[str, ...]]:
    """Empty before the first version is published. Raises UserError."""
    path = run_dir / FOLDER / _PUBLISHED
    return _unseal(path, dict[int, tuple[str, ...]]) if path.exists() else {}


def is_there(run_dir: Path, step: int) -> bool:
    return (run_dir / FOLDER / name_of(step) / _STATE).is_file()


def found(run_dir: Path) -> list[Path]:
    """Those that were finished, oldest first."""
    return [one for one in entries.found(run_dir / FOLDER) if (one / _STATE).is_file()]


def load(folder: Path) -> tuple[TrainerState, dict[str, Tensor]]:
    """A checkpoint, verified. Raises UserError for one that is cut short, damaged, or none of ours."""
    state = read_state(folder)
    for name, digest in state.files.items():
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path}: is missing; the checkpoint cannot be used")
        if blake3.blake3(max_threads=blake3.blake3.AUTO).update_mmap(path).hexdigest() != digest:
            raise UserError(f"{path}: is damaged: its digest is not the one in {_STATE}; the checkpoint cannot be used")
    if not state.files:
        return state, {}
    try:
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
    """Of a model's shape."""
    facts: list[Any] = sorted((name, list(one.shape)) for name, one in parameters.items())
    return digest_of(msgspec.json.encode(facts))


def check_model(state: TrainerState, policy: "Policy", name: str) -> None:
    """Raises UserError where a checkpoint is not of this model, which is said to be that of `name`."""
    if state.fingerprint != fingerprint(policy.parameters()):
        raise UserError(f"the checkpoint is of another model than {name}: names or shapes of its tensors differ")
    if state.base != policy.base_fingerprint:
        raise UserError(f"the checkpoint holds changes to another model than {name}: its weights are not the same")


def digest_of(data: bytes) -> str:
    return blake3.blake3(data).hexdigest()
