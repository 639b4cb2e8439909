"""Kill the host, the worker or the manager of episodes under way, between any two calls or within one: a deterministic
environment comes to the same tokens and the same rewards, and every token is accounted for."""

import asyncio
import random
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.chaos.echo_host import TURNS
from tests.chaos.fleet import Fleet, Process

from polyrl.client import Group, Prompt, connect
from polyrl.run.event_loop import run_loop
from polyrl.scheduling.core.parameters import (
    DomainData,
    EnvironmentRules,
    FleetRules,
    RoundsConfig,
    SchedulerConfig,
)

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]

CONFIG = SchedulerConfig(
    domains=(DomainData(name="d", prompts_per_step=8, num_prompts=100, environment="echo"),),
    max_new_tokens=512,
    rounds=RoundsConfig(samples_per_prompt=4),
    fleet_rules=FleetRules(heartbeat_timeout_s=4.0),
    environments=EnvironmentRules(host_timeout_s=4.0),
)
ENGINE = ["tokens_per_s=100", "slots=16", "median_tokens=40", "sigma=0.6"]
Told = dict[str, tuple[list[int], float]]


class HostedFleet(Fleet):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 2, ENGINE)
        self.hosts: dict[str, Process] = {}

    async def start_host(self, name: str) -> None:
        script = Path(__file__).with_name("echo_host.py")
        argv = [
            sys.executable,
            str(script),
            f"http://127.0.0.1:{self.port}",
            str(self.run_dir / "host.token"),
            name,
            "0.2",
        ]
        host = self.hosts[name] = Process(argv, self.folder / f"{name}.log")
        await host.start()

    async def __aexit__(self, *_: object) -> None:
        for host in self.hosts.values():
            await host.kill()
        await super().__aexit__()


def told(groups: list[Group]) -> Told:
    return {one.name: (one.tokens.tolist(), one.reward) for group in groups for one in group.samples}


async def play(folder: Path, seed: int | None) -> tuple[Told, dict[str, object]]:
    """Two rounds; with a seed, somebody is killed all the time."""
    folder.mkdir()
    groups: list[Group] = []
    async with AsyncExitStack() as stack:
        fleet = HostedFleet(folder)
        await stack.enter_async_context(fleet)
        for name in ("h0", "h1"):
            await fleet.start_host(name)
        url = f"http://127.0.0.1:{fleet.port}"
        prompts = lambda domain, prompt, epoch: Prompt([])  # noqa: E731
        trainer = await stack.enter_async_context(connect(url, fleet.admin_token, CONFIG, prompts=prompts))
        torment = asyncio.create_task(_torment(fleet, seed)) if seed is not None else None
        for step in range(2):
            await trainer.publish(step)
            async for group in trainer.round(step):
                groups.append(group)
                await trainer.take(group)
            await trainer.step_done(step)
            await trainer.settled()
        if torment is not None:
            torment.cancel()
            await asyncio.wait([torment])
            if not torment.cancelled():
                torment.result()
            await fleet.until_listening()
        status = await trainer.status()
        return told(groups), status.ledger


async def _torment(fleet: HostedFleet, seed: int) -> None:
    rng = random.Random(seed)
    while True:
        await asyncio.sleep(rng.uniform(0.5, 1.5))
        draw = rng.random()
        if draw < 0.45:
            name = rng.choice(list(fleet.hosts))
            await fleet.hosts[name].kill()
            await fleet.start_host(name)
        elif draw < 0.75:
            name = rng.choice(fleet.names)
            await fleet.workers[name].kill()
            await fleet.workers[name].start()
        else:
            await fleet.restart_manager(0.3)


def test_episodes_come_to_the_same_end_whoever_is_killed(tmp_path):
    async def scenario() -> None:
        expected, quiet = await play(tmp_path / "quiet", None)
        assert len(expected) == 64
        found, ledger = await play(tmp_path / "killed", 1)
        assert found == expected
        assert quiet["calls"] == 64 * TURNS
        assert quiet["tokens_kept"] == ledger["tokens_kept"]
        discarded = sum(ledger["tokens_discarded"].values())  # type: ignore[attr-defined]
        assert ledger["tokens_arrived"] == ledger["tokens_kept"] + discarded  # type: ignore[operator]
        assert ledger["episodes_begun"] > 64  # type: ignore[operator]

    run_loop(scenario())
