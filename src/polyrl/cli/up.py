"""`polyrl up`: bring a run's fleet to a number of workers, through the provider of its recipe."""

import argparse
from pathlib import Path

EXAMPLE = """\
examples:
  polyrl up runs/first --workers 4
  polyrl up runs/first --workers 8 fleet.provider=slurm 'fleet.provider_args={ partition = "gpu" }'
  polyrl up runs/first --auto

While the trainer runs, it starts and ends the workers itself, and this command tells it how many. Without a trainer
this command starts them: they stay until `polyrl down`. Said again, it starts only what is missing. --auto gives the
number back to the recipe (fleet.workers), or to the autoscaler (scaling.enabled). docs/guides/providers.md"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN", help="the directory of a run of `polyrl train`")
    parser.add_argument("settings", nargs="*", metavar="section.key=value", help="changes to the recipe's [fleet]")
    parser.add_argument("--workers", type=int, metavar="N", help="how many there should be (default: fleet.workers)")
    parser.add_argument("--auto", action="store_true", help="as many as the run itself wants")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="how long to wait for them")


def run(args: argparse.Namespace) -> int:
    from polyrl.errors import UserError
    from polyrl.run import upping
    from polyrl.run.event_loop import run_loop
    from polyrl.run.keeping import MAX_WORKERS

    if args.auto and args.workers is not None:
        raise UserError("--auto: the run chooses the number; leave --workers out")
    if args.workers is not None and not 0 <= args.workers <= MAX_WORKERS:
        raise UserError(f"--workers: {args.workers}; expected 0 to {MAX_WORKERS}")
    if not 0 < args.timeout <= 86_400:
        raise UserError(f"--timeout: {args.timeout:g}; expected seconds above 0")
    wish = upping.Wish(Path(args.run_dir), args.settings, args.workers, args.auto, args.timeout)
    return run_loop(upping.bring_up(wish, lambda line: print(line, flush=True)))
