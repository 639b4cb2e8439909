"""Five hundred episodes at once whose tools take 1 to 20 s: engines stay busy, the manager is idle, memory is bounded.

Real processes: a manager, four workers with emulated engines of 32 slots, two hosts. An answer takes 6 s, a tool 10.5
on average: of 500 episodes about 180 want a slot at any moment, and there are 128. test_episodes.py kills them.
"""

import asyncio
import json
import os
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.chaos.fleet import Fleet, Process
from tests.chaos.slow_tools_host import TOKENS, TURNS

from polyrl.client import Fleet as Trainer
from polyrl.client import Prompt, connect
from polyrl.run.event_loop import run_loop
from polyrl.scheduling.core.parameters import DomainData, FleetRules, RoundsConfig, SchedulerConfig

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]

NUM_OPEN = 500
NUM_WORKERS, SLOTS, TOKENS_PER_S = 4, 32, 10.0
SAMPLES = 8
EPISODES_A_ROUND = 800
ROUNDS = 1
CONFIG = SchedulerConfig(
    domains=(
        DomainData(name="d", prompts_per_step=EPISODES_A_ROUND // SAMPLES, num_prompts=1000, environment="tools"),
    ),
    max_new_tokens=TURNS * TOKENS,
    max_staleness=ROUNDS,
    rounds=RoundsConfig(samples_per_prompt=SAMPLES),
    fleet_rules=FleetRules(heartbeat_timeout_s=10.0),
)
ENGINE = [
    *("--engine", "emulated", f"slots={SLOTS}", f"tokens_per_s={TOKENS_PER_S}", "step_per_sample_s=0", "version=0"),
    *("prefill_tokens_per_s=1000000", "median_tokens=100000", "sigma=0"),
]


class Look(NamedTuple):
    """At one moment of the run."""

    at: float
    num_playing: int
    num_made: int
    """Tokens, by all engines."""
    manager_s: float
    """Time on a core."""
    manager_bytes: int
    hosts_bytes: int
    num_calls: int
    num_again: int
    """Drawn tokens that were computed again at another worker."""


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def pid_of(process: Process) -> int:
    assert process.process is not None
    return process.process.pid


async def watch(fleet: Fleet, hosts: list[Process], trainer: Trainer, looks: list[Look]) -> None:
    while True:
        status = await trainer.status()
        looks.append(
            Look(
                time.monotonic(),
                sum(one.playing for one in status.hosts),
                fleet.num_made,
                cpu_s(pid_of(fleet.manager)),
                resident_bytes(pid_of(fleet.manager)),
                sum(resident_bytes(pid_of(one)) for one in hosts),
                status.ledger["calls"],
                status.ledger["tokens_reprefilled"],
            )
        )
        await asyncio.sleep(1.0)


async def until_all_joined(trainer: Trainer) -> None:
    """Wait for everybody: if a host comes a minute late, too few episodes are left to fill all places for long."""
    async with asyncio.timeout(120.0):
        while True:
            status = await trainer.status()
            if len(status.hosts) == 2 and len(status.workers) == NUM_WORKERS:
                return
            await asyncio.sleep(0.2)


async def play(folder: Path) -> tuple[list[Look], dict[str, Any], int]:
    looks: list[Look] = []
    num_groups = 0
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(Fleet(folder, NUM_WORKERS, ENGINE))
        hosts: list[Process] = []
        for name in ("h0", "h1"):
            script, token = Path(__file__).with_name("slow_tools_host.py"), str(fleet.run_dir / "host.token")
            argv = [sys.executable, str(script), f"http://127.0.0.1:{fleet.port}", token, name, str(NUM_OPEN // 2)]
            hosts.append(Process(argv, folder / f"{name}.log"))
            await hosts[-1].start()
            stack.push_async_callback(hosts[-1].kill)
        url = f"http://127.0.0.1:{fleet.port}"
        prompts = lambda domain, prompt, epoch: Prompt([])  # noqa: E731
        trainer = await stack.enter_async_context(connect(url, fleet.admin_token, CONFIG, prompts=prompts))
        await trainer.publish(0)
        await until_all_joined(trainer)
        for step in range(ROUNDS):
            await trainer.request(step)
        watching = asyncio.create_task(watch(fleet, hosts, trainer, looks))
        for step in range(ROUNDS):
            async for group in trainer.round(step):
                num_groups += 1
                await trainer.take(group)
            await trainer.step_done(step)
        await trainer.settled()
        watching.cancel()
        await asyncio.wait([watching])
        return looks, (await trainer.status()).ledger, num_groups


def _share_again(num_again: int, num_calls: int) -> float:
    """Of the drawn tokens in prompts: an episode's calls have none, those of one answer, of two."""
    return num_again / max(1.0, num_calls * TOKENS * sum(range(TURNS)) / TURNS)


def figures(looks: list[Look]) -> dict[str, float]:
    """Of the time in which as many episodes are open as there are places for."""
    full = [one for one in looks if one.num_playing >= NUM_OPEN]
    settled = [one for one in full if one.at > full[0].at + 10.0]  # all engines have as many samples as they can run
    playing = [one.num_playing for one in looks]
    assert settled, f"{NUM_OPEN} episodes were never open for 10 s; each second there were {playing}"
    first, last = settled[0], settled[-1]
    seconds = last.at - first.at
    return {
        "episodes": min(one.num_playing for one in settled),
        "seconds": round(seconds, 1),
        "busy": round((last.num_made - first.num_made) / (NUM_WORKERS * SLOTS * TOKENS_PER_S * seconds), 3),
        "manager_cores": round((last.manager_s - first.manager_s) / seconds, 3),
        "manager_mb": round(first.manager_bytes / 1e6, 1),
        "manager_mb_gained": round((last.manager_bytes - first.manager_bytes) / 1e6, 1),
        "hosts_mb": round(first.hosts_bytes / 1e6, 1),
        "hosts_mb_gained": round((last.hosts_bytes - first.hosts_bytes) / 1e6, 1),
        "computed_again": round(_share_again(last.num_again - first.num_again, last.num_calls - first.num_calls), 4),
    }


def test_engines_stay_busy_while_the_tools_of_five_hundred_episodes_sleep(tmp_path, capsys):
    looks, ledger, num_groups = run_loop(play(tmp_path))
    again = _share_again(ledger["tokens_reprefilled"], ledger["calls"])
    found = {**figures(looks), "computed_again_in_all": round(again, 4)}
    with capsys.disabled():
        print(json.dumps(found))
    assert num_groups * SAMPLES == EPISODES_A_ROUND * ROUNDS
    assert ledger["calls"] == EPISODES_A_ROUND * ROUNDS * TURNS
    assert ledger["tokens_arrived"] == ledger["tokens_kept"] == EPISODES_A_ROUND * ROUNDS * TURNS * TOKENS
    assert found["seconds"] > 30.0
    assert found["busy"] > 0.9
    assert found["manager_cores"] < 0.5
    assert again < 0.2, "calls go back to the worker that has what was said before"
    assert found["manager_mb_gained"] < 30.0
    assert found["hosts_mb_gained"] < 30.0
