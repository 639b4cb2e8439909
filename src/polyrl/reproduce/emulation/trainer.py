"""The trainer of an emulated run: the client's statements, its own workers, and steps that only take time.

Rules it keeps, as the simulator's trainer model does: micro-batches of whole groups; as many devices train as local
workers have given theirs; a step ends when its round is closed and all of it is trained; then it publishes and asks for
the next. Its own workers are real ones in this process, with emulated engines.

It leaves out a model: versions are numbers.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from polyrl.client import Fleet, Group
from polyrl.engines.emulated import EmulatedEngine
from polyrl.engines.engine import Weights
from polyrl.ids import Version
from polyrl.reproduce.emulation.scale import Scale, engine_config
from polyrl.scheduling.core.events import Duty
from polyrl.sim.scenario import Scenario
from polyrl.wire.dial import Dialer
from polyrl.worker.agent import WorkerAgent, WorkerOptions

_LEAVES_S = 2.0


class OwnDevices:
    """The trainer's devices: which of them train, and the engines on all of them."""

    def __init__(self, scenario: Scenario, scale: Scale) -> None:
        self._switch_s = scale.real_s(scenario.trainer.switch_s)
        self._width = scenario.first_width
        config = engine_config(scenario, scale, local=True)
        self.engines = [EmulatedEngine(config) for _ in range(scenario.trainer.local_workers)]
        self._training: dict[int, None] = {}
        self.changed = asyncio.Event()

    @property
    def share_that_trains(self) -> float:
        return len(self._training) / len(self.engines) if self.engines else 1.0

    async def install(self, version: int) -> None:
        for engine in self.engines:
            await engine.install(Weights(Version(version), in_place=True))

    @asynccontextmanager
    async def working(self, make_dialer: Callable[[], Dialer]) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for number, engine in enumerate(self.engines):
                await stack.enter_async_context(self._one_working(number, engine, make_dialer()))
            yield

    @asynccontextmanager
    async def _one_working(self, number: int, engine: EmulatedEngine, dialer: Dialer) -> AsyncIterator[None]:
        async def set_duty(duty: Duty) -> None:
            if duty == "generating":
                self._training.pop(number, None)
            await asyncio.sleep(self._switch_s)
            if duty == "training":
                self._training[number] = None
                self.changed.set()

        options = WorkerOptions(
            f"local{number + 1}", is_local=True, relays=False, drain_deadline_s=_LEAVES_S, num_devices=self._width
        )
        agent = WorkerAgent(engine, dialer, options, set_duty=set_duty)
        task = asyncio.create_task(agent.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class EmulatedTrainer:
    def __init__(self, scenario: Scenario, scale: Scale, fleet: Fleet, devices: OwnDevices) -> None:
        self._trainer, self._publish_s = scenario.trainer, scale.real_s(scenario.network.publish_s)
        self._s_per_token = scenario.trainer.s_per_token / scenario.training_speed
        self._prompt_tokens = [domain.prompt_tokens for domain in scenario.domains]
        self._scale, self._fleet, self._devices = scale, fleet, devices
        self._waiting: deque[Group] = deque()
        self._is_closed = False
        self._busy_until = 0.0
        self.tokens_trained: list[int] = []
        """Of each step, with prompts, in the scenario's own tokens."""

    async def train(self, step: int) -> None:
        """Train one step, and publish the version that it makes."""
        self._is_closed = False
        self.tokens_trained.append(0)
        self._busy_until = asyncio.get_running_loop().time()
        gathering = asyncio.create_task(self._gather(step))
        try:
            while await self._train_some(step):
                pass
            await gathering
        finally:
            gathering.cancel()
        await self._fleet.step_done(step)
        await self._devices.install(step + 1)
        await asyncio.sleep(self._publish_s)
        await self._fleet.publish(step + 1)

    async def _gather(self, step: int) -> None:
        async for group in self._fleet.round(step):
            self._waiting.append(group)
            self._devices.changed.set()
        self._is_closed = True
        self._devices.changed.set()

    async def _train_some(self, step: int) -> bool:
        """Train a micro-batch when there is one and devices for it, or update the weights: that was all."""
        has_waited = False
        while True:
            self._devices.changed.clear()
            share = self._devices.share_that_trains
            if share > 0.0 and self._is_closed and not self._waiting:
                await self._pass(self._trainer.optimizer_s, at_once=not has_waited)
                return False
            batch = self._next_batch() if share > 0.0 else []
            if batch:
                break
            await self._devices.changed.wait()
            has_waited = True
        await self._fleet.take(*batch)
        tokens = sum(self._tokens_of(group) for group in batch)
        self.tokens_trained[-1] += tokens
        seconds = self._trainer.micro_batch_fixed_s + tokens * self._s_per_token / share
        await self._pass(seconds, at_once=not has_waited)
        await self._fleet.micro_batch_done(step)
        return True

    def _next_batch(self) -> list[Group]:
        """Enough groups for a micro-batch; fewer only when no more will come."""
        enough = self._trainer.micro_batch_samples
        if not self._is_closed and sum(len(group.samples) for group in self._waiting) < enough:
            return []
        batch: list[Group] = []
        while self._waiting and sum(len(group.samples) for group in batch) < enough:
            batch.append(self._waiting.popleft())
        return batch

    def _tokens_of(self, group: Group) -> int:
        answers = sum(len(sample.tokens) for sample in group.samples) * self._scale.tokens_per_token
        return answers + len(group.samples) * self._prompt_tokens[group.origin.domain]

    async def _pass(self, seconds: float, *, at_once: bool) -> None:
        """Be busy for so many of the scenario's seconds, from now on, or from when we were busy last."""
        now = asyncio.get_running_loop().time()
        self._busy_until = (self._busy_until if at_once else now) + self._scale.real_s(seconds)
        await asyncio.sleep(max(0.0, self._busy_until - now))
