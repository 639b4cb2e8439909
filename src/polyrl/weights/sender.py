"""Serves a store to peers that hold the key: a thread per connection, a port per group, `sendfile` from the buffers.

The trainer and every worker run one; a worker's sender relays the chunks that the worker has verified. Rules: no
request is read before the proof; no request makes the sender allocate memory of a size that the peer chose; a peer that
stalls, trickles or breaks the protocol is cut, told why if it still listens, and counted. A reader never holds up the
owner of the store.

A neighbour on the same host may ask for the buffer itself, over a UNIX socket in the abstract namespace (no file, and
not visible from another network namespace). It gets a read-only descriptor.
"""

import contextlib
import errno
import secrets
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable

from polyrl.errors import UserError
from polyrl.weights import protocol
from polyrl.weights.channel import Channel, Cut, DeadlineWatch
from polyrl.weights.interfaces import listening_addresses
from polyrl.weights.mooncake import Mooncake
from polyrl.weights.pace import Pace
from polyrl.weights.protocol import Code, FrameKind, Incoming, ProtocolError, SourceRefused
from polyrl.weights.settings import WeightSettings
from polyrl.weights.store import Store

MAX_CONNECTIONS = 1024
HANDSHAKE_S = 5.0
IDLE_S = 60.0
PASSED_S = 900.0
"""How long a neighbour may read a buffer that was passed to it."""
_PIECE_BYTES = 256 << 10
_RECEIVE_BYTES = 16 << 10
_LOOK_S = 0.1


def check_that_it_can_listen(settings: WeightSettings) -> None:
    """Raise UserError or ConfigError if a sender could not listen now. Mooncake is not tried."""
    for host in listening_addresses(settings.interfaces):
        for group in range(settings.groups):
            _listener(settings, host, group).close()


def _listener(settings: WeightSettings, host: str, group: int) -> socket.socket:
    port = settings.port + group if settings.port else 0
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise UserError(f"weights: cannot listen on {host} port {port}: {error.strerror}") from error
    return listener


