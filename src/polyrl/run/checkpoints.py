"""Save what a training run needs to resume, and read it back.

    RUN/recipe.toml      the recipe with every default and absolute paths: --resume reads it, from any folder
    RUN/port             where the manager listened: workers dial there again
    RUN/checkpoints/     trainer/state/checkpoint.py, trainer/state/redo.py

A run resumes from its newest checkpoint, the log of the steps since then, and the manager's journal. Log and journal
are never more than the open step apart: the manager counts a step as done only when it is on disk here.
"""

import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import blake3
from msgspec.structs import replace

from polyrl.config import build, load_toml
from polyrl.config.dump import dump_toml
from polyrl.config.places import with_local_places, with_whole_paths
from polyrl.config.plugins import look_in
from polyrl.config.recipe import Recipe
from polyrl.config.recipe_files import load_tree
from polyrl.data.tokens import TOKENIZER_FILES
from polyrl.disk import write_whole
from polyrl.errors import UserError
from polyrl.run.changes import begin_anew, check_changes
from polyrl.telemetry import metrics, validated
from polyrl.telemetry.breaks import Break
from polyrl.trainer.loop import why_enough
from polyrl.trainer.model import Policy
from polyrl.trainer.reports import StepReport
from polyrl.trainer.state import checkpoint, redo
from polyrl.trainer.state.checkpoint import Keep, TrainerState
from polyrl.trainer.state.redo import Entry
from polyrl.trainer.state.saving import Rules, Saver, Shards
from polyrl.trainer.step_stats import Steps
from polyrl.wire.control import RunReply

_RECIPE_FILE, _PORT_FILE = "recipe.toml", "port"
_WEIGHT_FILES = (".safetensors", ".bin")
_LOCK_FILE = "manager.lock"
_LOCK_PATIENCE_S = 15.0
_DIGESTS_KEPT = 16
"""The fewest digests kept: more than the open rounds can have versions."""


class ResumePoint(NamedTuple):
    """The state from which a run resumes."""

    folder: Path
    state: TrainerState
    tensors: Mapping[str, Any]
    """The tensors of the checkpoint. Empty before the first full one: then the run resumes from the recipe's models."""
    log: list[Entry]
    """The steps since the checkpoint."""
    published: dict[int, tuple[str, ...]]
    """The digests of the latest published versions, by version."""
    port: int
    last: StepReport | None = None
    """The report of the last step, if there was one. `is_told`: it has already been reported to the user."""
    is_told: bool = True
    breaks: tuple[Break, ...] = ()
    """The changed settings that make training differ from here on."""

    @property
    def next_step(self) -> int:
        return self.state.next_step + len(self.log)


def write_recipe(run_dir: Path, recipe: Recipe) -> None:
    """Write RUN/recipe.toml. Raises UserError if the disk refuses it; the earlier file is then unchanged."""
    path = run_dir / _RECIPE_FILE
    try:
        write_whole(path, dump_toml(with_whole_paths(recipe)).encode())
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}") from error


def read_recipe(run_dir: Path, overrides: list[str]) -> tuple[Recipe, Recipe]:
    """Return a run's recipe without and with overrides. Raises UserError if the run cannot resume with it."""
    path = run_dir / _RECIPE_FILE
    if not path.is_file():
        raise UserError(
            f"{run_dir}: no {_RECIPE_FILE} there; expected the directory of a run that `polyrl train` began"
        )
    tree = load_toml(path)
    before = with_whole_paths(build(tree, Recipe, source=str(path)))
    after = with_whole_paths(with_local_places(load_tree(tree, overrides, str(path)))) if overrides else before
    check_changes(before, after, run_dir)
    look_in(after.modules)
    return before, after


def read_resume_point(run_dir: Path) -> ResumePoint:
    """Read the newest checkpoint and the log after it. Raises UserError if there is none, or it cannot be used."""
    found = checkpoint.found(run_dir)
    if not found:
        raise UserError(
            f"{run_dir}: no checkpoint there to go on from: it was removed, or the run keeps none (checkpoint.enabled "
            f"= false); {begin_anew(run_dir, has_weights=False)}"
        )
    try:
        state, tensors = checkpoint.load(found[-1])
        checkpoint.check_run(run_dir, state)
    except UserError as error:
        raise UserError(f"{error}{_way_out(run_dir, found)}") from error
    try:
        port = int((run_dir / _PORT_FILE).read_text())
    except (OSError, ValueError):
        port = 0
    log = redo.read(run_dir, state.next_step)
    last_step = state.next_step + len(log) - 1
    report = redo.report_of(run_dir, last_step)
    last = StepReport.decode(report) if report else None
    is_told = last is None or _is_told(run_dir, last_step)
    return ResumePoint(found[-1], state, tensors, log, checkpoint.read_published(run_dir), port, last, is_told)


