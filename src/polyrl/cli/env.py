"""`polyrl env`: environments of several turns. `try` plays one episode here, `play` plays for a run."""

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from polyrl.cli import dialing
from polyrl.errors import UserError

if TYPE_CHECKING:
    from polyrl.hosts.agent import HostOver
    from polyrl.hosts.life import WantedEnvironment

EXAMPLE = """\
try NAME [key=value ...]    play one episode in this terminal, and show what it pays
play NAME [key=value ...]   join a run as a host, and play its episodes
check NAME [key=value ...]  start the environment, say how many tasks it has, and leave

examples:
  polyrl env try calculator --human
  polyrl env try textarena game=FrozenLake-v0 --model models/smollm2
  polyrl env play verifiers --join http://HOST:5000 --token-file host.token --model DIR --slots 64 taskset.id=...
  polyrl env check my_game:Game size=5 --model DIR

NAME is calculator, treasure, textarena, reasoning-gym, skyrl-gym, openenv, verifiers, or module:Class; key=value are
its arguments (docs/guides/environments.md). `try` without --model and --human plays letters by chance. A host dials
out; nothing inbound is needed. Run it in the Python environment that has the environment's package. Ctrl+C or SIGTERM:
it plays its episodes to their end and leaves; a second one: at once, and they go on elsewhere."""

VERBS = ("try", "play", "check")
EXIT_LEFT_BADLY = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="try|play|check NAME key=value", help="what to do with which one")
    parser.add_argument("--model", metavar="DIR", help="a Hugging Face directory: its text, and with try its weights")
    parser.add_argument("--turns", type=int, metavar="N", help="at most so many (default: the environment's)")
    parser.add_argument(
        "--modules", default="", metavar="DIR", help="where module:Class is looked for too, beside the current folder"
    )
    parser.add_argument(
        "--chat", action="append", default=[], metavar="KEY=VALUE", help="for the chat template: enable_thinking=false"
    )
    trying = parser.add_argument_group("try")
    policy = trying.add_mutually_exclusive_group()
    policy.add_argument("--human", action="store_true", help="play by typing the answers, a line each")
    policy.add_argument("--random", action="store_true", help="play letters by chance (the default)")
    trying.add_argument("--index", type=int, default=0, metavar="N", help="the task's number (default: %(default)s)")
    trying.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the task and the draws (default: %(default)s)"
    )
    trying.add_argument("--tokens", type=int, default=2048, metavar="N", help="of all answers (default: %(default)s)")
    trying.add_argument("--temperature", type=float, default=1.0, metavar="T", help="of a model (default: %(default)g)")
    trying.add_argument("--json", action="store_true", help="print one JSON object instead of the conversation")
    playing = parser.add_argument_group("play")
    playing.add_argument("--join", metavar="URL", help="the manager, for example http://HOST:5000")
    playing.add_argument("--slots", type=int, default=16, help="episodes at once (default: %(default)s)")
    playing.add_argument("--name", help="unique among the hosts of a run (default: host and pid)")
    playing.add_argument("--as", dest="known_as", metavar="NAME", help="what the run calls it (default: NAME)")
    playing.add_argument("--price", type=float, default=0.0, metavar="USD_PER_HOUR", help="for the ledger")
    playing.add_argument(
        "--drain-deadline", type=float, default=600.0, metavar="S", help="after a signal (default: %(default)s)"
    )
    playing.add_argument("--quiet", action="store_true", help="log warnings only")
    dialing.add_credentials(parser)


def run(args: argparse.Namespace) -> int:
    from polyrl.config import apply_overrides
    from polyrl.config.plugins import look_in
    from polyrl.hosts.life import WantedEnvironment
    from polyrl.run.event_loop import run_loop

    verb, name, *given = _words(args)
    look_in(args.modules)
    _show_to_children(args.modules)
    settings = apply_overrides({}, given, example="game=FrozenLake-v0")
    chat_options = apply_overrides({}, args.chat, example="enable_thinking=false")
    wanted = WantedEnvironment(name, settings, args.model, args.turns, chat_options)
    if verb == "try":
        return _try(args, wanted)
    own_name = dialing.default_name("host") if args.name is None else args.name
    if verb == "play":
        _check_host(args, own_name)
    level = logging.WARNING if args.quiet or verb == "check" else logging.INFO
    logging.basicConfig(level=level, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    return run_loop(_check(wanted) if verb == "check" else _play(args, own_name, wanted))


def _show_to_children(folder: str) -> None:
    """Have processes that an environment starts, as a server of its tools, find the modules that it was found in."""
    if folder:
        places = (os.environ.get("PYTHONPATH", ""), os.path.abspath(folder))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))


