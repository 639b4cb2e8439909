"""`polyrl demo`: a model learns on this machine, while a worker joins and another is killed."""

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from polyrl.run.event_loop import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from polyrl.run.training import LiveRun

EXAMPLE = """\
example:
  polyrl demo --out demo

It makes a small model that can do sums and is too impatient to, and trains it with GRPO through a real manager and real
worker processes. A second worker joins in mid-run; the first one is killed with SIGKILL in mid-answer. At the end it
shows the ledger, in which nothing is lost, and draws the reward and what every worker did. No GPU is needed; two cores
take two to five minutes."""

_JOIN_AT_STEP = 4
_KILL_AT_STEP = 10
_KILL_PATIENCE_S = 60.0
_STEADY = 5
"""The number of first and of last steps whose mean rewards are compared."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", default="demo", metavar="DIR", help="where model and run go (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of model and run (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="steps of training (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    from polyrl.cli import main
    from polyrl.config.recipe_files import load_recipe
    from polyrl.engines import registry
    from polyrl.errors import UserError

    registry.check_libraries()
    from polyrl.run.supervising import Interrupted
    from polyrl.run.training import train

    began = time.monotonic()
    out = Path(args.out)
    if (out / "run").exists() or (out / "model").exists():
        raise UserError(f"{out}: there is a demo already; name another directory with --out, or remove it")
    overrides = [
        f"model.path={out / 'model'}", f"train.steps={args.steps}", f"train.seed={args.seed}",
        "manager.port=0", "fleet.workers=1", "fleet.spot=true", "fleet.price_usd_per_hour=0.40",
        "train.price_usd_per_hour=2.00", 'fleet.settings={ slots = 16, kv_tokens = 8192 }',
    ]  # fmt: skip
    recipe = load_recipe("arithmetic", overrides)
    print("1. A small model is taught sums, by an impatient teacher.", flush=True)
    code = main.main(["data", "model", "arithmetic", "--out", str(out / "model"), "--seed", str(args.seed)])
    if code:
        return code
    print("2. It is trained with GRPO: a manager, the trainer's own engine, and a worker process.", flush=True)
    try:
        why = train(recipe, out / "run", companion=_play)
    except Interrupted:
        print("stopped", flush=True)
        return EXIT_INTERRUPTED
    return _conclude(out, why, time.monotonic() - began)


async def _play(live: "LiveRun") -> None:
    """Let a worker join, and kill another while it generates."""
    from polyrl.run import workers

    await live.fleet.line(_JOIN_AT_STEP - 1)
    live.say("   demo: worker-late is started, and joins in mid-run")
    live.workers["worker-late"] = await workers.start(live.recipe, live.run_dir, live.address, "worker-late")
    await live.fleet.line(_KILL_AT_STEP - 1)
    num_running = await _until_it_writes(live, "worker-0")
    live.workers["worker-0"].kill()
    live.say(f"   demo: worker-0 is killed with SIGKILL, in the middle of {num_running} answers; they go on elsewhere")


async def _until_it_writes(live: "LiveRun", name: str) -> int:
    """Wait until the worker generates, and return the number of answers in progress."""
    import asyncio

    deadline = time.monotonic() + _KILL_PATIENCE_S
    while time.monotonic() < deadline:
        status = await live.fleet.status()
        for worker in status.workers:
            if worker.name == name and worker.running:
                return worker.running
        await asyncio.sleep(0.02)
    return 0


def _conclude(out: Path, why: str, seconds: float) -> int:
    """Print the ledger, draw the pictures, and say whether the model learned."""
    from polyrl.cli import main
    from polyrl.telemetry.metrics import read_steps

    run_dir = out / "run"
    print(f"3. {why}. What became of everything:\n", flush=True)
    code = main.main(["ledger", str(run_dir), "--verify"])
    print("\n4. Pictures:", flush=True)
    code = main.main(["plot", str(run_dir), "--out", str(out / "pictures")]) or code
    rewards = [float(line["reward/mean"] or 0.0) for line in read_steps(run_dir / "metrics.jsonl")]
    few = min(_STEADY, max(1, len(rewards) // 2))
    first, last = sum(rewards[:2]) / len(rewards[:2]), sum(rewards[-few:]) / few
    print(f"\nThe mean reward went from {first:.2f} to {last:.2f} in {len(rewards)} steps; {seconds:.0f} s in all.")
    return code
