"""Answers that wait for a model, run together: as many as there are, up to a bound, in a thread.

Rules kept here: one batch computes at a time, and what comes meanwhile waits for the next. An answer that would be
alone waits a few milliseconds for others. An error is that of all answers of its batch, and of no other.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Batches(Generic[Item]):
    """`compute` returns a number for each item; it is called in a thread of its own, always the same."""

    def __init__(self, compute: Callable[[Sequence[Item]], list[float]], size: int, wait_s: float) -> None:
        self._compute, self._size, self._wait_s = compute, size, wait_s
        self._waiting: list[tuple[Item, asyncio.Future[float]]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._working: asyncio.Task[None] | None = None

    async def score(self, item: Item) -> float:
        """Return an item's number. Raises what its batch raised."""
        answer: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, answer))
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())
        return await answer

    async def close(self) -> None:
        if self._working is not None:
            self._working.cancel()
            await asyncio.gather(self._working, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            if len(self._waiting) < self._size:
                await asyncio.sleep(self._wait_s)
            batch = [one for one in self._waiting[: self._size] if not one[1].done()]
            del self._waiting[: self._size]
            if not batch:
                continue
            try:
                found = await loop.run_in_executor(self._thread, self._compute, [item for item, _ in batch])
                for (_, answer), number in zip(batch, found, strict=True):
                    if not answer.done():
                        answer.set_result(number)
            except Exception as error:  # noqa: BLE001  of a model, whatever it is: each answer tells it
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
