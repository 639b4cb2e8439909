"""Notices of all kinds, while a worker lives: signals, and the metadata services that apply here."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from polyrl.worker.spot import answers, watching

log = logging.getLogger("polyrl.worker")


@asynccontextmanager
async def noticing(choice: str, notice_s: float, drain: watching.Tell) -> AsyncIterator[None]:
    """Call `drain` with every notice, until the block ends. `notice_s` is what SIGTERM means, if a person said so.

    Raises UserError for an address of a metadata service that is none.
    """
    found = answers.places(choice, os.environ, watching.read_firmware() if choice == "auto" else "")
    clouds: dict[answers.NoticePlace, str] = {
        place: watching.address_of(place) for place in answers.CLOUDS if place in found
    }
    if found:
        log.info("spot notices: %s", ", ".join(found))

    def signalled(name: str) -> None:
        notice = answers.signalled(found, os.environ, time.time())
        why = name if notice.why == name else f"{name}: {notice.why}"
        drain(why, notice_s or watching.left_to_tell(notice.left_s))

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, signalled, "SIGTERM")
    if "slurm" in found:
        loop.add_signal_handler(signal.SIGUSR1, signalled, "SIGUSR1")
    watches = [asyncio.create_task(watching.watch(place, address, drain)) for place, address in clouds.items()]
    try:
        yield
    finally:
        for watch in watches:
            watch.cancel()
        for ended in await asyncio.gather(*watches, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
