"""`polyrl data prepare|model WHAT --out PATH`: make what a run starts from, prompts or a small model."""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from polyrl.cli.parser import Actions, CliAction, add_action
from polyrl.config.places import STARTERS
from polyrl.errors import UserError

ACTIONS: Actions = {
    "prepare": CliAction("openr1|gsm8k|FILE", "write a data set as JSON lines"),
    "model": CliAction("|".join(STARTERS), "make a small model that a recipe of this name starts from"),
}

EXAMPLE = """\
  polyrl data model arithmetic --out models/arithmetic
  polyrl data model calculator --out models/calculator
  polyrl data prepare gsm8k --source gsm8k/train.jsonl --out data/gsm8k.jsonl
  polyrl data prepare questions.parquet --out data/questions.jsonl"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_action(parser, ACTIONS)
    parser.add_argument("what", metavar="WHAT", help="what the action says")
    parser.add_argument("--out", required=True, metavar="PATH", help="where to write it")
    parser.add_argument("--source", metavar="PATH", help="prepare: the downloaded file or directory of openr1 or gsm8k")
    parser.add_argument("--seed", type=int, default=0, help="model: of its weights and its lessons (default: 0)")


def run(args: argparse.Namespace) -> int:
    return _prepare(args) if args.action == "prepare" else _model(args)


def _prepare(args: argparse.Namespace) -> int:
    from polyrl.data.prepare import ANY_FILE, LAYOUTS, prepare

    if args.what in LAYOUTS:
        if args.source is None:
            raise UserError(f"--source: missing, expected where {args.what} was downloaded to; nothing is fetched here")
        done = prepare(args.what, Path(args.source), Path(args.out))
    elif args.source is not None:
        raise UserError(f"data prepare: got {args.what!r} and --source, expected openr1 or gsm8k with it, or a file")
    else:
        done = prepare(ANY_FILE, Path(args.what), Path(args.out))
    left_out = f", {done.num_left_out} left out: no prompt or no answer" if done.num_left_out else ""
    print(f"{args.out}: {done.num_rows} rows{left_out}")
    return 0


def _model(args: argparse.Namespace) -> int:
    from polyrl.engines import registry

    if args.what not in STARTERS:
        hint = "; examples/smollm2.py, in a checkout, makes that one" if args.what == "smollm2" else ""
        raise UserError(f"data model: got {args.what!r}, expected {', '.join(STARTERS[:-1])} or {STARTERS[-1]}{hint}")
    if args.seed < 0:
        raise UserError(f"--seed: got {args.seed}, expected 0 or more")
    registry.check_libraries()
    folder = Path(args.out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: is there already, expected a new or an empty directory")
    began = time.monotonic()
    try:
        _check_writable(folder)
        _make(args.what, folder, args.seed)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror or error}") from error
    print(f"{folder}: a model for the task {args.what}, in {time.monotonic() - began:.0f} s")
    return 0


def _check_writable(folder: Path) -> None:
    """Check that a folder can be written, before half a minute of work. Nothing is created. Raises OSError."""
    there = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    with tempfile.TemporaryFile(dir=there):
        pass


def _make(what: str, folder: Path, seed: int) -> None:
    from polyrl.config.recipe import ArithmeticTask
    from polyrl.starters import agents, arithmetic, programs

    def show(step: int, loss: float) -> None:
        if sys.stderr.isatty():
            print(f"\rstep {step}, loss {loss:.3f}", end="", file=sys.stderr, flush=True)

    try:
        if what == "arithmetic":
            arithmetic.make_model(folder, seed=seed, task=ArithmeticTask(), show=show)
        elif what == "code":
            programs.make_model(folder, seed=seed, show=show)
        else:
            agents.make_model(what, folder, seed=seed, show=show)
    finally:
        if sys.stderr.isatty():
            print(file=sys.stderr)
