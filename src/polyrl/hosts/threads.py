"""Environments' code off the host's loop: a thread an episode, so that code which waits holds up nobody else.

Rules kept here: all code of one episode runs in the same thread, one call after the other, because libraries such as
sqlite3 insist on it. Code that never returns keeps its thread and nothing else: the thread ends with the process.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any

_Work = tuple[Callable[[], Any], asyncio.Future[Any], asyncio.AbstractEventLoop]


class EpisodeThread:
    """One thread, begun with its first call. `end` lets it go."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(self, call: Callable[[], Any]) -> Any:
        """Return what the call returns, or raise what it raises."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        self._work.put((call, done, loop))
        return await done

    def end(self) -> None:
        self._work.put(None)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            call, done, loop = work
            try:
                value, error = call(), None
            except BaseException as raised:  # noqa: BLE001  SystemExit of foreign code is a failure of its episode
                value, error = None, raised
            try:
                loop.call_soon_threadsafe(_tell, done, value, error)
            except RuntimeError:  # the loop is closed: nobody waits any more
                return


def _tell(done: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(value)
    elif isinstance(error, Exception):
        done.set_exception(error)
    else:
        done.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
