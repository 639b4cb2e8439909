"""`polyrl bench PART`: measure a part of PolyRL on this machine.

Comparisons with other people's software are not in the package: `make bench`, in a checkout, runs them.
"""

import argparse
import importlib
import json
from importlib.util import find_spec
from typing import TYPE_CHECKING

from polyrl.errors import UserError

if TYPE_CHECKING:
    from polyrl.bench.engine import Work
    from polyrl.bench.episodes import EpisodeWork
    from polyrl.bench.train import TrainWork

PARTS = ("engine", "train", "weights", "scheduler", "rewards", "episodes")
_ELSEWHERE = ("relay", "recovery", "served")

EXAMPLE = """\
examples:
  polyrl bench engine --arch qwen3-1.7b --batch 256 --prompt 256 --new 512
                                    the builtin engine against what memory bandwidth allows
  polyrl bench train                a minute: the trainer against the matrix limit
  polyrl bench weights              two minutes: versions over loopback, beside the same bytes without a protocol
  polyrl bench scheduler --json     two minutes; one object, for a machine
  polyrl bench rewards --json       two minutes: programs in the sandbox and answers in the pool, beside plain ones
  polyrl bench episodes             minutes: conversations through manager and worker, beside the engine alone
  polyrl bench scheduler --quick    seconds; shows that it runs, its figures mean little

Comparisons with routers, vLLM, SGLang, TRL, transformers, iperf3 and mooncake: `make bench`, in a checkout."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("part", choices=(*PARTS, *_ELSEWHERE), metavar="PART", help=f"one of {', '.join(PARTS)}")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--quick", action="store_true", help="a small load, to try the command out")
    add_model_options(parser.add_argument_group("engine, episodes and train"))
    add_engine_options(parser.add_argument_group("engine and episodes"))
    add_train_options(parser.add_argument_group("train"))


def add_model_options(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--arch", metavar="NAME", help="random weights of this shape: qwen3-1.7b, small-qwen3, tiny-qwen3"
    )
    parser.add_argument("--model", metavar="DIR", help="or a Hugging Face directory")
    parser.add_argument("--eager", action="store_true", help="on a GPU: do not compile")


def add_engine_options(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--batch", type=int, default=8, help="samples at once (default: %(default)s)")
    parser.add_argument("--prompt", type=int, help="tokens of a prompt (default: 16; of a conversation's first: 64)")
    parser.add_argument("--new", type=int, help="tokens of an answer (default: 64; of a turn: 24)")
    parser.add_argument("--turns", type=int, default=4, help="of a conversation (default: %(default)s)")


def add_train_options(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--pack-tokens", type=int, default=2048, help="through the model at once (default: 2048)")
    parser.add_argument("--shorter", type=int, default=16, help="divide published lengths by this (default: 16)")
    parser.add_argument("--checkpointing", action="store_true", help="keep less memory, compute more")


def run(args: argparse.Namespace) -> int:
    if args.part in _ELSEWHERE:
        raise UserError(
            f"bench {args.part}: is not in the package; in a checkout, `make bench NAME={args.part}` runs it"
        )
    if args.part == "engine":
        measured = engine_work(args)
    elif args.part == "train":
        measured = train_work(args)
    elif args.part == "episodes":
        measured = episode_work(args)
    else:
        measured = args.quick
    part = importlib.import_module(f"polyrl.bench.{args.part}")
    result = part.measure(measured)
    print(json.dumps(result, indent=2) if args.json else "\n".join(part.table(result)))
    return 0


def engine_work(args: argparse.Namespace) -> "Work":
    arch = _arch(args, "batch", "prompt", "new")
    from polyrl.bench.engine import Work

    prompt, new = (default if given is None else given for given, default in ((args.prompt, 16), (args.new, 64)))
    return Work(arch, args.model, args.batch, prompt, new, not args.eager)


def episode_work(args: argparse.Namespace) -> "EpisodeWork":
    arch = _arch(args, "batch", "prompt", "new", "turns", default="tiny-qwen3" if args.quick else "small-qwen3")
    from polyrl.bench.episodes import EpisodeWork

    given = {name: getattr(args, name) for name in ("prompt", "new") if getattr(args, name) is not None}
    work = EpisodeWork(arch, args.model, args.batch, num_turns=args.turns, compile=not args.eager, **given)
    return work._replace(slots=2, num_turns=2, new=8, num_repeats=1) if args.quick else work


def train_work(args: argparse.Namespace) -> "TrainWork":
    arch = _arch(args, "pack_tokens", "shorter")
    from polyrl.bench.train import TrainWork

    work = TrainWork(
        arch,
        args.model,
        args.pack_tokens,
        shorter=args.shorter,
        compile=not args.eager,
        checkpointing=args.checkpointing,
    )
    return work._replace(num_groups=2, repetitions=1, shorter=64) if args.quick else work


def _arch(args: argparse.Namespace, *counts: str, default: str = "tiny-qwen3") -> str | None:
    """Return the model shape to measure; None for a model directory. Raises UserError if it cannot be measured."""
    if find_spec("torch") is None or find_spec("transformers") is None:
        raise UserError("this part needs more than the base install: pip install polyrl[train]")
    if args.arch is not None and args.model is not None:
        raise UserError("--arch and --model exclude each other")
    for name in counts:
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')}: {getattr(args, name)}; expected at least 1")
    return args.arch if args.arch is not None or args.model is not None else default