def _words(args: argparse.Namespace) -> list[str]:
    words = args.words
    if not words or words[0] not in VERBS:
        got = f"got {words[0]!r}, " if words else ""
        raise UserError(f"polyrl env: {got}expected try, play or check, for example: polyrl env try calculator --human")
    if len(words) == 1 or "=" in words[1]:
        raise UserError(f"polyrl env {words[0]}: expected an environment's name next, for example textarena")
    if args.turns is not None and args.turns < 1:
        raise UserError(f"--turns: {args.turns}; expected at least 1")
    return words


# try


def _try(args: argparse.Namespace, wanted: "WantedEnvironment") -> int:
    from polyrl.hosts.episode import EpisodeFailed
    from polyrl.run.event_loop import run_loop
    from polyrl.run.trying import Trial

    if args.index < 0 or args.tokens < 1:
        raise UserError("--index, --tokens: expected --index from 0 on, and at least one token")
    if not 0 <= args.temperature <= 100:
        raise UserError(f"--temperature: {args.temperature:g}; expected a number from 0 to 100")
    if args.model is not None and (args.human or args.random):
        raise UserError("--model: not with --human or --random, who play in its place")
    trial = Trial(wanted.name, wanted.args, args.index, args.seed, args.tokens, args.turns, args.temperature)

    def show(text: str) -> None:
        if not args.json:
            print(text, end="", flush=True)

    try:
        end = run_loop(_try_one(args, trial, show))
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
    _tell(
        args,
        said,
        f"reward {end.reward:g}, {is_correct}, {end.num_turns} turn{'' if end.num_turns == 1 else 's'}{parts}{why}",
    )
    return 0


def _try_one(args: argparse.Namespace, trial: Any, show: Any) -> Any:
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


# check and play


async def _check(wanted: "WantedEnvironment") -> int:
    from polyrl.hosts.life import opened

    async with opened(wanted) as environment:
        await environment.start()
        print(json.dumps({"environment": environment.name, "num_tasks": environment.num_tasks}), flush=True)
        await environment.close()
    return 0


def _check_host(args: argparse.Namespace, name: str) -> None:
    from polyrl.wire.control import MAX_SLOTS

    dialing.check_peer(args, name)
    if not 1 <= args.slots <= MAX_SLOTS:
        raise UserError(f"--slots: {args.slots}; expected 1 to {MAX_SLOTS}")
    if args.join is None:
        raise UserError("--join: missing; expected the manager's address, for example http://HOST:5000")


async def _play(args: argparse.Namespace, name: str, wanted: "WantedEnvironment") -> int:
    from polyrl.hosts.agent import HostAgent, HostOptions
    from polyrl.hosts.beside import run_beside
    from polyrl.hosts.life import opened

    dialer = dialing.dialer_to(args.join, args.token_file, args.ca)
    options = HostOptions(
        name=name,
        environment=args.known_as or wanted.name,
        slots=args.slots,
        price_usd_per_hour=args.price,
        drain_deadline_s=args.drain_deadline,
    )
    loop = asyncio.get_running_loop()
    async with opened(wanted) as environment:
        agent = HostAgent(environment, dialer, options, loop)
        loop.add_signal_handler(signal.SIGTERM, agent.drain, "SIGTERM")
        loop.add_signal_handler(signal.SIGINT, agent.drain, "Ctrl+C")

        async def live() -> "HostOver":
            over = await agent.run()
            if agent.is_stuck:  # the loop of this process never comes back
                print(f"polyrl: error: host {name}: {over}", file=sys.stderr, flush=True)
                os._exit(EXIT_LEFT_BADLY)
            return over

        over = await run_beside(live)
    if over.ok:
        print(f"host {name}: left: {over}", flush=True)
        return 0
    print(f"polyrl: error: host {name}: {over}", file=sys.stderr)
    return EXIT_LEFT_BADLY