def has_begun(run_dir: Path) -> bool:
    """Return whether a run was begun here. A manager that could not listen leaves a journal without events."""
    return any((run_dir / "journal").glob("events-*"))


def keep_of(recipe: Recipe) -> Keep:
    wanted = recipe.checkpoint
    return Keep(wanted.keep_last, wanted.keep_every, int(recipe.track.samples_gb * (1 << 30)))


def _is_told(run_dir: Path, step: int) -> bool:
    told = run_dir / metrics.FILE_NAME
    return told.exists() and any(line["step"] == step for line in metrics.read_steps(told))


def check_that_something_is_left(point: ResumePoint, recipe: Recipe, run_dir: Path) -> None:
    """Check that a resumed run has steps left to train. Raises UserError."""
    num_steps = recipe.train.steps
    if point.next_step > num_steps:
        raise UserError(
            f"train.steps: got {num_steps}, and {point.next_step} steps of {run_dir} are trained already; expected more"
        )
    version = point.next_step
    if point.log or not point.is_told:  # of logged steps there is no checkpoint yet
        return
    if recipe.validation.is_due(version) and not metrics.read_validation(run_dir / metrics.FILE_NAME, version):
        return
    if point.last is not None and (why := why_enough(recipe.train, point.last)):
        raise UserError(f"train.stop_at_reward: the run in {run_dir} has ended: {why}; ask for more to go on")
    if version < num_steps:
        if checkpoint.has_data_ended(run_dir, version):
            raise UserError(
                f"data.num_epochs: the data of {run_dir} has ended, after {version} steps, and a run that goes on "
                f"cannot have more; {begin_anew(run_dir)}"
            )
        return
    raise UserError(
        f"train.steps: all {num_steps} steps of {run_dir} are trained; ask for more: train.steps={2 * num_steps}"
    )


def best_step(run_dir: Path, recipe: Recipe) -> int:
    """Return the step of the best checkpoint by checkpoint.keep_best. Raises UserError."""
    best = checkpoint.read_best(run_dir)
    if best is None:
        raise UserError(
            f"--best: {run_dir} has kept none; expected a run with checkpoint.keep_best, after its first validation"
        )
    if best.step == 0:
        raise UserError(
            f"--best: no step of {run_dir} has validated better than what it began with ({best.metric}: "
            f"{best.value:.3g}): that is {recipe.model.path}, as it is"
        )
    return best.step


def _way_out(run_dir: Path, found: list[Path]) -> str:
    """Return advice for a damaged checkpoint: the one before it will do where the log reaches back that far."""
    if len(found) < 2 or not redo.has(run_dir, checkpoint.step_of(found[-2])):
        return ""
    return f"; remove {found[-1]}, and --resume trains the steps since {found[-2].name} again"


def write_port(run_dir: Path, port: int) -> None:
    (run_dir / _PORT_FILE).write_text(f"{port}\n")


def wait_for_manager_to_end(run_dir: Path) -> None:
    """Wait for the manager of a killed trainer, which may still be closing its files."""
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


def describe(recipe: Recipe, policy: Policy, prompts: tuple[str, ...]) -> TrainerState:
    """Return the state of a new run, with the facts that must be the same on resume (`check_resume_point`)."""
    return TrainerState(
        next_step=0,
        run=secrets.token_hex(8),
        fingerprint=checkpoint.fingerprint(policy.parameters()),
        base=policy.base_fingerprint,
        tokenizer=tokenizer_digest(Path(recipe.model.path)),
        prompts=prompts,
        models=models_digest(recipe),
        reference=reference_digest(recipe),
    )


def make_saver(
    recipe: Recipe,
    run_dir: Path,
    about: TrainerState,
    gather: Callable[[], Iterable[tuple[str, Any]]],
    point: ResumePoint | None,
    shards: Shards | None = None,
) -> Saver:
    """Return a saver. `about` must be the same on resume; `gather` returns a checkpoint's unsharded tensors. `shards`:
    ranks write them instead, each its own."""
    wanted = recipe.checkpoint
    if point is not None:
        reference = reference_digest(recipe) or about.reference  # it may be measured against one from now on
        about = replace(about, next_step=point.next_step, reference=reference)
    validates_every = recipe.validation.every_steps if wanted.keep_best else 0
    return Saver(
        run_dir,
        about,
        Rules(wanted.every_steps, keep_of(recipe), validates_every),
        gather,
        newest=0 if point is None else point.state.next_step,
        num_steps=recipe.train.steps,
        metric=wanted.keep_best,
        digests_kept=max(_DIGESTS_KEPT, recipe.max_staleness + 2),
        shards=shards,
    )


