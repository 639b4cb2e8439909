"""`polyrl train`: make a model better, on whatever devices there are."""

import argparse
import asyncio
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyrl.cli.training.run import Beside
    from polyrl.config.recipe import Recipe

EXAMPLE = """\
examples:
  polyrl train arithmetic model.path=models/tiny train.steps=40
  polyrl train recipe.toml fleet.workers=2 train.mode=synchronous
  polyrl train recipe.toml --dry-run

A recipe is a TOML file, or the name of one that ships with PolyRL; docs/reference/recipes.md lists every key. The run's
directory holds journal, metrics and logs. Workers may join and leave at any time: the command for that is printed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("recipe", help="a TOML file, or the name of a recipe that ships with PolyRL")
    parser.add_argument("settings", nargs="*", metavar="section.key=value", help="for example train.steps=40")
    parser.add_argument("--run-dir", metavar="DIR", help="where the run is kept (default: runs/NAME)")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved recipe and the plan, and stop")
    parser.add_argument("--quiet", action="store_true", help="log warnings only")


def run(args: argparse.Namespace) -> int:
    from polyrl.cli import builtin
    from polyrl.config.recipe_files import load_recipe

    overrides = list(args.settings)
    recipe = load_recipe(args.recipe, overrides)
    run_dir = Path(recipe.run_dir if args.run_dir is None else args.run_dir)
    builtin.check_libraries()
    if args.dry_run:
        from polyrl.cli.training.plan import show_plan

        print(show_plan(recipe, run_dir))
        return 0
    why = start(recipe, run_dir, quiet=args.quiet)
    if why is None:
        print(f"stopped; what was trained is in {run_dir}", flush=True)
        return 130
    print(f"done: {why}; look at it with `polyrl plot {run_dir}` and `polyrl ledger {run_dir}`", flush=True)
    return 0


def start(recipe: "Recipe", run_dir: Path, *, quiet: bool = False, beside: "Beside | None" = None) -> str | None:
    """Train to the end, and say why it ended; None if it was interrupted."""
    from polyrl.cli.loop import run_loop
    from polyrl.cli.training import models
    from polyrl.cli.training.run import Interrupted, train, until_interrupted
    from polyrl.cli.training.tasks import load_tasks
    from polyrl.errors import UserError

    if (run_dir / "journal").exists():
        raise UserError(f"{run_dir}: there is a run already; name another directory with --run-dir, or remove it")
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    level = logging.WARNING if quiet else logging.INFO
    logging.basicConfig(level=level, format="%(asctime)s %(name)s %(message)s", filename=run_dir / "logs" / "train.log")
    console = logging.StreamHandler(sys.stderr)
    console.setLevel(logging.WARNING)
    console.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logging.getLogger().addHandler(console)
    tasks = load_tasks(recipe)
    policy, reference = models.load(recipe)
    critic = models.load_critic(recipe)

    async def train_and_close() -> str:
        training = asyncio.ensure_future(
            until_interrupted(train(recipe, run_dir, policy, reference, tasks, critic=critic, beside=beside))
        )
        watching = asyncio.ensure_future(tasks.hopeless())
        try:
            await asyncio.wait((training, watching), return_when=asyncio.FIRST_COMPLETED)
            return await (training if training.done() else watching)
        finally:
            for task in (training, watching):
                task.cancel()
            await asyncio.gather(training, watching, return_exceptions=True)
            await tasks.close()

    try:
        return run_loop(train_and_close())
    except Interrupted:
        return None
