"""Connections that the port has accepted: how many there may be, and how long they may say nothing.

Anybody who reaches the port gets a connection, and with it one of this process's descriptors, before a token is seen.

Rules kept here:
- A connection that brings no whole request for a while is cut, whether it sends a byte at a time or nothing at all.
- A connection is *idle* until a request on it is let in, and again when that is answered. Idle connections of one
  address are bounded, and so are all connections together, below what the system lets us have: the oldest idle one
  makes way for a new one. Streams and requests that are being answered never do.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web

from polyrl import descriptors

_KEPT_BACK = 64
"""Descriptors that are not for connections: files, sockets that listen, and those of the event loop."""


class Connection(web.RequestHandler):
    """aiohttp's, and the door hears of it."""

    __slots__ = ("_door",)

    def __init__(self, door: "Door", server: web.Server, **options: Any) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._door = door

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._door.came(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._door.went(self)
        super().connection_lost(exc)


class Door:
    def __init__(self, per_address: int, count_refusal: Callable[[str], None], most: int | None = None) -> None:
        """`most` connections in all; none: what the system's limit leaves."""
        self._per_address = per_address
        self._count_refusal = count_refusal
        self._most = max(1, descriptors.limit() - _KEPT_BACK) if most is None else most
        self._addresses: dict[web.RequestHandler, str] = {}
        """Of every connection."""
        self._idle: dict[web.RequestHandler, None] = {}
        """The oldest first; so are those of each address."""
        self._idle_at: dict[str, dict[web.RequestHandler, None]] = {}
        self._silent: dict[web.RequestHandler, asyncio.TimerHandle] = {}

    @property
    def num_connections(self) -> int:
        return len(self._addresses)

    def came(self, connection: web.RequestHandler) -> None:
        """A connection was made."""
        transport = connection.transport
        peer = None if transport is None else transport.get_extra_info("peername")
        self._addresses[connection] = str(peer[0]) if peer else ""
        self.rest(connection)
        if len(self._addresses) > self._most:
            self._cut(next(iter(self._idle)), "connections")
        elif len(self._idle_at[self._addresses[connection]]) > self._per_address:
            self._cut(next(iter(self._idle_at[self._addresses[connection]])), "connections")

    def went(self, connection: web.RequestHandler) -> None:
        self.work(connection)
        self.heard(connection)
        self._addresses.pop(connection, None)

    def work(self, connection: web.RequestHandler) -> None:
        """A request on it was let in: nobody takes its place until that is answered."""
        if self._idle.pop(connection, True) is None:
            address = self._addresses[connection]
            its = self._idle_at[address]
            del its[connection]
            if not its:
                del self._idle_at[address]

    def rest(self, connection: web.RequestHandler) -> None:
        """It waits for a request."""
        if connection in self._addresses:
            self._idle[connection] = None
            self._idle_at.setdefault(self._addresses[connection], {})[connection] = None

    def watch(self, connection: web.RequestHandler, seconds: float) -> None:
        """Cut it if it brings no whole request for so long."""
        loop = asyncio.get_running_loop()
        self._silent[connection] = loop.call_later(seconds, self._cut, connection, "silent")

    def heard(self, connection: web.RequestHandler) -> None:
        timer = self._silent.pop(connection, None)
        if timer is not None:
            timer.cancel()

    def _cut(self, connection: web.RequestHandler, why: str) -> None:
        transport = connection.transport
        self.went(connection)
        if transport is not None:
            self._count_refusal(why)
            transport.abort()
