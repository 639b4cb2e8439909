"""Which port a run's manager listens on.

A port that the recipe names is that one, or an error. Without one it is the usual port, or any that is free where
another run has that: several runs on one machine need no settings. A run that goes on takes the port that it had, since
workers dial there, if nobody else has it.
"""

import logging

from polyrl.config.recipe import ManagerSection
from polyrl.errors import UserError
from polyrl.manager.http import PortTaken, check_that_it_can_listen
from polyrl.wire.control import DEFAULT_PORT

log = logging.getLogger("polyrl.train")

_ANY = 0


async def choose(wanted: ManagerSection, before: int = _ANY) -> int:
    """`before` is the port that the run had; 0: none, and 0 is what is returned for any. Raises UserError."""
    if wanted.port:
        try:
            await check_that_it_can_listen(wanted.host, wanted.port)
        except PortTaken as error:
            raise UserError(f"{error}: manager.port=0") from error
        return wanted.port
    usual = [DEFAULT_PORT] if wanted.port is None else []
    for port in [before] if before else usual:
        try:
            await check_that_it_can_listen(wanted.host, port)
        except PortTaken:
            continue
        return port
    if before:
        log.warning("port %d, which the run had, is taken: workers that know that one must join anew", before)
    await check_that_it_can_listen(wanted.host, _ANY)
    return _ANY
