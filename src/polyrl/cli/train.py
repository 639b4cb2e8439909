"""`polyrl train`: make a model better, on whatever devices there are."""

import argparse
import contextlib
import logging
import os
import shlex
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from polyrl.run.event_loop import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from polyrl.config.recipe import Recipe
    from polyrl.run.checkpoints import ResumePoint
    from polyrl.run.ranks import OtherRanks
    from polyrl.run.training import Alongside
    from polyrl.trainer.leading import Learner

EXAMPLE = """\
examples:
  polyrl train arithmetic model.path=models/tiny train.steps=40
  polyrl train recipe.toml fleet.workers=2 train.mode=synchronous
  polyrl train recipe.toml --dry-run
  polyrl train --list
  polyrl train --resume runs/arithmetic train.steps=80
  polyrl train recipe.toml --ranks 4
  torchrun --nproc-per-node 4 -m polyrl train recipe.toml

A recipe is a TOML file, or the name of one that ships with PolyRL; docs/reference/recipes.md lists every key. The run's
directory holds journal, metrics and logs. Workers may join and leave at any time: the command for that is printed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("recipe", nargs="?", help="a TOML file, or a name of --list")
    parser.add_argument("settings", nargs="*", metavar="section.key=value", help="for example train.steps=40")
    parser.add_argument("--list", action="store_true", help="list the recipes that ship with PolyRL")
    parser.add_argument("--run-dir", metavar="DIR", help="where the run is kept (default: runs/NAME)")
    parser.add_argument("--resume", metavar="DIR", help="go on with the run of this directory, in place of a recipe")
    parser.add_argument("--ranks", type=int, metavar="N", help="processes that share the model: train.ranks=N")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved recipe and the plan, and stop")
    parser.add_argument("--quiet", action="store_true", help="log warnings only")


def run(args: argparse.Namespace) -> int:
    from polyrl.config import hub
    from polyrl.config.load import show_shipped
    from polyrl.config.recipe_files import list_recipes, load_recipe
    from polyrl.engines import registry
    from polyrl.errors import UserError

    if args.list:
        print(show_shipped(list_recipes()))
        return 0
    registry.check_libraries()
    from polyrl.run import ranks

    info = ranks.rank_info(os.environ)
    if info is not None and info.rank > 0:
        return 0 if args.dry_run else ranks.follow(info)
    overrides = list(args.settings)
    if args.ranks is not None:
        said = [one for one in overrides if one.partition("=")[0].strip() == "train.ranks"]
        if said:
            raise UserError(f"--ranks {args.ranks} and {said[-1]}: expected one of them")
        overrides.append(f"train.ranks={args.ranks}")
    if args.resume is not None:
        return _resume(args, overrides)
    if args.recipe is None:
        raise UserError("a recipe is missing: expected a TOML file, a name of `polyrl train --list`, or --resume DIR")
    recipe = ranks.with_ranks(partial(load_recipe, args.recipe), overrides, info)
    recipe = hub.with_local_places(recipe)
    run_dir = Path(recipe.run_dir if args.run_dir is None else args.run_dir)
    if args.dry_run:
        from polyrl.run.plan import fit, show_plan

        print(show_plan(fit(recipe), run_dir))
        return 0
    return conclude(run_dir, start(recipe, run_dir, quiet=args.quiet))


def _resume(args: argparse.Namespace, overrides: list[str]) -> int:
    from polyrl.errors import UserError
    from polyrl.run import checkpoints, ranks
    from polyrl.trainer.state import checkpoint
    from polyrl.trainer.state.saving import tidy

    if args.run_dir is not None or args.dry_run:
        raise UserError("--resume: goes on with the recipe and the directory of that run; leave the other option out")
    if args.recipe is not None:  # the first override was taken for one
        overrides.insert(0, args.recipe)
    run_dir = Path(args.resume)
    info = ranks.rank_info(os.environ)
    recipe = ranks.with_ranks(lambda given: checkpoints.read_recipe(run_dir, given)[1], overrides, info)
    before, _ = checkpoints.read_recipe(run_dir, [])
    checkpoints.wait_for_manager_to_end(run_dir)
    if not checkpoint.found(run_dir) and not checkpoints.has_begun(run_dir):  # killed before it had written more
        print(f"beginning with {run_dir}: nothing is trained there yet", flush=True)
        return conclude(run_dir, start(recipe, run_dir, quiet=args.quiet))
    past = checkpoints.read_resume_point(run_dir)
    with contextlib.suppress(OSError):  # whoever writes there next says what is wrong
        tidy(run_dir, checkpoints.keep_of(recipe))
    checkpoints.check_that_something_is_left(past, recipe, run_dir)
    print(f"going on with {run_dir} at step {past.next_step}", flush=True)
    return conclude(run_dir, start(recipe, run_dir, quiet=args.quiet, past=past, before=before))


def conclude(run_dir: Path, why: str | None) -> int:
    run = shlex.quote(str(run_dir))
    if why is None:
        from polyrl.trainer.state import checkpoint

        can_go_on = bool(checkpoint.found(run_dir))
        next_ = f"go on with `polyrl train --resume {run}`" if can_go_on else "there is no checkpoint to go on from"
        print(f"stopped; {next_}", flush=True)
        return EXIT_INTERRUPTED
    print(f"done: {why}; look at it with `polyrl plot {run}` and `polyrl ledger {run}`", flush=True)
    return 0


def start(
    recipe: "Recipe",
    run_dir: Path,
    *,
    quiet: bool = False,
    past: "ResumePoint | None" = None,
    before: "Recipe | None" = None,
    beside: "Alongside | None" = None,
) -> str | None:
    """Train to the end, and say why it ended; None if it was interrupted.

    `past`: what the run goes on from; `before`: the recipe that it had until now.
    """
    from polyrl.config.inert import inert
    from polyrl.run import checkpoints, models, processes, resuming, workers
    from polyrl.run.encryption import encryption
    from polyrl.run.event_loop import run_loop
    from polyrl.run.plan import fit
    from polyrl.run.plugins import check_plugins
    from polyrl.run.settings import weight_settings
    from polyrl.run.tasks import load_tasks
    from polyrl.run.training import Interrupted, train, until_interrupted
    from polyrl.telemetry.trackers import check_libraries
    from polyrl.weights import sender

    if past is None:
        _check_that_none_is_there(run_dir)
    models.check_device(recipe)
    recipe = fit(recipe)
    workers.check_settings(recipe)
    check_plugins(recipe)
    tls = encryption(recipe.manager)
    check_libraries(tensorboard=recipe.track.tensorboard, wandb=recipe.track.wandb)
    run_loop(processes.choose_port(recipe.manager, 0 if past is None else past.port))
    sender.check_that_it_can_listen(weight_settings(recipe))
    _warn_on_stderr()
    for line in inert(recipe.algorithm):
        logging.getLogger("polyrl.train").warning(line)
    tasks = load_tasks(recipe, run_dir / "logs" / "rewards.log")
    models.check_tokenizers(recipe)
    if past is not None:
        checkpoints.check_prompts(past, recipe, tasks.digests, run_dir)

    async def train_and_close(learner: "Learner", other_ranks: "OtherRanks | None", past: "ResumePoint | None") -> str:
        try:
            training = train(
                recipe, run_dir, learner, tasks, tls=tls, past=past, other_ranks=other_ranks, beside=beside
            )
            return await until_interrupted(training)
        finally:
            await tasks.close()

    try:
        with _logging_to(run_dir, logging.WARNING if quiet else logging.INFO):
            if past is not None and before is not None:
                past = _with_breaks(before, recipe, run_dir, past)
            with resuming.restored(recipe, run_dir, past) as (learner, other_ranks):
                return run_loop(train_and_close(learner, other_ranks, past))
    except Interrupted:
        return None


def _with_breaks(before: "Recipe", after: "Recipe", run_dir: Path, past: "ResumePoint") -> "ResumePoint":
    """What is trained otherwise from here on; steps that are in the log alone are finished as they were first."""
    from polyrl.errors import UserError
    from polyrl.run import changes, checkpoints, ranks
    from polyrl.run.plan import fit
    from polyrl.run.resuming import settle

    changed = tuple(changes.breaks(before, after, past.next_step)) if past.next_step else ()
    if changed and past.log:
        if ranks.rank_info(os.environ) is not None:
            raise UserError(
                f"{changed[0].key}: the last {len(past.log)} steps are in the log alone, and are first trained again "
                "as they were, which torchrun's ranks cannot do: use --ranks, or go on once without the change"
            )
        settle(fit(before), run_dir, past)
        past = checkpoints.read_resume_point(run_dir)
    return past._replace(breaks=changed)


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
def _logging_to(run_dir: Path, level: int) -> Iterator[None]:
    """Logs go into the run's directory, which is made. A start that is refused leaves nothing of it that is empty."""
    from polyrl.run import checkpoints

    folder = run_dir / "logs"
    missing = [one for one in (folder, *folder.parents) if not os.path.exists(one)]
    _make_folder(folder)
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
    """`folders`: the innermost first."""
    for file in files:
        if file.is_file() and not file.stat().st_size:
            file.unlink()
    for folder in folders:
        if any(folder.iterdir()):
            return
        folder.rmdir()


def _check_that_none_is_there(run_dir: Path) -> None:
    """Raises UserError. The manager of one that was killed may be about to write it down."""
    from polyrl.errors import UserError
    from polyrl.run import checkpoints
    from polyrl.trainer.state import checkpoint

    if not checkpoints.has_begun(run_dir):
        checkpoints.wait_for_manager_to_end(run_dir)
    if checkpoints.has_begun(run_dir):
        go_on = "go on with --resume, or " if checkpoint.found(run_dir) else ""  # some keep none
        raise UserError(f"{run_dir}: there is a run already; {go_on}name another with --run-dir")


def _make_folder(folder: Path) -> None:
    from polyrl.errors import UserError

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made: {error.strerror}") from error
