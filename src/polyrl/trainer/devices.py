"""Whose turn it is on the trainer's own devices: the engine's, or training's. Inside a step they change hands.

    the scheduler says so -> a local worker's agent calls `turn_to` -> the engine sleeps or wakes
    the loop calls `train(work)` -> waits for training's turn -> runs it in a thread

Rules kept here: the two never run at the same time, and whoever works ends first. Without a local engine it is always
training's turn.
"""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, Protocol, TypeVar

T = TypeVar("T")
Duty = Literal["generating", "training"]


class Sleeper(Protocol):
    """An engine that can give its memory back and have it again."""

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


class Devices:
    """`engine` is the local one, if there is one."""

    def __init__(self, engine: Sleeper | None = None) -> None:
        self._engine = engine
        self._may_train = asyncio.Event()
        self._at_work = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self.duty: Duty = "training"
        self.waited_s = 0.0
        """How long `train` has waited for its turn, in all."""
        self.trained_s = 0.0
        if engine is None:
            self._may_train.set()
        else:
            self.duty = "generating"

    async def turn_to(self, duty: Duty) -> None:
        """Returns when the devices do that."""
        if self._engine is None:
            return
        if duty == "training":
            await self._engine.sleep()
            self.duty = duty
            self._may_train.set()
            return
        self._may_train.clear()
        async with self._at_work:
            self.duty = duty
            await self._engine.wake()

    async def until_my_turn(self) -> None:
        """Wait for training's turn. It may pass again before anything is done with it."""
        began = time.monotonic()
        await self._may_train.wait()
        self.waited_s += time.monotonic() - began

    async def train(self, work: Callable[[], T]) -> T:
        """Run `work` in the trainer's thread when it is training's turn."""
        began = time.monotonic()
        while True:
            await self._may_train.wait()
            async with self._at_work:
                if not self._may_train.is_set():
                    continue
                started = time.monotonic()
                self.waited_s += started - began
                try:
                    return await asyncio.get_running_loop().run_in_executor(self._thread, work)
                finally:
                    self.trained_s += time.monotonic() - started

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
