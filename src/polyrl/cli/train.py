"""`polyrl train`: train a model on the devices that are available."""

import argparse
import os
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from polyrl.run.event_loop import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from polyrl.config.recipe import Recipe
    from polyrl.run.resuming import Resumed

EXAMPLE = """\
examples:
  polyrl train arithmetic model.path=models/tiny train.steps=40
  polyrl train recipe.toml fleet.workers=2 train.mode=synchronous
  polyrl train recipe.toml --dry-run
  polyrl train --list
  polyrl train --resume runs/arithmetic train.steps=80
  polyrl train recipe.toml --ranks 4
  torchrun --nproc-per-node 4 -m polyrl train recipe.toml
  polyrl train recipe.toml --ranks 8 --nodes 2 --meet 10.0.0.1:29500      on the first of two machines
  polyrl train --nodes 2 --node 1 --meet 10.0.0.1:29500                   on the second
  polyrl train recipe.toml --ranks 8 --nodes 2 --on ray                   the second is one of Ray's

A recipe is a TOML file, or the name of one that ships with PolyRL; docs/reference/recipes.md lists every key. The run's
directory holds journal, metrics and logs. Workers may join and leave at any time: the command for that is printed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", help="a TOML file, or a name of --list")
    parser.add_argument("settings", nargs="*", metavar="section.key=value", help="for example train.steps=40")
    parser.add_argument("--list", action="store_true", help="list the recipes that ship with PolyRL")
    parser.add_argument("--run-dir", metavar="DIR", help="where the run is kept (default: runs/NAME)")
    parser.add_argument("--resume", metavar="DIR", help="go on with the run of this directory, in place of a recipe")
    parser.add_argument("--ranks", type=int, metavar="N", help="processes that share the model: train.ranks=N")
    parser.add_argument("--nodes", type=int, metavar="N", help="machines that the ranks are on, equally many on each")
    parser.add_argument("--node", type=int, metavar="K", help="this machine's number; 0 (default) runs the run")
    parser.add_argument("--meet", metavar="HOST:PORT", help="where the other machines reach the first one")
    parser.add_argument("--on", choices=["ray"], help="have the other machines of a cluster's scheduler")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved recipe and the plan, and stop")
    parser.add_argument("--quiet", action="store_true", help="log warnings only")


def run(args: argparse.Namespace) -> int:
    from polyrl.config.load import show_shipped
    from polyrl.config.recipe_files import list_recipes, load_recipe
    from polyrl.engines import registry
    from polyrl.errors import UserError

    if args.list:
        print(show_shipped(list_recipes()))
        return 0
    registry.check_libraries()
    from polyrl.run import going_on, nodes, ranks

    if args.on is not None and not args.dry_run:
        return _run_on_ray(args)
    wanted = nodes.of_options(args.nodes, args.node, args.meet, os.environ)
    if wanted is not None and wanted.number > 0:
        return 0 if args.dry_run else nodes.lend(wanted)
    nodes.remember(wanted)
    info = ranks.rank_info(os.environ)
    if info is not None and info.rank > 0:
        return 0 if args.dry_run else ranks.follow(info)
    overrides = _overrides(args)
    if args.resume is not None:
        return _resume(args, overrides)
    if args.recipe is None:
        raise UserError("a recipe is missing: expected a TOML file, a name of `polyrl train --list`, or --resume DIR")
    recipe = ranks.with_ranks(partial(load_recipe, args.recipe), overrides, info)
    run_dir = Path(recipe.run_dir if args.run_dir is None else args.run_dir)
    if going_on.is_restarted(os.environ) and _has_begun(run_dir):
        args.resume, args.run_dir, args.recipe = str(run_dir), None, None
        return _resume(args, overrides)
    if args.dry_run:
        from polyrl.run.plan import fit, show_plan

        print(show_plan(fit(recipe), run_dir))
        return 0
    return _train(recipe, run_dir, args)


def _run_on_ray(args: argparse.Namespace) -> int:
    from polyrl.config import apply_overrides, build, load_toml
    from polyrl.config.recipe import Recipe
    from polyrl.config.recipe_files import load_recipe
    from polyrl.engines.builtin.config import choose_device
    from polyrl.errors import UserError
    from polyrl.run import nodes, ray_nodes

    if args.node is not None or args.nodes is None:
        raise UserError("--on ray: expected --nodes N, how many machines, and no --node, which it chooses itself")
    overrides, names = _overrides(args), [one for one in (args.recipe, *args.settings) if one is not None]
    if args.resume is not None:
        file = Path(args.resume) / "recipe.toml"
        recipe = build(apply_overrides(load_toml(file), [*names, *overrides[len(args.settings) :]]), Recipe)
    elif args.recipe is not None:
        recipe = load_recipe(args.recipe, overrides)
    else:
        raise UserError("a recipe is missing: expected a TOML file, a name of `polyrl train --list`, or --resume DIR")
    nodes.of_options(args.nodes, 0, args.meet or "here:1", {})
    if recipe.train.ranks % args.nodes:
        raise UserError(f"train.ranks: {recipe.train.ranks} on {args.nodes} nodes; expected a multiple of that")
    on_gpus = choose_device(recipe.model.device).startswith("cuda")
    wanted = ray_nodes.RayNodes(args.nodes, recipe.train.ranks // args.nodes, on_gpus, args.meet)
    given = {"--run-dir": args.run_dir, "--resume": args.resume, "--ranks": args.ranks}
    options = [str(word) for name, value in given.items() if value is not None for word in (name, value)]
    return ray_nodes.run_on_ray(wanted, [*names, *options, *(["--quiet"] if args.quiet else [])])


def _has_begun(run_dir: Path) -> bool:
    from polyrl.trainer.state import checkpoint

    return bool(checkpoint.found(run_dir))


def _overrides(args: argparse.Namespace) -> list[str]:
    from polyrl.errors import UserError

    overrides = list(args.settings)
    if args.ranks is not None:
        said = [one for one in overrides if one.partition("=")[0].strip() == "train.ranks"]
        if said:
            raise UserError(f"--ranks {args.ranks} and {said[-1]}: expected one of them")
        overrides.append(f"train.ranks={args.ranks}")
    return overrides


def _resume(args: argparse.Namespace, overrides: list[str]) -> int:
    from polyrl.errors import UserError
    from polyrl.run import resuming

    if args.run_dir is not None or args.dry_run:
        raise UserError("--resume: goes on with the recipe and the directory of that run; leave the other option out")
    if args.recipe is not None:  # the first override was taken for one
        overrides.insert(0, args.recipe)
    run_dir = Path(args.resume)
    resumed = resuming.reopen(run_dir, overrides)
    if resumed.point is None:
        print(f"beginning with {run_dir}: nothing is trained there yet", flush=True)
    else:
        print(f"going on with {run_dir} at step {resumed.point.next_step}", flush=True)
    return _train(resumed.recipe, run_dir, args, resumed)


def _train(recipe: "Recipe", run_dir: Path, args: argparse.Namespace, resumed: "Resumed | None" = None) -> int:
    from polyrl.errors import RankLost
    from polyrl.run import going_on, nodes
    from polyrl.run.supervising import Interrupted
    from polyrl.run.training import train

    nodes.check_ranks(os.environ, recipe.train.ranks)
    try:
        return conclude(run_dir, train(recipe, run_dir, resumed=resumed, quiet=args.quiet))
    except Interrupted:
        return conclude(run_dir, None)
    except RankLost as lost:
        overrides = [] if resumed is None else _overrides(args)
        going_on.go_on(lost, run_dir, overrides, recipe.train.restarts, quiet=args.quiet)
        raise


def conclude(run_dir: Path, why: str | None) -> int:
    """Say how a run ended, and what can be done next. `why` is None after an interrupt."""
    run = shlex.quote(str(run_dir))
    if why is None:
        from polyrl.trainer.state import checkpoint

        can_go_on = bool(checkpoint.found(run_dir))
        next_ = f"go on with `polyrl train --resume {run}`" if can_go_on else "there is no checkpoint to go on from"
        print(f"stopped; {next_}", flush=True)
        return EXIT_INTERRUPTED
    print(f"done: {why}; look at it with `polyrl plot {run}` and `polyrl ledger {run}`", flush=True)
    return 0
