"""A fleet of workers whose servers are killed, one after the other, while they write. The workers are not."""

import asyncio
import os
import random
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.integration.live import Live, is_connected, manager, play_round, trainer, until

from polyrl.client import Group, Prompt
from polyrl.engines.served.engine import ServedEngine
from polyrl.engines.served.process import members
from polyrl.manager.settings import ManagerSettings, StreamSettings
from polyrl.manager.status import status
from polyrl.scheduling.core.parameters import DomainData, FleetRules, RoundsConfig, SchedulerConfig
from polyrl.wire.dial import Dialer
from polyrl.wire.frames import Sampling
from polyrl.worker.agent import Left, WorkerAgent, WorkerOptions

SETTINGS = ManagerSettings(stream=StreamSettings(flush_interval_s=0.02, heartbeat_interval_s=0.2))
SAMPLES_PER_PROMPT = 4
PROMPTS_PER_STEP = 2
NUM_PROMPTS = 50
Expected = Callable[[list[int], int], list[int]]
"""What a server that nobody kills writes after this prompt."""


def prompt_of(_domain: int, prompt: int, _epoch: int) -> Prompt:
    return Prompt([5, 6, 7, 8 + prompt], Sampling(temperature=0.0, ignore_eos=True))


class Scenario:
    """`num_kills` deaths of servers; rounds go on until all have happened, and every answer is compared."""

    def __init__(
        self,
        engines: dict[str, ServedEngine],
        expected: Expected,
        *,
        num_kills: int,
        num_tokens: int,
        patience_s: float,
    ) -> None:
        self.engines, self.expected = engines, expected
        self.num_kills, self.num_tokens, self.patience_s = num_kills, num_tokens, patience_s
        self.num_killed = 0
        self.num_samples = 0
        self._rng = random.Random(1)

    async def play(self, run_dir: Path) -> None:
        async with asyncio.timeout(self.patience_s), manager(run_dir, SETTINGS) as live:
            agents = {name: self._agent(live, name) for name in self.engines}
            lives = [asyncio.create_task(one.run()) for one in agents.values()]
            for name, life in zip(agents, lives, strict=True):
                await until(
                    lambda n=name, one=life: one.done() or is_connected(live, n), "it is there", self.patience_s
                )
                assert not life.done(), life.result()
            async with trainer(live, self._config(), prompts=prompt_of) as fleet:
                await fleet.publish(0)
                killer = asyncio.create_task(self._kill_often(live))
                step = 0
                while not killer.done() or step == 0:
                    self._check(await play_round(fleet, step))
                    step += 1
                killer.result()
                for one in self.engines.values():
                    await until(lambda one=one: not one.stats().down, "every server is back", self.patience_s)
                self._check(await play_round(fleet, step))
                self._check_ledger(live)
            await self._leave(agents.values(), lives)

    def _agent(self, live: Live, name: str) -> WorkerAgent:
        return WorkerAgent(self.engines[name], Dialer(live.url, live.token("worker")), WorkerOptions(name=name))

    def _config(self) -> SchedulerConfig:
        return SchedulerConfig(
            domains=(DomainData(name="d", prompts_per_step=PROMPTS_PER_STEP, num_prompts=NUM_PROMPTS),),
            max_new_tokens=self.num_tokens,
            max_staleness=1000,
            rounds=RoundsConfig(samples_per_prompt=SAMPLES_PER_PROMPT),
            fleet_rules=FleetRules(heartbeat_timeout_s=20.0),
        )

    def _num_down(self, live: Live) -> int:
        return sum(one.state == "down" for one in status(live.service.lobby, 0.0).workers)

    async def _kill_often(self, live: Live) -> None:
        while self.num_killed < self.num_kills:
            busy = [one for one in self.engines.values() if _writes(one)]
            if not busy:
                await asyncio.sleep(0.01)
                continue
            victim = self._rng.choice(busy)
            await asyncio.sleep(self._rng.random() * 0.3)
            if victim.pid is None or not _writes(victim):
                continue
            num_outages = victim.stats().num_outages
            os.kill(self._rng.choice(_vital(victim.pid)), signal.SIGKILL)
            self.num_killed += 1
            while victim.stats().num_outages == num_outages:
                await asyncio.sleep(0.01)
            await until(lambda: self._num_down(live) > 0, "the manager knows that it is down", self.patience_s)

    def _check(self, groups: list[Group]) -> None:
        assert len(groups) == PROMPTS_PER_STEP
        for group in groups:
            assert len(group.samples) == SAMPLES_PER_PROMPT
            for sample in group.samples:
                prompt = prompt_of(0, group.origin.prompt, 0).tokens
                assert sample.tokens.tolist() == self.expected(list(prompt), self.num_tokens), sample.name
                assert sample.finish == "length"
                self.num_samples += 1

    def _check_ledger(self, live: Live) -> None:
        scheduler = live.service.lobby.need_run().scheduler
        ledger = scheduler.ledger
        assert ledger.samples_discarded == {}
        assert ledger.prompts_dropped == {}
        assert {name: (line.num_joins, line.num_losses) for name, line in ledger.workers.items()} == dict.fromkeys(
            self.engines, (1, 0)
        )
        assert live.refused == {}, live.refused
        assert ledger.moves.get("engine_failed", 0) > 0
        assert sum(one.stats().num_outages for one in self.engines.values()) == self.num_kills
        assert all(one.num_misstamped == 0 for one in self.engines.values())

    async def _leave(self, agents: Iterable[WorkerAgent], lives: list[asyncio.Task[Left]]) -> None:
        for one in agents:
            one.drain("the test is over")
        for left in await asyncio.gather(*lives):
            assert left.ok, left


def _writes(one: ServedEngine) -> bool:
    """In mid-answer: this server has written, and has more to write."""
    return one._keeper.wrote and not one.stats().down and one.stats().num_running > 0


def _vital(group: int) -> list[int]:
    """Processes of a server that it cannot do without."""
    idle = (b"resource_tracker", b"sleep")
    return [pid for pid in members(group) if not any(one in Path(f"/proc/{pid}/cmdline").read_bytes() for one in idle)]
