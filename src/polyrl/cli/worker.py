"""`polyrl worker`: join a fleet with one engine, or, with --rewards, score its answers (cli/reward_worker.py)."""

import argparse
import asyncio
import logging
import math
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from polyrl.cli import dialing, reward_worker

if TYPE_CHECKING:
    from polyrl.engines.engine import Engine
    from polyrl.worker.agent import PeerOf

EXAMPLE = """\
examples:
  polyrl worker --join http://HOST:5000 --token-file worker.token --engine emulated --name laptop --spot --price 1.20
  polyrl worker --join http://HOST:5000 --token-file worker.token --engine builtin --model DIR slots=16
  polyrl worker --check --engine vllm --model DIR
  polyrl worker --join http://HOST:5000 --token-file worker.token --engine vllm --model DIR -- --tensor-parallel-size 4
  polyrl worker --check --engine my_package.engine:MyEngine --model DIR depth=3
  polyrl worker --rewards --join http://HOST:5000 --token-file reward.token --slots 16
  polyrl worker --join http://HOST:5000 --token-file worker.token --engine builtin --model DIR --spot aws

It dials out; nothing inbound is needed. Ctrl+C or SIGTERM: it hands every sample over at its current token and leaves.
With --rewards it has no engine and scores answers with the run's reward functions, which must be installed here
(docs/guides/reward-workers.md); at a signal it finishes what it scores, or hands it back.
Settings of the engine are key=value: docs/concepts/engines.md has those of the emulated one, for example
tokens_per_s=80, docs/concepts/builtin-engine.md those of the builtin one, for example kv_tokens=32768, and
docs/guides/engines.md those of vllm and sglang; docs/guides/extend.md shows an engine of your own. Arguments after --
go to the server as they are."""

SPOT_CHOICES = ("auto", "aws", "gcp", "azure", "kubernetes", "slurm", "none")
EXIT_LEFT_BADLY = 1
"""The exit code of a worker that failed. A worker whose options can never work exits as for bad input."""
EXIT_TERMINATED = 143  # 128 + SIGTERM, as a shell reports it
_SIGTERM = "SIGTERM"
_TAIL_LINES = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of the engine")
    parser.add_argument("--join", metavar="URL", help="the manager, for example http://HOST:5000")
    parser.add_argument(
        "--check", action="store_true", help="start the engine, write a sample, install a version, say so and leave"
    )
    parser.add_argument(
        "--rewards", action="store_true", help="score answers instead of generating them; wants reward.token"
    )
    parser.add_argument(
        "--engine",
        default="emulated",
        metavar="NAME",
        help="what generates: emulated, builtin, vllm, sglang, or your own as module:Class (default: %(default)s)",
    )
    parser.add_argument("--model", metavar="DIR", help="a Hugging Face directory; all but the emulated engine want one")
    parser.add_argument(
        "--engine-python", metavar="PATH", help="the Python of the environment that the server is installed in"
    )
    parser.add_argument("--engine-url", metavar="URL", help="use a server that runs already, instead of starting one")
    parser.set_defaults(rest=[])
    parser.add_argument("--engine-config", metavar="FILE", help="a TOML file of settings of the engine")
    parser.add_argument(
        "--modules", default="", metavar="DIR", help="where module:Class is looked for too, beside the current folder"
    )
    parser.add_argument(
        "--name", help="unique in the fleet; taken over from a worker that is gone (default: host and pid)"
    )
    parser.add_argument(
        "--session-file",
        metavar="FILE",
        help="keep the session there, so that a worker started again with it has its name at once",
    )
    parser.add_argument(
        "--slots",
        type=int,
        help="samples at once (default: what the engine says; with --rewards, this machine's cores)",
    )
    parser.add_argument(
        "--spot",
        nargs="?",
        const="auto",
        choices=SPOT_CHOICES,
        help="the machine may be taken away: where its notice comes from (default: auto, what firmware and environment "
        "say; none: no notice is looked for)",
    )
    parser.add_argument("--price", type=float, default=0.0, metavar="USD_PER_HOUR", help="for the ledger")
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="accelerators it stands for")
    parser.add_argument("--planned", action="store_true", help="the run that started it plans its engine's width")
    parser.add_argument(
        "--drain-deadline", type=float, default=25.0, metavar="S", help="after a signal (default: %(default)s)"
    )
    parser.add_argument(
        "--notice",
        type=float,
        default=0.0,
        metavar="S",
        help="SIGTERM says that the machine goes in S seconds: generate until shortly before (default: hand over now, "
        "or what --spot kubernetes and --spot slurm say)",
    )
    parser.add_argument(
        "--region",
        default="",
        metavar="NAME",
        help="where it is, if far from the trainer: a version comes over the long link once for each region",
    )
    relaying = parser.add_mutually_exclusive_group()
    relaying.add_argument(
        "--relay-on",
        action="append",
        metavar="CIDR",
        help="pass weights on to other workers, on local addresses in this network "
        "(default: on all of them, or on loopback alone if the manager is there)",
    )
    relaying.add_argument("--no-relay", action="store_true", help="pass no weights on")
    parser.add_argument(
        "--egress-mb-s", type=float, default=0.0, metavar="N", help="pass on at most so many megabytes a second"
    )
    parser.add_argument(
        "--mooncake", default="", choices=("tcp", "rdma"), help="read weights by it, where the source has it too"
    )
    parser.add_argument("--log", metavar="FILE", help="with --rewards: keep what functions print")
    parser.add_argument("--quiet", action="store_true", help="log warnings only")
    dialing.add_credentials(parser)


