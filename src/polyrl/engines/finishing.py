"""Work that must not stop half-way: a break of a connection cancels whoever waits for it, and not the work itself."""

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any, TypeVar

log = logging.getLogger("polyrl.engines")

Result = TypeVar("Result")
_going_on: set[asyncio.Future[Any]] = set()
"""What nobody waits for any more. The event loop alone would not keep it."""


async def finish(work: Awaitable[Result]) -> Result:
    """Wait for it. Who stops waiting stops nothing; what goes wrong then is a line in the log."""
    future = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        if not future.done():
            _going_on.add(future)
            future.add_done_callback(_finished)
        raise


def _finished(future: asyncio.Future[Any]) -> None:
    _going_on.discard(future)
    if not future.cancelled() and (error := future.exception()) is not None:
        log.info("nobody waited for it any more, and it failed: %s", error)
