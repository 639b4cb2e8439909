"""`polyrl env try NAME`: one episode of an environment in the terminal."""

import argparse
import json
import sys
from typing import Any

from polyrl.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `polyrl env try`, beside those of `polyrl env`."""
    policy = parser.add_mutually_exclusive_group()
    policy.add_argument("--human", action="store_true", help="try: play by typing the answers, a line each")
    policy.add_argument("--random", action="store_true", help="try: play letters by chance, whatever --model says")
    parser.add_argument("--index", type=int, default=0, metavar="N", help="try: the task's number (default: 0)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="try: of the task and the draws (default: 0)")
    parser.add_argument("--tokens", type=int, default=2048, metavar="N", help="try: of all answers (default: 2048)")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="try: of a model (default: 1)")
    parser.add_argument("--json", action="store_true", help="try: print one JSON object instead of the conversation")


def run(args: argparse.Namespace) -> int:
    from polyrl.config import apply_overrides
    from polyrl.config.plugins import look_in
    from polyrl.hosts.episode import EpisodeFailed
    from polyrl.run.event_loop import run_loop
    from polyrl.run.trying import Trial

    _check(args)
    look_in(args.modules)
    name, *given = args.settings
    tree = apply_overrides({}, given, example="game=FrozenLake-v0")
    trial = Trial(name, tree, args.index, args.seed, args.tokens, args.max_turns, args.temperature)

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
    if args.join is not None or args.check:
        raise UserError("polyrl env try: plays here, without a manager; leave --join and --check out")
    if not args.settings or "=" in args.settings[0]:
        raise UserError("polyrl env try: expected an environment's name next, for example textarena")
    if args.index < 0 or args.tokens < 1 or (args.max_turns is not None and args.max_turns < 1):
        raise UserError("--index, --tokens, --max-turns: expected --index from 0 on, at least one token and one turn")
    if not 0 <= args.temperature <= 100:
        raise UserError(f"--temperature: {args.temperature:g}; expected a number from 0 to 100")


def _play(args: argparse.Namespace, trial: Any, show: Any) -> Any:
    from polyrl.run import trying

    if args.model is None or args.human or args.random:
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