def run(args: argparse.Namespace) -> int:
    from polyrl.run.event_loop import run_loop

    name = dialing.default_name("worker") if args.name is None else args.name
    _check_options(args, name)
    level = logging.WARNING if args.quiet else logging.INFO
    logging.basicConfig(level=level, format="%(asctime)s %(name)s %(message)s", stream=sys.stderr)
    if args.rewards:
        return run_loop(reward_worker.score(args, name))
    engine = _engine(args)
    return run_loop(_check(args, engine) if args.check else _work(args, name, engine))


def _check_options(args: argparse.Namespace, name: str) -> None:
    from polyrl.errors import UserError
    from polyrl.scheduling.core.bounds import REGION
    from polyrl.weights.interfaces import listening_addresses
    from polyrl.wire.frames import MAX_NOTICE_S

    is_encrypted = args.join is not None and args.join.startswith("https://")
    dialing.check_peer(args, name)
    if not re.fullmatch(REGION, args.region):
        raise UserError(
            f"--region: {args.region!r} is not a name; expected up to 64 letters, digits, dots, dashes, underscores"
        )
    if args.devices < 1:
        raise UserError(f"--devices: {args.devices}; expected at least 1")
    if not 0 <= args.notice <= MAX_NOTICE_S:
        raise UserError(f"--notice: {args.notice:g}; expected seconds from 0 to {MAX_NOTICE_S:g}")
    if args.join is None and not args.check:
        raise UserError("--join: missing; expected the manager's address, or --check to try the engine alone")
    if not 0 <= args.egress_mb_s < math.inf:
        raise UserError(
            f"--egress-mb-s: {args.egress_mb_s:g}; expected megabytes a second above 0, or 0 for all it can"
        )
    if args.mooncake and is_encrypted:
        raise UserError("--mooncake: is not encrypted, and the manager is; leave it out")
    if args.relay_on is not None:
        if is_encrypted:
            raise UserError("--relay-on: over https, weights come from the trainer alone; leave it out")
        listening_addresses(args.relay_on, key="--relay-on")