async def train_again(point: ResumePoint, steps: Steps, saver: Saver, run_dir: Path) -> None:
    """Train the steps of the log again, and write the checkpoints that they lack. Raises UserError."""

    def note_validation(version: int) -> None:
        saver.validated(version, validated.read(run_dir, version))

    async def after(step: int) -> None:
        await saver.trained_again(step)
        note_validation(step + 1)

    note_validation(point.state.next_step)
    await redo.train_again(steps, point.log, lambda line: print(line, flush=True), after)


def check_that_it_fits(opened: RunReply, first_step: int, max_staleness: int) -> None:
    """Check that the manager and the log agree on the steps. Raises UserError.

    The manager knows each step before it is on disk here, and is ahead by at most the open step and the steps requested
    ahead. It knows of no run if the earlier process died just before it opened the run.
    """
    last = first_step + max_staleness
    is_ahead = opened.last_requested > last or any(step > last for step in opened.open_steps)
    is_behind = opened.last_requested < first_step - 1
    if is_behind or is_ahead or opened.published > first_step:
        theirs = max(opened.last_requested, opened.published)
        lost = (
            "power failed before the journal was written: remove what checkpoints/ has beyond it, and go on from there"
        )
        raise UserError(
            f"checkpoint and log go up to step {first_step}, and the manager's journal to step {theirs}: they are not "
            f"of one run, or {lost if is_behind else 'the newest were removed'}"
        )


def check_prompts(point: ResumePoint, recipe: Recipe, digests: tuple[str, ...], run_dir: Path) -> None:
    """Check that every prompt number still means the same prompt. Raises UserError."""
    for domain, before, now in zip(recipe.data.all_domains, point.state.prompts, digests, strict=False):
        if before != now:
            raise UserError(
                f"{domain.source}: its prompts are not those that {point.folder} was trained with, or not in their "
                f"order; put the file back, or {begin_anew(run_dir)}"
            )


def check_resume_point(point: ResumePoint, recipe: Recipe, policy: Policy) -> None:
    """Check that a checkpoint has the recipe's model, tokenizer and reference. Raises UserError."""
    path = recipe.model.path
    if point.state.tokenizer and point.state.tokenizer != tokenizer_digest(Path(path)):
        raise UserError(f"{path}: its tokenizer is not the one that {point.folder} was trained with; put that one back")
    checkpoint.check_model(point.state, policy, path)
    if point.state.models and point.state.models != models_digest(recipe):
        raise UserError(
            f"{path}: its files, or those of another model of the recipe, are not the ones that {point.folder} began "
            "with, and no weights are kept yet; put those back, or begin anew in another directory (--run-dir)"
        )
    reference = reference_digest(recipe)
    if point.state.reference and reference and point.state.reference != reference:
        raise UserError(
            f"{recipe.algorithm.reference or path}: its files are not those of the reference that {point.folder} was "
            "trained with; put those back, or name a copy of them in the run's recipe.toml: algorithm.reference"
        )


def tokenizer_digest(folder: Path) -> str:
    """Return the digest of the tokenizer's files."""
    return _digest_of_files(path for path in folder.iterdir() if path.name.startswith(TOKENIZER_FILES))


def models_digest(recipe: Recipe) -> str:
    """Return the digest of the files of all models that the run starts from."""
    algorithm = recipe.algorithm
    folders = {os.path.abspath(one) for one in (recipe.model.path, algorithm.critic.path, algorithm.reference) if one}
    return _digest_of_files(path for folder in folders for path in _model_files(folder))


def reference_digest(recipe: Recipe) -> str:
    """Return the digest of the reference's files; empty without KL, or where LoRA's own base is the reference."""
    algorithm = recipe.algorithm
    if algorithm.kl == "none" or (recipe.lora.rank and not algorithm.reference):
        return ""
    return _digest_of_files(_model_files(algorithm.reference or recipe.model.path))


def _model_files(folder: str) -> list[Path]:
    return [one for one in Path(folder).iterdir() if one.name == "config.json" or one.suffix in _WEIGHT_FILES]


def _digest_of_files(paths: Iterable[Path]) -> str:
    hashing = blake3.blake3(max_threads=blake3.blake3.AUTO)
    for path in sorted(paths):
        hashing.update(f"{path.name} {path.stat().st_size} ".encode())
        hashing.update_mmap(path)
    return hashing.hexdigest()
