"""The reward classes of a process: one object for each class and its arguments, started once, closed at the end.

Rules kept here: an object is made when the first answer needs it, before that answer's time begins. Answers that come
while it starts wait for it, and so do answers beyond its `places`, if it has some. A start that fails fails those
answers alone; the next answer tries again.
"""

import inspect
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import asyncio


class RewardObjects:
    """The objects that a process made of the recipe's classes."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, bytes], asyncio.Future[Any]] = {}
        self.closes = False
        """Whether there is anything to close."""

    async def ready(self, name: str, found: Callable[..., Any], arguments: Mapping[str, Any]) -> Callable[[Any], Any]:
        """Return what is called with an answer: a function with its arguments, or the started object of a class."""
        if not inspect.isclass(found):
            return partial(found, **arguments)
        import asyncio

        key = (name, msgspec.msgpack.encode(arguments, order="deterministic"))
        if key not in self._made:
            self._made[key] = asyncio.ensure_future(self._start(found, arguments))
        try:
            return await asyncio.shield(self._made[key])
        except BaseException:
            self._made.pop(key, None)
            raise

    async def _start(self, found: Callable[..., Any], arguments: Mapping[str, Any]) -> Callable[[Any], Any]:
        made = found(**arguments)
        if hasattr(made, "start"):
            await _finish(made.start())
        self.closes = self.closes or hasattr(made, "close")
        return made

    async def close(self) -> None:
        """Close all objects. Exceptions are printed, and keep no other object open."""
        for future in self._made.values():
            if future.done() and not future.cancelled() and future.exception() is None:
                made = future.result()
                try:
                    if hasattr(made, "close"):
                        await _finish(made.close())
                except Exception:  # noqa: BLE001  a class may raise anything
                    traceback.print_exc()
        self._made.clear()


def places_of(called: Callable[[Any], Any]) -> AbstractAsyncContextManager[Any]:
    """Return what an answer waits for before its time begins: one of the object's `places`, if it has a semaphore."""
    import asyncio

    places = getattr(called, "places", None)
    return places if isinstance(places, asyncio.Semaphore) else nullcontext()


async def _finish(value: Any) -> None:
    if inspect.isawaitable(value):
        await value