def _engine(args: argparse.Namespace) -> "Engine":
    from polyrl.config import apply_overrides, load_toml
    from polyrl.config.plugins import look_in
    from polyrl.engines.registry import Wanted, make_engine

    tree = {} if args.engine_config is None else load_toml(args.engine_config)
    tree = apply_overrides(tree, args.settings, example="slots=16")
    if args.slots is not None:
        tree["slots"] = args.slots
    look_in(args.modules)
    return make_engine(
        Wanted(
            args.engine,
            tree,
            args.model,
            args.engine_python,
            args.engine_url,
            args.rest,
            args.engine_config or "",
            args.settings,
        )
    )


def _peer_of(args: argparse.Namespace) -> "PeerOf":
    """Return the peer that fetches weights, and serves other workers on the networks of `--relay-on`."""
    from urllib.parse import urlsplit

    from polyrl.weights.peer import WeightPeer
    from polyrl.weights.settings import Tls, WeightSettings
    from polyrl.wire.credentials import client_tls
    from polyrl.wire.dial import is_loopback

    loopback = ("127.0.0.0/8",) if args.no_relay or is_loopback(args.join) else ()
    networks = loopback if args.relay_on is None else tuple(args.relay_on)
    settings = WeightSettings(
        interfaces=networks,
        egress_mb_s=args.egress_mb_s,
        mooncake=args.mooncake,
        one_machine=is_loopback(args.join),
    )
    context = client_tls(args.join, args.ca)
    tls = None if context is None else Tls(None, context, urlsplit(args.join).hostname or "")
    return lambda key: WeightPeer(settings, key, tls)


async def _check(args: argparse.Namespace, engine: "Engine") -> int:
    """Try the engine. A failure is reported in a line, with the end of the server's log."""
    from polyrl.engines.check import check
    from polyrl.engines.engine import EngineError
    from polyrl.engines.served.process import tail

    checking = asyncio.create_task(check(engine, args.model, lambda line: print(f"check: {line}", flush=True)))
    # SIGTERM ends the check as a failure does: its server is stopped, and its temporary directories are removed.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, checking.cancel, _SIGTERM)
    try:
        await checking
    except asyncio.CancelledError as ended:
        if ended.args != (_SIGTERM,):
            raise
        print("polyrl: error: check: ended by SIGTERM", file=sys.stderr)
        return EXIT_TERMINATED
    except EngineError as error:
        print(f"polyrl: error: check: {error}", file=sys.stderr)
        log_file = getattr(engine, "log_file", None)
        for line in tail(log_file, _TAIL_LINES) if isinstance(log_file, Path) else ():
            print(f"  | {line[:300]}", file=sys.stderr)
        return EXIT_LEFT_BADLY
    finally:
        await engine.close()
    return 0


async def _work(args: argparse.Namespace, name: str, engine: "Engine") -> int:
    from polyrl.errors import EXIT_BAD_INPUT
    from polyrl.worker.agent import WorkerAgent, WorkerOptions
    from polyrl.worker.spot.listening import noticing

    dialer = dialing.dialer_to(args.join, args.token_file, args.ca)
    options = WorkerOptions(
        name=name,
        spot=args.spot is not None,
        price_usd_per_hour=args.price,
        num_devices=args.devices,
        planned=args.planned,
        drain_deadline_s=args.drain_deadline,
        session_file=None if args.session_file is None else Path(args.session_file),
        region=args.region,
        relays=not args.no_relay and dialer.is_plain,  # with TLS it would need a certificate of its own
    )
    agent = WorkerAgent(engine, dialer, options, peer_of=_peer_of(args))
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, agent.drain, "Ctrl+C")
    async with noticing(args.spot or "none", args.notice, agent.drain):
        left = await agent.run()
    if left.ok:
        print(f"worker {name}: left: {left}", flush=True)
        return 0
    print(f"polyrl: error: worker {name}: {left}", file=sys.stderr)
    return EXIT_BAD_INPUT if left.is_misfit else EXIT_LEFT_BADLY
