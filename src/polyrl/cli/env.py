"""`polyrl env`: play an environment's episodes for a run; check that it can be played; or try one in the terminal."""

import argparse
import asyncio
import json
import logging
import os
import re
import signal
import socket
import sys
from typing import TYPE_CHECKING

from polyrl.cli import dialing, env_try

if TYPE_CHECKING:
    from polyrl.hosts.life import WantedEnvironment

EXAMPLE = """\
examples:
  polyrl env calculator --join http://HOST:5000 --token-file host.token --model DIR --slots 64
  polyrl env verifiers --check --model DIR taskset.id=my-taskset
  polyrl env try calculator --human
  polyrl env my_package.game:Game --join http://HOST:5000 --token-file host.token --model DIR size=4

It dials out; nothing inbound is needed. Run it in the Python environment that has the environment's package. Ctrl+C or
SIGTERM: it plays its episodes to their end and leaves; a second one: at once, and they go on elsewhere.

`polyrl env try NAME` plays one episode in this terminal, and shows what it pays; without --model and --human, with
letters by chance."""

EXIT_LEFT_BADLY = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("environment", metavar="NAME", help="a package by name, or your own as module:Class")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="arguments of the environment")
    parser.add_argument("--join", metavar="URL", help="the manager, for example http://HOST:5000")
    parser.add_argument("--check", action="store_true", help="start the environment, say how many tasks it has, leave")
    parser.add_argument("--model", metavar="DIR", help="the run's model: its tokenizer and chat template are needed")
    parser.add_argument("--slots", type=int, default=16, help="episodes at once (default: %(default)s)")
    parser.add_argument("--name", help="unique among the hosts of a run (default: host and pid)")
    parser.add_argument("--as", dest="known_as", metavar="NAME", help="what the run calls it (default: NAME)")
    parser.add_argument("--max-turns", type=int, help="of an episode that is played turn by turn")
    parser.add_argument("--price", type=float, default=0.0, metavar="USD_PER_HOUR", help="for the ledger")
    parser.add_argument(
        "--drain-deadline", type=float, default=600.0, metavar="S", help="after a signal (default: %(default)s)"
    )
    parser.add_argument(
        "--modules", default="", metavar="DIR", help="where module:Class is looked for too, beside the current folder"
    )
    parser.add_argument("--quiet", action="store_true", help="log warnings only")
    env_try.add_arguments(parser)
    dialing.add_credentials(parser)


def run(args: argparse.Namespace) -> int:
    from polyrl.run.event_loop import run_loop

    if args.environment == "try":
        return env_try.run(args)
    name = _default_name() if args.name is None else args.name
    wanted = _wanted(args, name)
    level = logging.WARNING if args.quiet or args.check else logging.INFO
    logging.basicConfig(level=level, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    return run_loop(_check(wanted) if args.check else _play(args, name, wanted))


def _wanted(args: argparse.Namespace, name: str) -> "WantedEnvironment":
    from polyrl.config import apply_overrides
    from polyrl.config.plugins import look_in
    from polyrl.errors import UserError
    from polyrl.hosts.life import WantedEnvironment
    from polyrl.wire.control import MAX_SLOTS, WORKER_NAME

    if not re.fullmatch(WORKER_NAME, name):
        raise UserError(f"--name: {name!r} is not a name; expected up to 64 letters, digits, dots, dashes, underscores")
    if not 1 <= args.slots <= MAX_SLOTS:
        raise UserError(f"--slots: {args.slots}; expected 1 to {MAX_SLOTS}")
    if not 0 <= args.price <= 1e6:
        raise UserError(f"--price: {args.price:g} is not a price; expected US dollars per hour, 0 or more")
    if args.join is None and not args.check:
        raise UserError("--join: missing; expected the manager's address, or --check to start the environment alone")
    look_in(args.modules)
    settings = apply_overrides({}, args.settings, example="size=4")
    return WantedEnvironment(args.environment, settings, args.model, args.max_turns)


def _default_name() -> str:
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).strip("-._")[:48]
    return f"{host or 'host'}-{os.getpid()}"


async def _check(wanted: "WantedEnvironment") -> int:
    from polyrl.hosts.life import opened

    async with opened(wanted) as environment:
        await environment.start()
        print(json.dumps({"environment": environment.name, "num_tasks": environment.num_tasks}), flush=True)
        await environment.close()
    return 0


async def _play(args: argparse.Namespace, name: str, wanted: "WantedEnvironment") -> int:
    from polyrl.hosts.agent import HostAgent, HostOptions
    from polyrl.hosts.life import opened

    dialer = dialing.dialer_to(args.join, args.token_file, args.ca)
    options = HostOptions(
        name=name,
        environment=args.known_as or args.environment,
        slots=args.slots,
        price_usd_per_hour=args.price,
        drain_deadline_s=args.drain_deadline,
    )
    async with opened(wanted) as environment:
        agent = HostAgent(environment, dialer, options)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, agent.drain, "SIGTERM")
        loop.add_signal_handler(signal.SIGINT, agent.drain, "Ctrl+C")
        over = await agent.run()
    if over.ok:
        print(f"host {name}: left: {over}", flush=True)
        return 0
    print(f"polyrl: error: host {name}: {over}", file=sys.stderr)
    return EXIT_LEFT_BADLY
