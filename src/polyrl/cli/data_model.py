"""`polyrl data model arithmetic`: the small model that the arithmetic recipe starts from."""

import argparse
import sys
import time
from pathlib import Path

from polyrl.cli import builtin
from polyrl.errors import UserError


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="model: of its weights and its lessons (default: 0)")


def run(args: argparse.Namespace) -> int:
    if args.what != "arithmetic":
        raise UserError(f"data model: got {args.what!r}, expected arithmetic")
    if args.seed < 0:
        raise UserError(f"--seed: got {args.seed}, expected 0 or more")
    builtin.check_libraries()
    folder = Path(args.out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: is there already, expected a new or an empty directory")
    from polyrl.config.recipe import ArithmeticTask
    from polyrl.trainer import warm_start

    began = time.monotonic()

    def show(step: int, loss: float) -> None:
        if sys.stderr.isatty():
            print(f"\rstep {step} of {warm_start.NUM_STEPS}, loss {loss:.3f}", end="", file=sys.stderr, flush=True)

    try:
        warm_start.make_model(folder, seed=args.seed, task=ArithmeticTask(), show=show)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror or error}") from error
    if sys.stderr.isatty():
        print(file=sys.stderr)
    print(f"{folder}: a model for the arithmetic task, in {time.monotonic() - began:.0f} s")
    return 0
