"""Work that must not stop half-way: cancelling the task that waits for it does not cancel the work itself.

`finish` lets a cancelled task go at once, and the work goes on; `finish_first` holds the task until the work has ended.
"""

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any, TypeVar

log = logging.getLogger("polyrl.engines")

Result = TypeVar("Result")
_going_on: set[asyncio.Future[Any]] = set()
"""Work that no task waits for any more. The event loop alone would not keep a reference to it."""


async def finish(work: Awaitable[Result]) -> Result:
    """Wait for the work. It goes on if the caller is cancelled; a later error is a line in the log."""
    future = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if not future.done():
            _going_on.add(future)
            future.add_done_callback(_finished)
        raise


async def finish_first(work: Awaitable[Result]) -> Result:
    """Wait for it, also when cancelled: a thread cannot be stopped, and what it uses is not free before it ends."""
    future = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        _finished(future)
        raise cancelled
    return future.result()


def _finished(future: asyncio.Future[Any]) -> None:
    _going_on.discard(future)
    if not future.cancelled() and (error := future.exception()) is not None:
        log.info("its caller no longer waited, and it failed: %s", error)
