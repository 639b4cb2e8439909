"""Connecting to a source: dial, prove that we hold the key, ask; and reading chunks, over TCP or from shared memory.

A `SourceLink` is used by one thread. A broken connection raises OSError (try again), a broken protocol ProtocolError
(give the source up), and a refusal SourceRefused.
"""

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from polyrl.weights import protocol
from polyrl.weights.channel import Channel, Cut, DeadlineWatch
from polyrl.weights.chunks import ChunkTable
from polyrl.weights.mooncake import Mooncake
from polyrl.weights.protocol import HEADER, Code, FrameKind, ProtocolError
from polyrl.weights.sender import local_name
from polyrl.weights.settings import Tls, WeightSettings
from polyrl.weights.store import Blob

CONNECT_S = 5.0


class SourceDialer(NamedTuple):
    """The settings, keys and transports with which sources are reached."""

    settings: WeightSettings
    key: bytes
    tls: Tls | None
    watch: DeadlineWatch
    mooncake: Mooncake | None = None

    def dial(self, address: str) -> "SourceLink":
        """Connect over TCP. Raises OSError or ProtocolError."""
        host, port = parse_address(address)
        connect_s = min(CONNECT_S, self.settings.stall_s)
        sock = socket.create_connection((host, port), timeout=connect_s)
        sock.settimeout(None)
        channel = Channel(sock, self.settings.stall_s)
        with self._closed_on_failure(channel):
            channel.tune(self.settings.congestion)
            if (tls := self.tls) is not None:
                name = tls.name or host
                channel.encrypt(
                    lambda plain: tls.client.wrap_socket(plain, server_hostname=name, do_handshake_on_connect=False)
                )
            return self._greet(channel)

    def dial_on_host(self, node: bytes) -> "SourceLink":
        """Connect to the node if it runs on this host and in this network namespace.

        Raises OSError or ProtocolError.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        channel = Channel(sock, self.settings.stall_s)
        with self._closed_on_failure(channel):
            sock.connect(local_name(node))
            return self._greet(channel)

    @contextmanager
    def _closed_on_failure(self, channel: Channel) -> Iterator[None]:
        self.watch.add(channel)
        try:
            yield
        except BaseException:
            self.watch.remove(channel)
            channel.close()
            raise

    def _greet(self, channel: Channel) -> "SourceLink":
        nonce = secrets.token_bytes(protocol.NONCE_BYTES)
        channel.send(protocol.hello(nonce))
        try:
            body = _answer(channel, FrameKind.WELCOME)
        except Cut as error:
            hint = "" if self.tls is not None or channel.is_on_host else "; --ca, if it serves with TLS"
            raise Cut(f"hung up on our greeting: {error}{hint}") from error
        node, proof = protocol.read_welcome(self.key, nonce, bytes(body))
        channel.send(proof)
        return SourceLink(channel, node, self.watch)


class SourceLink:
    """A connection to a source that has proved that it holds the key."""

    def __init__(self, channel: Channel, node: bytes, watch: DeadlineWatch) -> None:
        self.node = node
        self._channel, self._watch = channel, watch

    @property
    def is_on_host(self) -> bool:
        return self._channel.is_on_host

    @property
    def moved_at(self) -> float:
        return self._channel.moved_at

    def look(self) -> None:
        """Update `moved_at`, if enough bytes moved since the last look."""
        self._channel.has_moved()

    def cut(self, why: str) -> None:
        """Shut the connection down, from any thread."""
        self._channel.cut(why)

    def close(self) -> None:
        self._watch.remove(self._channel)
        self._channel.close()

    def catalog(self) -> protocol.Catalog:
        return protocol.read_catalog(bytes(self._exchange(protocol.frame(FrameKind.CATALOG), FrameKind.CATALOG_IS)))

    def manifest(self, name: str) -> bytes:
        return bytes(self._exchange(protocol.request(FrameKind.MANIFEST, name), FrameKind.MANIFEST_IS))

    def have(self, name: str, num_chunks: int, revision: int, wait_s: float) -> protocol.Holdings:
        """Return which chunks the source has, as soon as that is newer than `revision`, or after `wait_s`."""
        body = self._exchange(protocol.have(name, revision, wait_s), FrameKind.HAVE_IS, wait_s)
        return protocol.read_holdings(bytes(body), num_chunks)

    def request(self, name: str, first: int, count: int) -> None:
        """Ask for chunks. The answers come in the order of the requests."""
        self._channel.extend()
        self._channel.send(protocol.get(name, first, count))

    def expect(self, num_bytes: int) -> None:
        """Read the header of the next answer, which the bytes of chunks follow."""
        self._channel.extend()
        found = _read_head(self._channel, FrameKind.DATA)
        if found != num_bytes:
            raise ProtocolError(f"{found} bytes of chunks; expected {num_bytes}")

    def read(self, view: memoryview) -> None:
        self._channel.extend()
        self._channel.receive_into(view)

    def take_file(self, name: str) -> int:
        """Return the descriptor of the blob's buffer, over a UNIX socket. It may be read while this link is open."""
        self._channel.extend()
        self._channel.send(protocol.request(FrameKind.PASS, name))
        head, fds = self._channel.take_files(HEADER.size)
        try:
            if len(head) < HEADER.size:
                head += self._channel.receive_exactly(HEADER.size - len(head))
            kind, num_bytes = protocol.read_header(head, protocol.ANSWERS)
            if kind is FrameKind.REFUSED:
                raise protocol.read_refused(bytes(self._channel.receive_exactly(num_bytes)))
            if kind is not FrameKind.PASSED or len(fds) != 1:
                raise ProtocolError(f"{kind.name} where a file was asked for")
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return fds[0]

    def locate(self, name: str) -> protocol.Located:
        """Return where mooncake finds the blob's memory. It may be read while this link is open."""
        return protocol.read_located(bytes(self._exchange(protocol.request(FrameKind.LOCATE, name), FrameKind.LOCATED)))

    def keep(self, seconds: float) -> None:
        """Extend the deadline: nothing is expected for this long."""
        self._channel.extend(seconds)

    def _exchange(self, request: bytes, answer: FrameKind, wait_s: float = 0.0) -> bytearray:
        self._channel.extend(wait_s + self._channel.stall_s)
        self._channel.send(request)
        return _answer(self._channel, answer)


