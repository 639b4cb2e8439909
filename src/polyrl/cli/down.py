"""`polyrl down`: end all workers that a run's provider has."""

import argparse
from pathlib import Path

EXAMPLE = """\
example:
  polyrl down runs/first

Workers hand their samples over and leave; the run goes on without them. Said again, it finds nothing to end. `polyrl
up` brings them back."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN", help="the directory of a run of `polyrl train`")
    parser.add_argument("settings", nargs="*", metavar="section.key=value", help="changes to the recipe's [fleet]")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="how long to wait for their ends")


def run(args: argparse.Namespace) -> int:
    from polyrl.errors import UserError
    from polyrl.run import upping
    from polyrl.run.event_loop import run_loop

    if not 0 < args.timeout <= 86_400:
        raise UserError(f"--timeout: {args.timeout:g}; expected seconds above 0")
    wish = upping.Wish(Path(args.run_dir), args.settings, 0, is_auto=False, timeout_s=args.timeout)
    return run_loop(upping.take_down(wish, lambda line: print(line, flush=True)))
