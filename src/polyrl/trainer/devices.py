"""Takes turns on the trainer's own devices: the engine generates, or the trainer trains. Turns change within a step.

    the scheduler decides -> a local worker's agent calls `set_duty` -> the engine sleeps or wakes
    the loop calls `train(work)` -> waits for training's turn -> runs it in a thread
    the loop validates -> `for_validation` -> the engine is awake, whatever the turn

Rules kept here: the two never run at the same time, and running work ends before the turn changes, even if its caller
is cancelled. An update of the weights keeps its turn (`held`) until the weights have their new version's number, and
for good if they never get it: the engine never wakes with weights of another version than it names. Without a local
worker it is always training's turn.
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


class Devices:
    """The turns of these devices. `engine` runs on them, if there is one; `generates`: it also serves the fleet, and
    takes turns with training."""

    def __init__(self, engine: Sleeper | None = None, *, generates: bool = True) -> None:
        self._engine = engine
        self._validates = False
        self._may_train = asyncio.Event()
        self._at_work = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self.duty: Duty = "training"
        self._turns_s = 0.0
        """The seconds of training's past turns."""
        self._turn_began = 0.0
        self.trained_s = 0.0
        if engine is not None and generates:
            self.duty = "generating"
        else:
            self._begin_turn()

    @property
    def turn_s(self) -> float:
        """The seconds that have been training's turn. Seconds beyond `trained_s` had nothing to train."""
        return self._turns_s + (time.monotonic() - self._turn_began if self._may_train.is_set() else 0.0)

    def _begin_turn(self) -> None:
        if not self._may_train.is_set():
            self._turn_began = time.monotonic()
            self._may_train.set()

    def _end_turn(self) -> None:
        self._turns_s = self.turn_s
        self._may_train.clear()

    async def set_duty(self, duty: Duty) -> None:
        """Change the turn. Returns when the devices have changed over."""
        if self._engine is None:
            return
        if duty == "training":
            if not self._validates:
                await self._engine.sleep()
            self.duty = duty
            self._begin_turn()
            return
        self._end_turn()
        async with self._at_work:
            self.duty = duty
            await self._engine.wake()

    async def until_my_turn(self) -> None:
        """Wait for training's turn. The turn may have passed again before the caller uses it."""
        await self._may_train.wait()

    async def train(self, work: Callable[[], T]) -> T:
        """Run `work` in the trainer's thread, in training's turn. It must not change the weights."""
        await self._take_turn()
        try:
            return await self.run(work)
        finally:
            self._at_work.release()

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Wait for training's turn, and keep it within this context. After an exception it is never given back."""
        await self._take_turn()
        yield
        self._at_work.release()

    async def _take_turn(self) -> None:
        while True:
            await self._may_train.wait()
            await self._at_work.acquire()
            if self._may_train.is_set():
                return
            self._at_work.release()

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in the trainer's thread. The caller holds training's turn (`held`)."""
        began = time.monotonic()
        try:
            return await finish_first(asyncio.get_running_loop().run_in_executor(self._thread, work))
        finally:
            self.trained_s += time.monotonic() - began

    @asynccontextmanager
    async def for_validation(self) -> AsyncIterator[None]:
        """Keep the engine awake within this context. Nothing may be trained meanwhile; a change of turn takes effect
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
