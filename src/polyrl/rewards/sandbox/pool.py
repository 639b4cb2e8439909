"""A warm pool of zygotes: bounded, at most one program in each, and replaced when one dies or misbehaves.

Rules kept here: a zygote that broke is replaced at once, whether or not a program waits. Zygotes that cannot be
started are tried again, with pauses; programs that wait for one meanwhile fail, and say why.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

from polyrl.rewards.sandbox.slot import Slot, SlotBroke

_PAUSES_S = (0.0, 0.1, 0.5, 2.0)
_WAIT_S = 30.0
"""How long a program waits for a zygote while none can be started."""


class ZygotePool:
    """Zygotes, idle or in use. `make` makes one that is not started yet."""

    def __init__(self, size: int, make: Callable[[], Slot]) -> None:
        self.size, self._make = size, make
        self._idle: deque[Slot] = deque()
        self._all: set[Slot] = set()
        self._waiting: deque[asyncio.Future[Slot]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._failure = ""
        """Why the last zygote could not be started; empty if it could."""
        self.num_replaced = 0

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    @property
    def num_alive(self) -> int:
        return len(self._all)

    async def open(self) -> None:
        """Start all zygotes. Raises SlotBroke if the first cannot be started."""
        await self._start_one()
        await asyncio.gather(*(self._start_one() for _ in range(self.size - 1)))

    async def close(self) -> None:
        self._is_closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(one.close() for one in self._all))
        self._all.clear()
        self._idle.clear()
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_exception(SlotBroke("the sandbox was closed"))

    @asynccontextmanager
    async def slot(self, within_s: float) -> AsyncIterator[Slot]:
        """Borrow a zygote. After any exception inside, it is killed and replaced. Raises SlotBroke; TimeoutError."""
        async with asyncio.timeout(within_s):
            slot = await self._take()
        try:
            yield slot
        except BaseException:
            self._replace(slot)
            raise
        self._give(slot)

    async def _take(self) -> Slot:
        if self._idle:
            return self._idle.popleft()
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        try:
            while True:
                try:
                    async with asyncio.timeout(_WAIT_S):
                        return await asyncio.shield(waiting)
                except TimeoutError:
                    if not self._all:  # nobody is busy either: none can be started
                        raise SlotBroke(f"no sandbox can be started: {self._failure}") from None
        except BaseException:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                self._give(waiting.result())
            waiting.cancel()
            raise

    def _give(self, slot: Slot) -> None:
        if self._is_closed:
            return
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(slot)
                return
        self._idle.append(slot)

    def _replace(self, slot: Slot) -> None:
        self._all.discard(slot)
        self.num_replaced += 1
        self._spawn(self._swap(slot))

    async def _swap(self, slot: Slot) -> None:
        await slot.close()
        attempt = 0
        while not self._is_closed:
            await asyncio.sleep(_PAUSES_S[min(attempt, len(_PAUSES_S) - 1)])
            try:
                await self._start_one()
                return
            except SlotBroke:
                attempt += 1

    async def _start_one(self) -> None:
        slot = self._make()
        try:
            await slot.start()
        except BaseException as error:
            self._failure = str(error)
            await slot.close()
            raise
        self._failure = ""
        self._all.add(slot)
        self._give(slot)

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        if self._is_closed:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
