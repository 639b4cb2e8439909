"""Check a run before anything is started: nothing is written, no model is loaded.

A run calls `check`; `polyrl train --dry-run` makes the checks that need no port and no run directory (plan.py).
Logs go into the run's directory, which `logging_to` makes.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from polyrl.config.inert import inert
from polyrl.config.recipe import Recipe
from polyrl.errors import UserError
from polyrl.run import checkpoints, hosts, keeping, models, processes, reward_workers, workers
from polyrl.run.checkpoints import ResumePoint
from polyrl.run.encryption import Encryption, encryption
from polyrl.run.event_loop import run_loop
from polyrl.run.plan import fit
from polyrl.run.plugins import check_plugins
from polyrl.run.settings import weight_settings
from polyrl.run.tasks import RecipeTasks, load_tasks
from polyrl.telemetry.trackers import check_libraries
from polyrl.trainer.state import checkpoint
from polyrl.weights import sender


class Checked(NamedTuple):
    """A recipe with every default filled in, and the parts that were opened to check it."""

    recipe: Recipe
    tls: Encryption | None
    tasks: RecipeTasks


def check(recipe: Recipe, run_dir: Path, point: ResumePoint | None) -> Checked:
    """Check that a run can begin, or resume at `point`. Raises UserError."""
    if point is None:
        _check_that_none_is_there(run_dir)
    models.check_device(recipe)
    check_plugins(recipe)
    recipe = fit(recipe)
    workers.check_settings(recipe)
    keeping.check_provider(recipe, run_dir)
    reward_workers.check(recipe)
    if point is None:  # a run that is resumed has the number of its tasks already
        recipe = hosts.check(recipe)
    tls = encryption(recipe.manager)
    check_libraries(tensorboard=recipe.track.tensorboard, wandb=recipe.track.wandb)
    run_loop(processes.choose_port(recipe.manager, 0 if point is None else point.port))
    sender.check_that_it_can_listen(weight_settings(recipe))
    _warn_on_stderr()
    for line in inert(recipe.algorithm):
        logging.getLogger("polyrl.train").warning(line)
    tasks = load_tasks(recipe, run_dir)
    models.check_tokenizers(recipe)
    if point is not None:
        checkpoints.check_prompts(point, recipe, tasks.digests, run_dir)
    return Checked(recipe, tls, tasks)


def _check_that_none_is_there(run_dir: Path) -> None:
    """Raises UserError. The manager of a run that was killed may be about to write it down."""
    if not checkpoints.has_begun(run_dir):
        checkpoints.wait_for_manager_to_end(run_dir)
    if checkpoints.has_begun(run_dir):
        go_on = "go on with --resume, or " if checkpoint.found(run_dir) else ""  # some keep none
        raise UserError(f"{run_dir}: there is a run already; {go_on}name another with --run-dir")


class _Stderr(logging.Handler):
    """Looks stderr up for every line: while there is a display, lines go above it, not through it."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


def _warn_on_stderr() -> None:
    console = _Stderr()
    console.setLevel(logging.WARNING)
    console.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logging.getLogger().addHandler(console)


@contextlib.contextmanager
def logging_to(run_dir: Path, level: int) -> Iterator[None]:
    """Log into the run's directory, which is made. A start that is refused leaves nothing of it that is empty."""
    folder = run_dir / "logs"
    missing = [one for one in (folder, *folder.parents) if not os.path.exists(one)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made: {error.strerror}") from error
    before = set(folder.iterdir())
    file = logging.FileHandler(folder / "train.log")
    file.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
    logging.getLogger().addHandler(file)
    logging.getLogger().setLevel(level)
    try:
        yield
    except BaseException:
        logging.getLogger().removeHandler(file)
        file.close()
        with contextlib.suppress(OSError):  # why it was refused is what counts
            if not checkpoints.has_begun(run_dir):
                _remove_what_is_empty(set(folder.iterdir()) - before, missing)
        raise


def _remove_what_is_empty(files: Iterable[Path], folders: Iterable[Path]) -> None:
    """Remove empty folders, given the innermost first."""
    for file in files:
        if file.is_file() and not file.stat().st_size:
            file.unlink()
    for folder in folders:
        if any(folder.iterdir()):
            return
        folder.rmdir()