class RemoteStream:
    """The chunks of one blob over a link."""

    def __init__(self, link: SourceLink, name: str, table: ChunkTable) -> None:
        self._link, self._name, self._table = link, name, table

    def request(self, run: range) -> None:
        self._link.request(self._name, run.start, len(run))

    def expect(self, run: range) -> None:
        self._link.expect(self._table.range_of(run.stop - 1)[1] - self._table.range_of(run.start)[0])

    def read(self, index: int, into: memoryview) -> None:
        self._link.read(into)

    def close(self) -> None:
        """Do nothing: the link stays open."""


class HostStream:
    """The chunks of one blob from a neighbour's buffer. They are copied and verified like all others."""

    def __init__(self, link: SourceLink, name: str, table: ChunkTable) -> None:
        self._table = table
        self._fd = link.take_file(name)

    def request(self, run: range) -> None:
        pass

    def expect(self, run: range) -> None:
        pass

    def read(self, index: int, into: memoryview) -> None:
        start, stop = self._table.range_of(index)
        if os.preadv(self._fd, [into], start) != stop - start:
            raise ProtocolError("the file that was passed is too short")

    def close(self) -> None:
        os.close(self._fd)


class MooncakeStream:
    """The chunks of one blob from a source's memory, through mooncake. They are verified like all others."""

    def __init__(self, link: SourceLink, name: str, blob: Blob, mooncake: Mooncake) -> None:
        self._table, self._mooncake = blob.table, mooncake
        self._remote = link.locate(name)
        mooncake.place_of(blob.buffer)

    def request(self, run: range) -> None:
        pass

    def expect(self, run: range) -> None:
        pass

    def read(self, index: int, into: memoryview) -> None:
        start, _ = self._table.range_of(index)
        self._mooncake.read(self._remote.address, self._remote.place + start, into)

    def close(self) -> None:
        """Do nothing: the link stays open."""


def parse_address(address: str) -> tuple[str, int]:
    """Split HOST:PORT, with an IPv6 host in brackets. Raises ProtocolError."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        host.encode("idna")  # the resolver does this too, but its UnicodeError is not an OSError
    except UnicodeError as error:
        raise ProtocolError(f"{address!r}; expected HOST:PORT, and a name or an address as HOST") from error
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ProtocolError(f"{address!r}; expected HOST:PORT")
    return host, int(port)


def _answer(channel: Channel, kind: FrameKind) -> bytearray:
    return channel.receive_exactly(_read_head(channel, kind))


def _read_head(channel: Channel, kind: FrameKind) -> int:
    found, num_bytes = protocol.read_header(channel.receive_exactly(HEADER.size), protocol.ANSWERS)
    if found is FrameKind.REFUSED:
        no = protocol.read_refused(bytes(channel.receive_exactly(num_bytes)))
        raise protocol.NotAllowed(str(no)) if no.code is Code.NOT_ALLOWED else no
    if found is not kind:
        raise ProtocolError(f"{found.name} where {kind.name} is expected")
    return num_bytes
