"""Environments' code off the host's loop: a thread an episode, so that code which waits holds up no other episode.

Rules kept here: all code of one episode runs in the same thread, one call after the other, because libraries such as
sqlite3 insist on it. Code that never returns keeps its thread, which ends with the process. If it waits, that costs
nothing; if it computes, it takes its share of the interpreter from all other episodes, so such threads are told apart.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from polyrl.hosts.beside import place_of

_Work = tuple[Callable[[], Any], asyncio.Future[Any], asyncio.AbstractEventLoop]


class EpisodeThread:
    """One thread, begun with its first call. `end` lets it go."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._clock: int | None = None
        """The thread's CPU clock; None where the system has none."""
        self._is_in_call = False
        self._computed_s = 0.0
        """When it was let go."""

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
        self._computed_s = self._now()
        self._work.put(None)

    @property
    def is_busy(self) -> bool:
        return self._is_in_call

    def has_run_away(self, after_s: float) -> bool:
        """Return whether it was let go within a call, and has computed on for so long."""
        return self._is_in_call and self._now() - self._computed_s >= after_s

    def place(self) -> str:
        return place_of(0 if self._thread is None else self._thread.ident or 0)

    def _now(self) -> float:
        if self._clock is None:
            return time.monotonic()
        try:
            return time.clock_gettime(self._clock)
        except OSError:  # the thread has ended
            return self._computed_s

    def _serve(self) -> None:
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
        while (work := self._work.get()) is not None:
            call, done, loop = work
            self._is_in_call = True
            try:
                value, error = call(), None
            except BaseException as raised:  # noqa: BLE001  SystemExit of foreign code is a failure of its episode
                value, error = None, raised
            self._is_in_call = False
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
