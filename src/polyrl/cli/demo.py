"""`polyrl demo`: a model learns on this machine, while processes join and are killed."""

import argparse
import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from polyrl.run.event_loop import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from polyrl.run.training import LiveRun
    from polyrl.wire.control import Status

EXAMPLE = """\
examples:
  polyrl demo --out demo
  polyrl demo agent --out demo-agent

sums, without a name: a small model that can do sums and is too impatient to is trained with GRPO through a real manager
and real worker processes. A second worker joins in mid-run; the first one is killed with SIGKILL in mid-answer.
agent: a small model learns to call a calculator, over two turns, in an environment that a host process plays. The host
is killed with SIGKILL in the middle of episodes and started again; then a worker is killed, and another one joins.
At the end there is the ledger, in which nothing is lost, and pictures of the reward and of what every worker did. No
GPU is needed; two cores take two to five minutes."""

_PATIENCE_S = 60.0
_STEADY = 5
"""The number of first and of last steps whose mean rewards are compared."""
_OVERRIDES = (
    "manager.port=0", "fleet.workers=1", "fleet.replace=false", "fleet.spot=true", "fleet.price_usd_per_hour=0.40",
    "train.price_usd_per_hour=2.00", 'fleet.settings={ slots = 16, kv_tokens = 8192 }',
)  # fmt: skip


class Demo(NamedTuple):
    recipe: str
    """Of the recipe and of its starter model."""
    lesson: str
    training: str
    play: Callable[["LiveRun"], Coroutine[Any, Any, None]]
    overrides: tuple[str, ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", default="sums", choices=list(DEMOS), metavar="sums|agent", help="see below")
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
    demo, out = DEMOS[args.what], Path(args.out)
    if (out / "run").exists() or (out / "model").exists():
        raise UserError(f"{out}: there is a demo already; name another directory with --out, or remove it")
    overrides = [f"model.path={out / 'model'}", f"train.steps={args.steps}", f"train.seed={args.seed}"]
    recipe = load_recipe(demo.recipe, [*overrides, *_OVERRIDES, *demo.overrides])
    print(f"1. {demo.lesson}", flush=True)
    code = main.main(["data", "model", demo.recipe, "--out", str(out / "model"), "--seed", str(args.seed)])
    if code:
        return code
    print(f"2. {demo.training}", flush=True)
    try:
        why = train(recipe, out / "run", companion=demo.play)
    except Interrupted:
        print("stopped", flush=True)
        return EXIT_INTERRUPTED
    return _conclude(out, why, time.monotonic() - began)


# What happens meanwhile


async def _play_sums(live: "LiveRun") -> None:
    """Let a worker join, and kill another while it generates."""
    await live.fleet.line(3)
    await _have_a_worker_join(live)
    await live.fleet.line(9)
    num_running = await _until(live, lambda status: _num_running(status, "worker-0"))
    live.keeper.kill("worker-0")
    live.say(f"   demo: worker-0 is killed with SIGKILL, in the middle of {num_running} answers; they go on elsewhere")


async def _play_agent(live: "LiveRun") -> None:
    """Kill the host while it plays, and the worker while it generates; have another worker join."""
    await live.fleet.line(5)
    num_playing = await _until(live, lambda status: sum(one.playing for one in status.hosts if one.connected))
    live.hosts["host-0"].kill()
    live.say(f"   demo: host-0 is killed with SIGKILL, in the middle of {num_playing} episodes")
    await live.fleet.line(11)
    num_running = await _until(live, lambda status: _num_running(status, "worker-0"))
    live.keeper.kill("worker-0")
    live.say(f"   demo: worker-0 is killed with SIGKILL, in the middle of {num_running} turns; they go on elsewhere")
    await live.fleet.line(14)
    await _have_a_worker_join(live)


async def _have_a_worker_join(live: "LiveRun") -> None:
    live.say("   demo: worker-late is started, and joins in mid-run")
    await live.keeper.start_beside("worker-late")


async def _until(live: "LiveRun", count: Callable[["Status"], int]) -> int:
    """Wait until there is something to count, and return the number; 0 if it does not come."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        if number := count(await live.fleet.status()):
            return number
        await asyncio.sleep(0.02)
    return 0


def _num_running(status: "Status", name: str) -> int:
    return sum(one.running for one in status.workers if one.name == name)


DEMOS: Mapping[str, Demo] = {
    "sums": Demo(
        "arithmetic",
        "A small model is taught sums, by an impatient teacher.",
        "It is trained with GRPO: a manager, the trainer's own engine, and a worker process.",
        _play_sums,
    ),
    "agent": Demo(
        "calculator",
        "A small model is taught how a calculator is called, by a teacher who mostly guesses.",
        "It is trained with GRPO: a manager, a host that plays, the trainer's own engine, and a worker process.",
        _play_agent,
        ("environments.price_usd_per_hour=0.05",),
    ),
}


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
