"""Saving a training run's state after every step, and going on from it.

    RUN/recipe.toml      what was trained, with every default: what --resume reads
    RUN/port             where the manager listened: workers dial there again
    RUN/checkpoints/     trainer/checkpoint.py

A run goes on from its newest checkpoint and from the manager's journal. The two are never more than the open step
apart: a step is done for the manager only when it is on disk here.
"""

import asyncio
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from polyrl.client import Fleet
from polyrl.config import apply_overrides, build, load_toml
from polyrl.config.dump import dump_toml
from polyrl.config.recipe import Recipe
from polyrl.errors import UserError
from polyrl.trainer import checkpoint
from polyrl.trainer.checkpoint import Best, Keep, TrainerState
from polyrl.trainer.model import Policy

_RECIPE_FILE, _PORT_FILE = "recipe.toml", "port"
_TOKENIZER_FILES = ("tokenizer", "special_tokens", "vocab", "merges", "added_tokens", "chat_template")
_LOCK_FILE = "manager.lock"
_LOCK_PATIENCE_S = 15.0
_DIGESTS_KEPT = 16
"""At least: more than there can be versions in the open rounds."""
_FREE = (
    "train.steps",
    "train.stop_at_reward",
    "train.micro_batch_tokens",
    "train.mismatch_warning",
    "train.ranks",
    "optimizer.offload",
)
_FREE_SECTIONS = ("fleet", "manager", "weights", "track", "validation", "checkpoint", "about")
"""What may be another in a run that goes on. Everything else decides what is trained on, or how, or is part of what the
manager opened the run with (`scheduler_config`): its journal is replayed with that alone."""


class Past(NamedTuple):
    """What a run goes on from."""

    folder: Path
    state: TrainerState
    tensors: dict[str, Any]
    port: int


def write_recipe(run_dir: Path, recipe: Recipe) -> None:
    (run_dir / _RECIPE_FILE).write_text(dump_toml(recipe), encoding="utf-8")


def read_recipe(run_dir: Path, overrides: list[str]) -> Recipe:
    """The recipe of a run, with overrides. Raises UserError for one that the run cannot go on with."""
    path = run_dir / _RECIPE_FILE
    if not path.is_file():
        raise UserError(
            f"{run_dir}: no {_RECIPE_FILE} there; expected the directory of a run that `polyrl train` began"
        )
    tree = load_toml(path)
    before = build(tree, Recipe, source=str(path))
    after = build(apply_overrides(tree, overrides), Recipe, source=str(path))
    for key in _differences(msgspec.to_builtins(before), msgspec.to_builtins(after)):
        if key not in _FREE and key.partition(".")[0] not in _FREE_SECTIONS:
            raise UserError(
                f"{key}: cannot be changed in a run that goes on: its journal was written with what it was; begin anew"
            )
    return after


def _differences(before: Any, after: Any, path: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        keys = {**before, **after}
        return [
            one for key in keys for one in _differences(before.get(key), after.get(key), f"{path}.{key}".lstrip("."))
        ]
    return [] if before == after else [path]


def read_past(run_dir: Path) -> Past:
    """The newest checkpoint. Raises UserError if there is none, or it cannot be used."""
    found = checkpoint.found(run_dir)
    if not found:
        raise UserError(f"{run_dir}: no checkpoint there yet; the run must begin anew, in another directory")
    state, tensors = checkpoint.load(found[-1])
    try:
        port = int((run_dir / _PORT_FILE).read_text())
    except (OSError, ValueError):
        port = 0
    return Past(found[-1], state, tensors, port)


def write_port(run_dir: Path, port: int) -> None:
    (run_dir / _PORT_FILE).write_text(f"{port}\n")


def wait_for_manager_to_end(run_dir: Path) -> None:
    """A trainer that was killed leaves a manager that is still putting its files away."""
    try:
        descriptor = os.open(run_dir / _LOCK_FILE, os.O_RDWR)
    except OSError:
        return
    until = time.monotonic() + _LOCK_PATIENCE_S
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if time.monotonic() > until:
                    raise UserError(f"{run_dir}: another manager has this run; is it still being trained?") from error
                time.sleep(0.1)
    finally:
        os.close(descriptor)


class Saver:
    """Writes a checkpoint after every step."""

    def __init__(
        self, recipe: Recipe, run_dir: Path, policy: Policy, gather: Callable[[], dict[str, Any]], fleet: Fleet
    ) -> None:
        """`gather` gives all tensors of a checkpoint, whole."""
        wanted = recipe.checkpoint
        self._keep, self._metric = Keep(wanted.keep_last, wanted.keep_every), wanted.keep_best
        self._run_dir, self._tokenizer = run_dir, tokenizer_digest(Path(recipe.model.path))
        self._digests_kept = max(_DIGESTS_KEPT, recipe.max_staleness + 2)
        self._gather, self._fleet = gather, fleet
        self._fingerprint, self._base = checkpoint.fingerprint(policy.parameters()), policy.base_fingerprint

    async def save(self, next_step: int) -> None:
        """Raises UserError if the disk does not take it; the one before is still there."""
        newest = sorted(self._fleet.digests)[-self._digests_kept :]
        state = TrainerState(
            next_step=next_step,
            digests={version: self._fleet.digests[version] for version in newest},
            fingerprint=self._fingerprint,
            base=self._base,
            tokenizer=self._tokenizer,
        )
        try:
            await asyncio.to_thread(self._save, state)
        except OSError as error:
            raise UserError(
                f"{self._run_dir}: the checkpoint of step {next_step} cannot be written: {error.strerror or error}; "
                "the one before is whole: make room, and go on with --resume"
            ) from error

    def _save(self, state: TrainerState) -> None:
        checkpoint.save(self._run_dir, state, self._gather(), keep=self._keep)

    def validated(self, version: int, rates: Mapping[str, float]) -> None:
        """The newest checkpoint is of that version. Raises UserError if the disk does not take it."""
        if self._metric not in rates:
            return
        try:
            checkpoint.note_best(self._run_dir, Best(version, self._metric, rates[self._metric]))
        except OSError as error:
            raise UserError(
                f"{self._run_dir}: that version {version} is the best so far cannot be written: "
                f"{error.strerror or error}; make room, and go on with --resume"
            ) from error


def check_past(past: Past, recipe: Recipe, policy: Policy) -> None:
    """Raises UserError if a checkpoint is of another model, or of another tokenizer."""
    path = recipe.model.path
    if past.state.tokenizer and past.state.tokenizer != tokenizer_digest(Path(path)):
        raise UserError(f"{path}: its tokenizer is not the one that {past.folder} was trained with; put that one back")
    checkpoint.check_model(past.state, policy, path)


def tokenizer_digest(folder: Path) -> str:
    """Of all files that say what a text's tokens are."""
    hashing = hashlib.blake2b(digest_size=16)
    for path in sorted(folder.iterdir()):
        if path.name.startswith(_TOKENIZER_FILES):
            data = path.read_bytes()
            hashing.update(f"{path.name} {len(data)} ".encode() + data)
    return hashing.hexdigest()
