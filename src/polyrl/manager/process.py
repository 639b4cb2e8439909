"""A manager's life: it listens, reads the run that is there, and owns it until it is told to stop.

Its port is open while the run is read, and says how far that is.
"""

import asyncio
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

from polyrl.manager.http import Front, ListenAddress, check_that_it_can_listen
from polyrl.manager.service import Service, check_that_none_runs
from polyrl.manager.serving.texts import Served
from polyrl.manager.settings import ManagerSettings

_GOODBYE = "the manager stops; it can be started again"


async def run_manager(
    run_dir: Path,
    settings: ManagerSettings,
    where: tuple[str, int],
    *,
    tls: ssl.SSLContext | None,
    served: Served | None,
    opens_run: bool,
    stop: asyncio.Event,
    on_ready: Callable[[Front, ListenAddress, str], object],
) -> bool:
    """Run a manager. `on_ready` is told where it listens and what it recovered; `opens_run`: a run without a trainer.

    Returns False when it was stopped before its run was read. Raises UserError when the directory or the port is taken.
    """
    check_that_none_runs(run_dir)  # before its port, which is the other manager's: this says more
    await check_that_it_can_listen(*where)  # before tokens and a journal are made
    service = Service(run_dir, settings, recovers=False)
    front = Front(service, served)
    address = await front.listen(*where, tls)
    if not service.recovered and not await _recover(service, front, stop):
        return False
    if opens_run:
        await front.open_run()
    on_ready(front, address, service.recovered)
    owner = asyncio.create_task(service.own())
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait((owner, stopped), return_when=asyncio.FIRST_COMPLETED)
    try:
        if owner.done():
            owner.result()  # a failure of ours: loudly
    finally:
        owner.cancel()
        await front.close(_GOODBYE)
        service.close()
    return True


async def _recover(service: Service, front: Front, stop: asyncio.Event) -> bool:
    """Read the run that is there. False: it was stopped meanwhile."""
    loop = asyncio.get_running_loop()
    read: asyncio.Future[None] = loop.create_future()

    def recover() -> None:
        try:
            service.recover()
        except Exception as error:  # noqa: BLE001  raised where it is waited for
            loop.call_soon_threadsafe(read.set_exception, error)
        else:
            loop.call_soon_threadsafe(read.set_result, None)

    # A daemon: nothing of what it does is on file before it is over, so a manager that is stopped does not wait for it.
    threading.Thread(target=recover, name="recovery", daemon=True).start()
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait((read, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if read.done() and read.exception() is None:
        return True
    await front.close(_GOODBYE)
    if read.done():
        service.close()
        read.result()
    return False
