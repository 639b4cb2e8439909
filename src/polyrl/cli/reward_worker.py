"""`polyrl worker --rewards`: score a run's answers on this machine."""

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path

from polyrl.cli import dialing

EXIT_LEFT_BADLY = 1
_OF_ENGINES = {
    "check": False, "engine": "emulated", "model": None, "engine_python": None, "engine_url": None,
    "engine_config": None, "session_file": None, "spot": None, "devices": 1, "notice": 0.0,
    "relay_on": None, "no_relay": False, "egress_mb_s": 0.0, "mooncake": "", "settings": [], "rest": [],
}  # fmt: skip
"""Options that say something about an engine, and their defaults."""


async def score(args: argparse.Namespace, name: str) -> int:
    """Live a reward worker's life; return the exit code. Raises UserError for options that cannot be used."""
    from polyrl.config.plugins import look_in
    from polyrl.errors import EXIT_BAD_INPUT
    from polyrl.rewards.remote.agent import RewardAgent, RewardWorkerOptions

    check_options(args)
    look_in(args.modules)
    options = RewardWorkerOptions(
        name=name,
        places=len(os.sched_getaffinity(0)) if args.slots is None else args.slots,
        log=None if args.log is None else Path(args.log),
        drain_deadline_s=args.drain_deadline,
        price_usd_per_hour=args.price,
    )
    agent = RewardAgent(dialing.dialer_to(args.join, args.token_file, args.ca), options)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, agent.drain, "SIGTERM")
    loop.add_signal_handler(signal.SIGINT, agent.drain, "Ctrl+C")
    left = await agent.run()
    if left.ok:
        print(f"reward worker {name}: left: {left}", flush=True)
        return 0
    print(f"polyrl: error: reward worker {name}: {left}", file=sys.stderr)
    return EXIT_BAD_INPUT if left.is_misfit else EXIT_LEFT_BADLY


def check_options(args: argparse.Namespace) -> None:
    """Raise UserError for options that a reward worker has no use for, or that cannot be."""
    from polyrl.errors import UserError
    from polyrl.wire.reward_frames import MAX_PLACES

    for key, default in _OF_ENGINES.items():
        if getattr(args, key) != default:
            option = "key=value" if key == "settings" else "--" if key == "rest" else f"--{key.replace('_', '-')}"
            raise UserError(f"{option}: is of an engine, and --rewards has none; leave it out")
    if args.slots is not None and not 1 <= args.slots <= MAX_PLACES:
        raise UserError(f"--slots: {args.slots}; expected 1 to {MAX_PLACES} answers at once")
    if args.log is not None:
        try:
            with Path(args.log).open("ab"):
                pass
        except OSError as error:
            raise UserError(f"--log: {args.log} cannot be written: {error.strerror}") from error
