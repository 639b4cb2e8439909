"""Watch ranks on several nodes: rank zero notices within seconds that a rank or a whole node is gone, and so do they.

    watch = RankWatch(size)                      rank zero; the others are told its port and its key with their setup
    watch.lost() a line on the rank that is gone, or None
    attendance = Attendance(host, port, key, info)      another rank: from now on it ends when rank zero does

Every other rank holds one connection to rank zero, on which nothing is said after the first message. A process that
dies closes it. A node that loses power or its network closes nothing: there the kernel's keepalive ends the connection.

Rules kept here: a rank whose connection ends exits at once, so that no collective waits for ranks of a run that is
over. Connections without the key are cut; there are never more of them than ranks.
"""

import contextlib
import errno
import hmac
import logging
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from pathlib import Path
from typing import NamedTuple

from polyrl.trainer.ranks import RankInfo

log = logging.getLogger("polyrl.train")

_IDLE_S, _EVERY_S, _PROBES = 5, 3, 3
GONE_S = _IDLE_S + _EVERY_S * _PROBES
"""The time after which a node that no longer answers is taken for gone."""
_KEY_BYTES = 32
_HELLO = struct.Struct(f"!{_KEY_BYTES}sII")
_HELLO_S = 10.0
_TOGETHER_S = 1.0
"""The ranks of a node that is gone are told of together."""
_OVER = b"."
_MOST_NODES = 1 << 16


class _Peer(NamedTuple):
    rank: int
    node: int
    address: str


class _Gone(NamedTuple):
    peer: _Peer
    is_silent: bool
    """Whether its node no longer answers; otherwise its process has ended."""
    at: float


class RankWatch:
    """Rank zero's side, served by a thread."""

    def __init__(self, size: int) -> None:
        self.key = secrets.token_bytes(_KEY_BYTES)
        dual = socket.has_dualstack_ipv6()
        self._server = socket.create_server(
            ("", 0), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual, backlog=size
        )
        self.port: int = self._server.getsockname()[1]
        self._size = size
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ, None)
        self._peers: dict[socket.socket, _Peer] = {}
        self._gone: list[_Gone] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="watching ranks", daemon=True)
        self._thread.start()

    def lost(self) -> str | None:
        """Return a line on the ranks that are gone; None while all are there, or for a moment longer."""
        gone = list(self._gone)
        if not gone or time.monotonic() < gone[0].at + _TOGETHER_S:
            return None
        first = gone[0].peer
        same = sorted(one.peer.rank for one in gone if one.peer.node == first.node)
        where = f"node {first.node} ({first.address})"
        whose = f"rank {same[0]}" if len(same) == 1 else f"ranks {', '.join(map(str, same))}"
        if any(one.is_silent for one in gone):
            return f"{where} has not answered for {GONE_S} s: {whose}"
        have = "has" if len(same) == 1 else "have"
        return f"{whose} on {where} {have} ended, see the log there"

    def close(self, *, is_over: bool) -> None:
        """End all connections. `is_over`: the ranks have been told to stop, and exit by themselves."""
        self._is_over.set()
        self._thread.join()
        for one in self._peers:
            if is_over:
                with contextlib.suppress(OSError):
                    one.send(_OVER)
            one.close()
        self._peers.clear()
        self._server.close()
        self._selector.close()
        for address in {one.peer.address for one in self._gone if one.is_silent}:
            break_connections(address)

    def _serve(self) -> None:
        while not self._is_over.is_set():
            for key, _ in self._selector.select(0.2):
                if key.data is None:
                    self._accept()
                else:
                    self._hear(key.fileobj, key.data)  # type: ignore[arg-type]
            self._cut_the_silent()

    def _cut_the_silent(self) -> None:
        """Cut connections that have not named their rank."""
        for key in list(self._selector.get_map().values()):
            one, about = key.fileobj, key.data
            if about is None or not isinstance(one, socket.socket) or one in self._peers:
                continue
            if time.monotonic() > about[1]:
                self._selector.unregister(one)
                one.close()

    def _accept(self) -> None:
        try:
            connection, address = self._server.accept()
        except OSError:
            return
        if len(self._selector.get_map()) > self._size:
            connection.close()
            return
        _keep_alive(connection)
        connection.setblocking(False)
        deadline = time.monotonic() + _HELLO_S
        self._selector.register(connection, selectors.EVENT_READ, (_plain(address[0]), deadline))

    def _hear(self, connection: socket.socket, about: tuple[str, float]) -> None:
        why: OSError | None = None
        try:
            said = connection.recv(_HELLO.size)
        except BlockingIOError:
            return
        except OSError as error:
            said, why = b"", error
        peer = self._peers.get(connection)
        if peer is None and len(said) == _HELLO.size and (peer := self._known(said, about)) is not None:
            self._peers[connection] = peer
            return
        self._selector.unregister(connection)
        self._peers.pop(connection, None)
        connection.close()
        if peer is not None and not self._is_over.is_set():
            silent = why is not None and why.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
            self._gone.append(_Gone(peer, silent, time.monotonic()))

    def _known(self, said: bytes, about: tuple[str, float]) -> _Peer | None:
        key, rank, node = _HELLO.unpack(said)
        taken = any(one.rank == rank for one in self._peers.values())
        if not hmac.compare_digest(key, self.key) or not 0 < rank < self._size or node >= _MOST_NODES or taken:
            return None
        return _Peer(rank, node, about[0])


class Attendance:
    """Another rank's side: a thread that ends the process when rank zero is gone."""

    def __init__(self, host: str, port: int, key: bytes, info: RankInfo) -> None:
        """Raises OSError if rank zero cannot be reached."""
        self._connection = socket.create_connection((host, port), timeout=_HELLO_S)
        self._connection.settimeout(None)
        _keep_alive(self._connection)
        self._connection.sendall(_HELLO.pack(key, info.rank, info.node))
        threading.Thread(target=self._wait, name="watching rank zero", daemon=True).start()

    def _wait(self) -> None:
        try:
            said = self._connection.recv(1)
        except OSError as error:
            said = b""
            log.error("rank zero no longer answers: %s", error.strerror)
        if said != _OVER:
            log.error("rank zero has ended, or has lost another rank: this rank ends too")
            logging.shutdown()
            os._exit(1)  # the main thread may wait in a collective that nobody will complete


def break_connections(address: str) -> None:
    """Shut down every TCP connection of this process with an address: a collective over one fails now.

    Nothing else ends a wait of gloo's for a node that is gone: its sockets have no keepalive, and their owner no way to
    close them while a thread waits.
    """
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(entry.name))) as one:
            internet = one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM
            if internet and _plain(one.getpeername()[0]) == address:
                one.shutdown(socket.SHUT_RDWR)


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _EVERY_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)


def _plain(address: str) -> str:
    """Return an IPv4 address as such, also one that a dual-stack socket shows as IPv6."""
    return address.removeprefix("::ffff:")
