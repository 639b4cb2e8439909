"""`polyrl env`: environments of several turns. `polyrl env try` plays one episode here, before a run does."""

import argparse
import json
import sys
from typing import Any

from polyrl.errors import UserError

EXAMPLES = """\
try NAME [key=value ...]    play one episode in this terminal, and show what it pays

examples:
  polyrl env try calculator --human
  polyrl env try textarena game=FrozenLake-v0 --model models/smollm2
  polyrl env try my_game:Game size=5 --index 3

NAME is calculator, treasure, textarena, reasoning-gym, skyrl-gym, openenv, verifiers, or module:Class; key=value are
its arguments (docs/guides/environments.md). Without --model and --human, letters by chance are played."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("words", nargs="*", metavar="try NAME key=value", help="the environment, and its arguments")
    policy = parser.add_mutually_exclusive_group()
    policy.add_argument("--model", metavar="DIR", help="play with this Hugging Face directory, on the builtin engine")
    policy.add_argument("--human", action="store_true", help="play by typing the answers, a line each")
    policy.add_argument("--random", action="store_true", help="play letters by chance (the default)")
    parser.add_argument("--index", type=int, default=0, metavar="N", help="the task's number (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the task and the draws (default: %(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=2048, metavar="N", help="of all answers (default: %(default)s)")
    parser.add_argument("--turns", type=int, metavar="N", help="at most so many (default: the environment's)")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="of a model (default: %(default)g)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the conversation")


def run(args: argparse.Namespace) -> int:
    from polyrl.config import apply_overrides
    from polyrl.hosts.episode import EpisodeFailed
    from polyrl.run.event_loop import run_loop
    from polyrl.run.trying import Trial

    _check(args)
    _, name, *given = args.words
    tree = apply_overrides({}, given, example="game=FrozenLake-v0")
    trial = Trial(name, tree, args.index, args.seed, args.tokens, args.turns, args.temperature)

    def show(text: str) -> None:
        if not args.json:
            print(text, end="", flush=True)

    try:
        end = run_loop(_play(args, trial, show))
    except EpisodeFailed as error:
        _tell(args, {"failed": str(error)}, f"failed, with no reward: {error}")
        return 1
    said = {
        "reward": end.reward,
        "correct": end.correct,
        "turns": end.num_turns,
        "parts": end.parts,
        "why": end.why,
    }
    parts = "".join(f", {part} {value:g}" for part, value in end.parts.items())
    why = f": {end.why}" if end.why else ""
    is_correct = "correct" if end.correct else "not correct"
    _tell(args, said, f"reward {end.reward:g}, {is_correct}, {end.num_turns} turns{parts}{why}")
    return 0


def _check(args: argparse.Namespace) -> None:
    if not args.words or args.words[0] != "try":
        got = f"got {args.words[0]!r}, " if args.words else ""
        raise UserError(f"polyrl env: {got}expected try, for example: polyrl env try calculator --human")
    if len(args.words) == 1 or "=" in args.words[1]:
        raise UserError("polyrl env try: expected an environment's name next, for example textarena")
    if args.index < 0 or args.tokens < 1 or (args.turns is not None and args.turns < 1):
        raise UserError("--index, --tokens, --turns: expected --index from 0 on, and at least one token and turn")
    if not 0 <= args.temperature <= 100:
        raise UserError(f"--temperature: {args.temperature:g}; expected a number from 0 to 100")


def _play(args: argparse.Namespace, trial: Any, show: Any) -> Any:
    from polyrl.run import trying

    if args.model is None:
        return trying.try_without_model(trial, _read_line if args.human else None, show)
    from polyrl.engines import registry

    registry.check_libraries()
    config = registry.builtin_config({}, args.model)
    from polyrl.run.generating import LoadedModel

    return trying.try_model(trial, LoadedModel(config, ()), config.model, show)


def _read_line() -> str | None:
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


def _tell(args: argparse.Namespace, said: dict[str, Any], line: str) -> None:
    print(json.dumps(said) if args.json else f"\n{line}")
