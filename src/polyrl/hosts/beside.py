"""Two loops in a host: one speaks with the manager, the other runs the environment, its harnesses and the front.

An async environment that computes, or waits without `await`, stops its loop and all episodes in it, but not the host's
word that it lives. The watch names the line where it stands, and at a limit ends the process: its episodes begin again
elsewhere. Otherwise each of them would be over its time, and scored for what it did not do.
"""

import asyncio
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")

WARN_AFTER_S = 5.0
_LOOK_EVERY_S = 0.5
_OURS = str(Path(__file__).parent)
_LIBRARY = sysconfig.get_paths()["stdlib"]


async def run_beside(work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Run a coroutine in a loop and a thread of its own, and return what it returns, or raise what it raises."""
    here = asyncio.get_running_loop()
    done: asyncio.Future[Result] = here.create_future()

    def tell(value: Any, error: BaseException | None) -> None:
        if not done.done():
            if error is None:
                done.set_result(value)
            else:
                done.set_exception(error)

    def serve() -> None:
        try:
            value, error = asyncio.run(work()), None
        except Exception as raised:  # noqa: BLE001  it is raised there
            value, error = None, raised
        here.call_soon_threadsafe(tell, value, error)

    threading.Thread(target=serve, name="host", daemon=True).start()
    return await done


async def run_in(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine in another thread's loop, and wait for it here."""
    if loop is asyncio.get_running_loop():
        return await work
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


def place_of(thread: int) -> str:
    """Return where a thread stands: the innermost line that is neither Python's nor ours."""
    frame = sys._current_frames().get(thread)
    stack = traceback.extract_stack(frame) if frame is not None else []
    theirs = [
        one for one in stack if not one.filename.startswith((_OURS, _LIBRARY, "<")) and "uvloop" not in one.filename
    ]
    at = (theirs or stack)[-1:]
    return f"{at[0].filename}:{at[0].lineno} ({at[0].name})" if at else "an unknown place"


class LoopWatch:
    """Watches a loop from another one."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, thread: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`thread` is the identifier of the thread that the loop runs in."""
        self._loop, self._thread, self._clock = loop, thread, clock
        self._probed_at: float | None = None

    @property
    def stuck_s(self) -> float:
        """How long the loop has not come to what it was asked."""
        return 0.0 if self._probed_at is None else self._clock() - self._probed_at

    def probe(self) -> None:
        if self._probed_at is None:
            self._probed_at = self._clock()
            self._loop.call_soon_threadsafe(self._answered)

    def _answered(self) -> None:
        self._probed_at = None

    async def until_stuck(self, limit_s: Callable[[], float], warn: Callable[[float, str], None]) -> tuple[float, str]:
        """Return when the loop has been stuck for `limit_s`, for how long and where. `warn` is told earlier, once."""
        has_warned = False
        while True:
            self.probe()
            await asyncio.sleep(_LOOK_EVERY_S)
            stuck_s = self.stuck_s
            if stuck_s >= limit_s():
                return stuck_s, place_of(self._thread)
            if stuck_s >= WARN_AFTER_S and not has_warned:
                warn(stuck_s, place_of(self._thread))
            has_warned = stuck_s >= WARN_AFTER_S
