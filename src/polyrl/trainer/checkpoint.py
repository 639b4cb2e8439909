"""Checkpoints: everything that the trainer alone knows, on disk, whole or not at all.

    RUN/checkpoints/step-000012/   state.json              the next step, digests of versions and of the other file
                                   optimizer.safetensors   float32 weights and both moments
    RUN/checkpoints/best.json      which step validated best so far

Data order, deferred prompts, the open round and the ledger are in the manager's journal, and are not repeated here.

Rules kept here: a checkpoint is written beside the others under another name, flushed, and then renamed: killed at any
moment, the last one is whole. It is verified when it is read. A disk that is full leaves the old ones usable. Old ones
go by rule (`Keep`), after the new one is there.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
from msgspec import Struct
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from polyrl.errors import UserError

if TYPE_CHECKING:
    from polyrl.trainer.model import Policy

FOLDER = "checkpoints"
_STATE = "state.json"
_TENSORS = "optimizer.safetensors"
_BEST = "best.json"
_FORMAT = 1
_BLOCK_BYTES = 1 << 22

Tensor = torch.Tensor


class TrainerState(Struct, frozen=True, kw_only=True):
    """What is not tensors."""

    next_step: int
    digests: dict[int, str]
    """Of the versions published so far that a sample may still be written with."""
    fingerprint: str = ""
    """Of what is trained: its tensors' names and shapes."""
    base: str = ""
    """Of LoRA: the fingerprint of the weights that are changed. They are not in the checkpoint."""
    tokenizer: str = ""
    """Of the tokenizer's files."""
    files: dict[str, str] = {}
    format: int = _FORMAT


class Keep(NamedTuple):
    """Which checkpoints stay: the `last` ones, those of every so many steps, and the best."""

    last: int = 2
    every: int | None = None


KEEP = Keep()


class Best(Struct, frozen=True):
    """The checkpoint that did best."""

    step: int
    metric: str
    value: float


class _Sealed(Struct, frozen=True):
    digest: str
    state: msgspec.Raw


def save(run_dir: Path, state: TrainerState, tensors: dict[str, Tensor], *, keep: Keep = KEEP) -> Path:
    """Write a checkpoint, and let go of those no longer wanted. Raises OSError; the old ones are whole then."""
    folder = run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / name_of(state.next_step)
    fresh = folder / f".{final.name}"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        save_file({name: one.detach().cpu().contiguous() for name, one in tensors.items()}, fresh / _TENSORS)
        state = msgspec.structs.replace(state, files={_TENSORS: _digest(fresh / _TENSORS)})
        encoded = msgspec.json.encode(state)
        (fresh / _STATE).write_bytes(msgspec.json.encode(_Sealed(_digest_of(encoded), msgspec.Raw(encoded))))
        for path in (fresh / _TENSORS, fresh / _STATE, fresh):
            _sync(path)
        if final.exists():
            shutil.rmtree(final)
        fresh.rename(final)
        _sync(folder)
    except SafetensorError as error:
        shutil.rmtree(fresh, ignore_errors=True)
        raise OSError(f"{fresh}: {error}") from error
    except OSError:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    _prune(run_dir, keep)
    return final


def kept(steps: Sequence[int], keep: Keep, best: int | None) -> list[int]:
    """Of all steps that have a checkpoint, in order, those whose checkpoint stays."""
    return [
        step
        for number, step in enumerate(steps)
        if number >= len(steps) - keep.last or step == best or (keep.every and step and step % keep.every == 0)
    ]


def _prune(run_dir: Path, keep: Keep) -> None:
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
    path = run_dir / FOLDER / _BEST
    fresh = path.with_name(f".{_BEST}")
    fresh.write_bytes(msgspec.json.encode(candidate))
    _sync(fresh)
    fresh.rename(path)
    _sync(path.parent)
    return True


def read_best(run_dir: Path) -> Best | None:
    """None where there is none that can be read, or its checkpoint is gone."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        best = msgspec.json.decode((run_dir / FOLDER / _BEST).read_bytes(), type=Best)
        if (run_dir / FOLDER / name_of(best.step) / _STATE).is_file():
            return best
    return None


def name_of(step: int) -> str:
    return f"step-{step:06}"


def step_of(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def found(run_dir: Path) -> list[Path]:
    """Those that were finished, oldest first."""
    steps = [one for one in (run_dir / FOLDER).glob("step-*") if _is_ours(one)]
    return sorted(steps, key=step_of)


def _is_ours(folder: Path) -> bool:
    return folder.name.removeprefix("step-").isdecimal() and (folder / _STATE).is_file()


def load(folder: Path) -> tuple[TrainerState, dict[str, Tensor]]:
    """A checkpoint, verified. Raises UserError for one that is cut short, damaged, or none of ours."""
    state = read_state(folder)
    for name, digest in state.files.items():
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path}: is missing; the checkpoint cannot be used")
        if _digest(path) != digest:
            raise UserError(f"{path}: is damaged: its digest is not the one in {_STATE}; the checkpoint cannot be used")
    try:
        return state, load_file(folder / _TENSORS)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / _TENSORS}: cannot be read: {error}") from error


def read_state(folder: Path) -> TrainerState:
    path = folder / _STATE
    try:
        sealed = msgspec.json.decode(path.read_bytes(), type=_Sealed)
        if _digest_of(bytes(sealed.state)) != sealed.digest:
            raise UserError(f"{path}: is damaged: its digest is another; the checkpoint cannot be used")
        state = msgspec.json.decode(sealed.state, type=TrainerState)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; expected a checkpoint of a PolyRL run") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a checkpoint of a PolyRL run: {error}") from error
    if state.format != _FORMAT:
        raise UserError(f"{path}: format {state.format}; this PolyRL reads format {_FORMAT}")
    return state


def fingerprint(parameters: dict[str, Tensor]) -> str:
    """Of a model's shape."""
    facts: list[Any] = sorted((name, list(one.shape)) for name, one in parameters.items())
    return hashlib.blake2b(msgspec.json.encode(facts), digest_size=16).hexdigest()


def check_model(state: TrainerState, policy: "Policy", name: str) -> None:
    """Raises UserError where a checkpoint is not of this model, which is said to be that of `name`."""
    if state.fingerprint != fingerprint(policy.parameters()):
        raise UserError(f"the checkpoint is of another model than {name}: names or shapes of its tensors differ")
    if state.base != policy.base_fingerprint:
        raise UserError(f"the checkpoint holds changes to another model than {name}: its weights are not the same")


def _digest(path: Path) -> str:
    hashing = hashlib.blake2b(digest_size=32)
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            hashing.update(block)
    return hashing.hexdigest()


def _digest_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=32).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
