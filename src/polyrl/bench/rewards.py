"""How fast trivial programs run in the sandbox: beside plain processes, and beside fresh interpreters under bubblewrap.

All ways run the same program on the same number of cores, one after the other in several rounds, so that all see the
same machine. A plain process has no walls. A fresh interpreter has the sandbox's mounts and namespaces, and none of its
limits, filters and checks. Latency is measured from the request to the verdict, with as many programs at a time as
there are cores: that is full load. reward_pool.py measures the pool that all rewards run in.
"""

import asyncio
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from polyrl.bench import reward_pool
from polyrl.bench.machine import commit, cpu
from polyrl.bench.reward_pool import PoolLoad
from polyrl.errors import UserError
from polyrl.rewards.sandbox import bubblewrap
from polyrl.rewards.sandbox.program import InputCase, Program, SandboxLimits
from polyrl.rewards.sandbox.sandbox import Sandbox, look
from polyrl.sim.result import percentile

CORES = 2
GOALS = {"times_fresh": 3.0, "p99_ms": 100.0, "alone_ms": 30.0, **reward_pool.GOALS}
_SOURCE = "print(sum(map(int, input().split())))"
_INPUT, _OUTPUT = "2 3\n", "5\n"
_FLAGS = ("-S", "-s", "-P")


class RewardLoad(NamedTuple):
    num_rounds: int
    num_warm: int
    """Programs of a round in the sandbox."""
    num_cold: int
    """Programs of a round in each of the other ways."""
    pool: PoolLoad


def measure(quick: bool = False) -> dict[str, Any]:
    """Everything, as one JSON object. Raises UserError where there is no sandbox."""
    quick_load = RewardLoad(1, 20, 6, PoolLoad(1, 20, 200, 1.0))
    load = quick_load if quick else RewardLoad(7, 200, 60, PoolLoad(5, 400, 10_000, 10.0))
    layout = look()
    plain = [layout.python, *_FLAGS, "-c", _SOURCE]
    found = asyncio.run(_measure(load, plain, fresh_command(layout)))
    found |= asyncio.run(reward_pool.measure_pool(load.pool))
    return {
        **found,
        "goals": GOALS,
        "cores": CORES,
        "rounds": load.num_rounds,
        "quick": quick,
        "machine": {"cpu": cpu(), "python": platform.python_version(), "system": platform.platform()},
        "commit": commit(),
    }


def fresh_command(layout: bubblewrap.MachineLayout) -> list[str]:
    """Return the command of a fresh interpreter behind the same mounts and namespaces."""
    unshared = [f"--unshare-{one}" for one in ("user", "pid", "net", "ipc", "uts")]
    words = [layout.bwrap, *unshared, "--die-with-parent", "--new-session", "--clearenv", *bubblewrap.mounts(layout)]
    return [*words, "--", layout.python, *_FLAGS, "-c", _SOURCE]


async def _measure(load: RewardLoad, plain: list[str], fresh: list[str]) -> dict[str, Any]:
    rates: dict[str, list[float]] = {"sandbox": [], "plain": [], "fresh": []}
    latencies_ms: list[float] = []
    async with Sandbox.open(SandboxLimits(), size=CORES) as sandbox:
        alone_ms = [await _run_warm(sandbox) for _ in range(load.num_cold)]
        for _ in range(load.num_rounds):
            began = time.perf_counter()
            latencies_ms += await _run_together(sandbox, load.num_warm)
            rates["sandbox"].append(load.num_warm / (time.perf_counter() - began))
            for name, words in (("plain", plain), ("fresh", fresh)):
                rates[name].append(
                    await asyncio.to_thread(_rate_of, lambda words=words: _run_cold(words), load.num_cold)
                )
        num_replaced = sandbox.pool.num_replaced
    middle = {name: statistics.median(those) for name, those in rates.items()}
    return {
        "programs_per_s": round(middle["sandbox"], 1),
        "plain_programs_per_s": round(middle["plain"], 1),
        "fresh_programs_per_s": round(middle["fresh"], 1),
        "times_fresh": round(middle["sandbox"] / middle["fresh"], 2),
        "times_plain": round(middle["sandbox"] / middle["plain"], 2),
        "p50_ms": round(statistics.median(latencies_ms), 1),
        "p99_ms": round(percentile(latencies_ms, 0.99), 1),
        "alone_ms": round(statistics.median(alone_ms), 1),
        "programs_per_s_of_rounds": {name: [round(one, 1) for one in those] for name, those in rates.items()},
        "zygotes_replaced": num_replaced,
    }


async def _run_together(sandbox: Sandbox, num: int) -> list[float]:
    """Run programs, as many at a time as there are cores, and return the milliseconds of each."""
    found: list[float] = []

    async def work() -> None:
        while len(found) < num:
            found.append(await _run_warm(sandbox))

    await asyncio.gather(*(work() for _ in range(CORES)))
    return found


async def _run_warm(sandbox: Sandbox) -> float:
    began = time.perf_counter()
    verdict = await sandbox.run(Program(source=_SOURCE, cases=(InputCase(input=_INPUT, output=_OUTPUT),)))
    if verdict.outcome != "passed":
        raise UserError(f"bench rewards: a trivial program {verdict.outcome}: {verdict.detail}")
    return 1e3 * (time.perf_counter() - began)


def _rate_of(run: Callable[[], None], num: int) -> float:
    began = time.perf_counter()
    with ThreadPoolExecutor(CORES) as threads:
        for done in [threads.submit(run) for _ in range(num)]:
            done.result()
    return num / (time.perf_counter() - began)


def _run_cold(words: list[str]) -> None:
    done = subprocess.run(words, input=_INPUT, capture_output=True, text=True, timeout=60, check=False)
    if done.stdout != _OUTPUT:
        raise UserError(f"bench rewards: {words[0]} gave {done.stdout!r}: {done.stderr[-200:]}")


def table(result: dict[str, Any]) -> list[str]:
    goals, machine = result["goals"], result["machine"]
    return [
        f"programs a second on {result['cores']} cores",
        f"  in the sandbox, warm         {result['programs_per_s']:>8,.1f}",
        f"  fresh interpreter, bwrap     {result['fresh_programs_per_s']:>8,.1f}   the sandbox runs "
        f"{result['times_fresh']:g} times as many; goal: at least {goals['times_fresh']:g}",
        f"  plain process, no walls      {result['plain_programs_per_s']:>8,.1f}   {result['times_plain']:g} times",
        f"at full load, p50 / p99     {result['p50_ms']:>6,.1f} / {result['p99_ms']:.1f} ms   "
        f"goal: p99 below {goals['p99_ms']:g} ms",
        f"one program alone           {result['alone_ms']:>11,.1f} ms   goal: below {goals['alone_ms']:g} ms",
        "answers of mathematics, a second of CPU time",
        f"  by calls of math-verify      {result['math_per_core_s']:>8,.1f}",
        f"  by the pool                  {result['math_pool_per_core_s']:>8,.1f}   "
        f"{result['math_times_plain']:g} times; goal: at least {goals['math_times_plain']:g}",
        f"  p50 / p99, none waiting   {result['math_p50_ms']:>6,.1f} / {result['math_p99_ms']:.1f} ms",
        f"{result['num_waiting']:,} waiting rewards          {result['waiting_share_of_a_core']:>8.2%} of a core   "
        f"goal: below {goals['waiting_share_of_a_core']:.0%}",
        f"{machine['cpu']}, Python {machine['python']}, commit {result['commit']}",
    ]
