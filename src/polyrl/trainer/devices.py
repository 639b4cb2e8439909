"""The trainer's own devices generate or train; this duty changes within a step.

    the scheduler decides -> a local worker's agent calls `set_duty` -> the engine sleeps or wakes
    the loop calls `train(work)` -> waits until the devices train -> runs it in a thread
    the loop validates -> `for_validation` -> the engine is awake, whatever the duty

Rules kept here: the two never run at the same time, and running work ends before the duty changes, even if its caller
is cancelled. An update of the weights keeps the devices (`held`) until the weights have their new version's number, and
for good if they never get it: the engine never wakes with weights of another version than it names. Without a local
worker the devices always train.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

from polyrl.engines.finishing import finish_first
from polyrl.scheduling.core.events import Duty

T = TypeVar("T")


class Sleeper(Protocol):
    """An engine that can free its memory and take it back."""

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


class TrainingClock:
    """Whether the devices' duty is training, and for how long it has been. `on_change` hears of every change."""

    def __init__(self, on_change: Callable[[bool], None] | None = None) -> None:
        self._is_on = asyncio.Event()
        self._past_s = 0.0
        self._began = 0.0
        self._on_change = on_change

    @property
    def is_on(self) -> bool:
        return self._is_on.is_set()

    @property
    def seconds(self) -> float:
        """The seconds for which training has been the duty."""
        return self._past_s + (time.monotonic() - self._began if self.is_on else 0.0)

    def begin(self) -> None:
        if not self.is_on:
            self._began = time.monotonic()
            self._is_on.set()
            self._tell()

    def end(self) -> None:
        if self.is_on:
            self._past_s = self.seconds
            self._is_on.clear()
            self._tell()

    async def wait(self) -> None:
        await self._is_on.wait()

    def _tell(self) -> None:
        if self._on_change is not None:
            self._on_change(self.is_on)


class Devices:
    """The trainer's devices and their duty. `engine` runs on them, if there is one; `generates`: it also serves the
    fleet, and the duty changes between generating and training."""

    def __init__(
        self,
        engine: Sleeper | None = None,
        *,
        generates: bool = True,
        on_duty: Callable[[bool], None] | None = None,
    ) -> None:
        """`on_duty` hears whether the duty is training, when that changes."""
        self._engine = engine
        self._validates = False
        self.training = TrainingClock(on_duty)
        self._at_work = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self.duty: Duty = "training"
        self.trained_s = 0.0
        if engine is not None and generates:
            self.duty = "generating"
        else:
            self.training.begin()

    async def set_duty(self, duty: Duty) -> None:
        """Change the duty. Returns when the devices have changed over."""
        if self._engine is None:
            return
        if duty == "training":
            if not self._validates:
                await self._engine.sleep()
            self.duty = duty
            self.training.begin()
            return
        self.training.end()
        async with self._at_work:
            self.duty = duty
            await self._engine.wake()

    async def train(self, work: Callable[[], T]) -> T:
        """Run `work` in the trainer's thread, while training is the duty. It must not change the weights."""
        await self._take_devices()
        try:
            return await self.run(work)
        finally:
            self._at_work.release()

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Wait until the devices train, and keep them within this context. After an exception they are never given
        back."""
        await self._take_devices()
        yield
        self._at_work.release()

    async def _take_devices(self) -> None:
        while True:
            await self.training.wait()
            await self._at_work.acquire()
            if self.training.is_on:
                return
            self._at_work.release()

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in the trainer's thread. The caller holds the devices (`held`)."""
        began = time.monotonic()
        try:
            return await finish_first(asyncio.get_running_loop().run_in_executor(self._thread, work))
        finally:
            self.trained_s += time.monotonic() - began

    @asynccontextmanager
    async def for_validation(self) -> AsyncIterator[None]:
        """Keep the engine awake within this context. Nothing may be trained meanwhile; a change of duty takes effect
        after it."""
        assert self._engine is not None
        self._validates = True
        try:
            await self._engine.wake()
            yield
        finally:
            self._validates = False
            if self.duty == "training":
                await self._engine.sleep()

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
