"""Connections that the port has accepted: how many there may be, and how long they may say nothing.

Every process that reaches the port gets a connection, and with it one of this process's descriptors, before a token is
seen, and before TLS is agreed on.

Rules kept here:
- A connection that brings no whole request for a while is cut, whether it sends a byte at a time or nothing at all.
- A connection counts from the moment it is accepted. A TLS handshake is idle: so it makes way as any other.
- A connection is *idle* until a request on it is let in, and again when that is answered. Idle connections of one
  address are bounded, and so are all connections together, below what the system lets us have: the oldest idle one
  makes way for a new one. Streams and requests that are being answered never do.
"""

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from typing import Any, Protocol, cast

from aiohttp import web

from polyrl import descriptors

_KEPT_BACK = 64
"""Descriptors that are not for connections: files, sockets that listen, and those of the event loop."""


class Accepted(Protocol):
    """A connection on which requests come, or a handshake that leads to one."""

    transport: Any


class Connection(web.RequestHandler):
    """A connection of aiohttp's that is counted at the door."""

    __slots__ = ("_door", "_timeout_s")

    def __init__(self, door: "Door", timeout_s: float, server: web.Server, **options: Any) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._door, self._timeout_s = door, timeout_s

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._door.came(self)
        self._door.watch(self, self._timeout_s)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._door.went(self)
        super().connection_lost(exc)


class Handshake(asyncio.Protocol):
    """A connection until TLS is agreed on: by itself, an event loop reports no connection before that.

    The loop that accepted it starts to read at once, and not all loops can be kept from it. So the socket is taken out
    of the loop's hands, and given back with TLS.
    """

    def __init__(
        self, door: "Door", timeout_s: float, tls: ssl.SSLContext, connected: Callable[[], Connection]
    ) -> None:
        self._door, self._timeout_s, self._tls, self._connected = door, timeout_s, tls, connected
        self.transport = self
        self._peer: object = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._peer = transport.get_extra_info("peername")
        try:
            taken = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        except OSError:  # no descriptor is left, or it has hung up
            return
        finally:
            cast("asyncio.Transport", transport).abort()
        self._door.came(self)
        self._door.watch(self, self._timeout_s)
        self._task = asyncio.create_task(self._shake(taken))

    async def _shake(self, taken: socket.socket) -> None:
        taken.setblocking(False)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._connected, taken, ssl=self._tls, ssl_handshake_timeout=2 * self._timeout_s
            )
        except OSError:  # an SSLError, or it has hung up
            taken.close()
        finally:
            self._door.went(self)

    def get_extra_info(self, _: str) -> object:
        return self._peer

    def abort(self) -> None:
        if self._task is not None:
            self._task.cancel()


class Door:
    def __init__(self, per_address: int, count_refusal: Callable[[str], None], most: int | None = None) -> None:
        """`most`: connections in all; None: as many as the system's limit leaves."""
        self._per_address = per_address
        self._count_refusal = count_refusal
        self._most = max(1, descriptors.limit() - _KEPT_BACK) if most is None else most
        self._addresses: dict[Accepted, str] = {}
        """The address of every connection."""
        self._idle: dict[Accepted, None] = {}
        """The idle connections, the oldest first; so are those of each address."""
        self._idle_at: dict[str, dict[Accepted, None]] = {}
        self._silent: dict[Accepted, asyncio.TimerHandle] = {}

    @property
    def num_connections(self) -> int:
        return len(self._addresses)

    def came(self, connection: Accepted) -> None:
        """Count a new connection, and cut the oldest idle one where there are too many."""
        transport = connection.transport
        peer = None if transport is None else transport.get_extra_info("peername")
        self._addresses[connection] = str(peer[0]) if peer else ""
        self.rest(connection)
        if len(self._addresses) > self._most:
            self._cut(next(iter(self._idle)), "connections")
        elif len(self._idle_at[self._addresses[connection]]) > self._per_address:
            self._cut(next(iter(self._idle_at[self._addresses[connection]])), "connections")

    def went(self, connection: Accepted) -> None:
        self.work(connection)
        self.heard(connection)
        self._addresses.pop(connection, None)

    def work(self, connection: Accepted) -> None:
        """Note that a request was let in: the connection is not cut to make room until the request is answered."""
        if self._idle.pop(connection, True) is None:
            address = self._addresses[connection]
            its = self._idle_at[address]
            del its[connection]
            if not its:
                del self._idle_at[address]

    def rest(self, connection: Accepted) -> None:
        """Note that it waits for a request."""
        if connection in self._addresses:
            self._idle[connection] = None
            self._idle_at.setdefault(self._addresses[connection], {})[connection] = None

    def watch(self, connection: Accepted, seconds: float) -> None:
        """Cut it if it brings no whole request within `seconds`."""
        loop = asyncio.get_running_loop()
        self._silent[connection] = loop.call_later(seconds, self._cut, connection, "silent")

    def heard(self, connection: Accepted) -> None:
        timer = self._silent.pop(connection, None)
        if timer is not None:
            timer.cancel()

    def _cut(self, connection: Accepted, why: str) -> None:
        transport = connection.transport
        self.went(connection)
        if transport is not None:
            self._count_refusal(why)
            transport.abort()