class Sender:
    """A server of one store. `close` leaves no thread and no socket behind."""

    def __init__(
        self,
        store: Store,
        settings: WeightSettings,
        key: bytes,
        tls: ssl.SSLContext | None = None,
        *,
        origin: bool,
    ) -> None:
        self.node = secrets.token_bytes(protocol.NODE_BYTES)
        self.addresses: tuple[str, ...] = ()
        self.num_bytes_sent = 0
        self.cuts: Counter[str] = Counter()
        """Why connections ended, counted, unless the other side closed them."""
        self.coming: tuple[tuple[str, str], ...] = ()
        """The deltas that are being made, as (base, target)."""
        self.mooncake: Mooncake | None = None
        self._store, self._settings, self._key, self._tls, self._origin = store, settings, key, tls, origin
        self._pace = Pace(settings.egress_mb_s * 1e6)
        self._guard = threading.Lock()
        self._closing = threading.Event()
        self._threads: dict[threading.Thread, None] = {}
        self._unproven: dict[Channel, None] = {}
        """The connections that have not proved yet that they hold the key, the oldest first."""
        self._listeners: list[socket.socket] = []
        self._watch: DeadlineWatch | None = None

    def start(self) -> None:
        """Start to listen. Raises UserError or ConfigError if it cannot listen at the configured addresses."""
        self._watch = DeadlineWatch("weights-watch")
        addresses: list[str] = []
        try:
            for host in listening_addresses(self._settings.interfaces):
                for group in range(self._settings.groups):
                    addresses.append(self._listen(host, group))
            if self._settings.shared_memory:
                self._listen_on_host()
            if self._settings.mooncake:
                self.mooncake = Mooncake(self._settings.mooncake, listening_addresses(self._settings.interfaces)[0])
        except BaseException:
            self.close()
            raise
        self.addresses = tuple(addresses)

    def close(self) -> None:
        self._closing.set()
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
        if self._watch is not None:
            self._watch.close()
        for thread in self._running():
            thread.join()
        if self.mooncake is not None:
            self.mooncake.close()
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    def _running(self) -> list[threading.Thread]:
        with self._guard:
            return list(self._threads)

    def _listen(self, host: str, group: int) -> str:
        listener = _listener(self._settings, host, group)
        self._listeners.append(listener)
        port = listener.getsockname()[1]
        self._run(self._accept, listener, f"weights-accept-{port}")
        return show_address(host, port)

    def _listen_on_host(self) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listeners.append(listener)
        listener.bind(local_name(self.node))
        listener.listen(128)
        self._run(self._accept, listener, "weights-accept-host")

    def _run(self, target: Callable[[socket.socket], None], sock: socket.socket, name: str) -> None:
        def run() -> None:
            try:
                target(sock)
            finally:
                with self._guard:
                    self._threads.pop(threading.current_thread(), None)

        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._guard:
            self._threads[thread] = None
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while not self._closing.is_set():
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if not self._closing.is_set():
                    self._count(f"accept: {error.strerror}")
                    if error.errno in (errno.EMFILE, errno.ENFILE):
                        self._make_room()
                    self._closing.wait(0.1)  # the connection may also have gone away before it was accepted
                continue
            if len(self._threads) > MAX_CONNECTIONS and not self._make_room():
                self._count("too many connections")
                sock.close()
                continue
            self._run(self._serve, sock, "weights-serve")

    def _make_room(self) -> bool:
        """Cut the oldest connection without a proof, so that peers without the key cannot fill a port."""
        with self._guard:
            oldest = next(iter(self._unproven), None)
            if oldest is None:
                return False
            del self._unproven[oldest]
        oldest.cut("too many connections, and no proof yet")
        return True

    def _serve(self, sock: socket.socket) -> None:
        assert self._watch is not None
        channel = Channel(sock, self._settings.stall_s)
        with self._guard:
            self._unproven[channel] = None
        channel.extend(min(HANDSHAKE_S, self._settings.stall_s))
        self._watch.add(channel)
        try:
            self._converse(channel)
        except Cut as error:
            if str(error) != "closed by the other side":
                self._count(str(error))
        except (ProtocolError, ssl.SSLError) as error:
            self._count(str(error))
            code = Code.NOT_ALLOWED if isinstance(error, protocol.NotAllowed) else Code.NONSENSE
            with contextlib.suppress(OSError):
                channel.extend(1.0)
                channel.send(protocol.refused(code, str(error)))
        finally:
            self._forget_unproven(channel)
            self._watch.remove(channel)
            channel.close()

    def _forget_unproven(self, channel: Channel) -> None:
        with self._guard:
            self._unproven.pop(channel, None)

    def _count(self, why: str) -> None:
        with self._guard:
            self.cuts[why] += 1

    def _converse(self, channel: Channel) -> None:
        if not channel.is_on_host:
            channel.tune(self._settings.congestion)
            if (tls := self._tls) is not None:
                channel.encrypt(lambda sock: tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False))
        incoming = Incoming(protocol.BEFORE_HELLO)
        theirs = protocol.read_hello(_next(channel, incoming))
        ours = secrets.token_bytes(protocol.NONCE_BYTES)
        channel.send(protocol.welcome(self._key, theirs, ours, self.node))
        incoming.limits = protocol.BEFORE_PROOF
        protocol.check_proof(self._key, theirs, ours, self.node, _next(channel, incoming))
        self._forget_unproven(channel)
        incoming.limits = protocol.REQUESTS
        while True:
            request = incoming.take()
            if request is None:
                channel.extend(IDLE_S)
                incoming.feed(channel.receive(_RECEIVE_BYTES))
                continue
            channel.extend()
            try:
                self._answer(channel, request)
            except SourceRefused as no:
                channel.send(protocol.refused(no.code, str(no)))

    def _answer(self, channel: Channel, request: protocol.WeightFrame) -> None:
        match request.kind:
            case FrameKind.GET:
                self._send_chunks(channel, protocol.read_get(request.body))
            case FrameKind.HAVE:
                name, revision, wait_s = protocol.read_have(request.body)
                channel.extend(wait_s + channel.stall_s)
                channel.send(protocol.have_is(self._store.have(name, revision, wait_s)))
            case FrameKind.CATALOG:
                catalog = protocol.Catalog(self._origin, self._store.entries(), self.coming)
                channel.send(protocol.catalog_is(catalog))
            case FrameKind.MANIFEST:
                manifest = self._store.manifest_of(protocol.read_name(request.body))
                channel.send(protocol.frame(FrameKind.MANIFEST_IS, manifest))
            case FrameKind.PASS:
                if not channel.is_on_host:
                    raise ProtocolError("a descriptor cannot be passed on this connection")
                self._pass_file(channel, protocol.read_name(request.body))
            case FrameKind.LOCATE:
                self._locate(channel, protocol.read_name(request.body))
            case _:
                raise ProtocolError(f"{request.kind.name} is no request")

    def _send_chunks(self, channel: Channel, request: protocol.Get) -> None:
        name, first, count = request
        with self._store.lease(name, first, count, channel.cut) as span:
            if span.num_bytes > protocol.MAX_DATA_BYTES:
                raise SourceRefused(Code.NONSENSE, f"{span.num_bytes} bytes at once; at most {protocol.MAX_DATA_BYTES}")
            channel.extend()
            with self._guard:  # before sending: a peer that has the bytes must find them counted, even if cut
                self.num_bytes_sent += span.num_bytes
            channel.send(protocol.data_header(span.num_bytes), more=True)
            if channel.is_plain and not self._pace.is_limited:
                channel.send_file(span.fd, span.start, span.num_bytes)
            else:
                self._send_slowly(channel, name, span.fd, span.start, span.num_bytes)

    def _send_slowly(self, channel: Channel, name: str, fd: int, start: int, num_bytes: int) -> None:
        """Send piece by piece, as TLS or a bandwidth limit requires."""
        blob = self._store.find(name)
        piece_bytes = self._pace.piece_bytes(_PIECE_BYTES)
        for at in range(start, start + num_bytes, piece_bytes):
            size = min(piece_bytes, start + num_bytes - at)
            with self._guard:
                wait_s = self._pace.reserve(size, time.monotonic())
            channel.extend(wait_s + channel.stall_s)
            self._pause(channel, wait_s)
            if channel.is_plain:
                channel.send_file(fd, at, size)
            elif blob is None:
                raise Cut("the version was given up")
            else:
                channel.send(blob.buffer.view[at : at + size])

    def _pause(self, channel: Channel, seconds: float) -> None:
        """Wait, but end at once if the channel is cut: a cut reader must not keep its lease."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if channel.is_cut or self._closing.wait(min(left, _LOOK_S)):
                raise Cut("closing")

    def _pass_file(self, channel: Channel, name: str) -> None:
        """Pass the buffer's descriptor. The lease lasts until the other side hangs up, or is cut."""
        blob = self._store.find(name)
        if blob is None or not blob.table.num_chunks:
            raise SourceRefused(Code.GONE, "this version or delta is not held here")
        with self._store.lease(name, 0, blob.table.num_chunks, channel.cut) as span:
            channel.pass_file(protocol.frame(FrameKind.PASSED), span.fd)
            channel.extend(PASSED_S)
            channel.receive(1)
        raise ProtocolError("a request where a file was passed")

    def _locate(self, channel: Channel, name: str) -> None:
        """Say where mooncake finds the memory. As with a passed file, the lease lasts as long as the connection."""
        blob = self._store.find(name)
        if self.mooncake is None or blob is None or blob.kind != "full" or not blob.table.num_chunks:
            raise SourceRefused(Code.GONE, "mooncake does not find it here")
        with self._store.lease(name, 0, blob.table.num_chunks, channel.cut):
            place = self.mooncake.place_of(blob.buffer)
            channel.send(protocol.located(protocol.Located(self.mooncake.address, place)))
            channel.extend(PASSED_S)
            channel.receive(1)
        raise ProtocolError("a request where memory was located")


def _next(channel: Channel, incoming: Incoming) -> bytes:
    while (frame := incoming.take()) is None:
        incoming.feed(channel.receive(_RECEIVE_BYTES))
    return frame.body


def local_name(node: bytes) -> bytes:
    return b"\0polyrl-weights-" + node.hex().encode()


def show_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
