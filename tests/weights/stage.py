"""Servers and peers on loopback with small versions, and a wire between them that cuts, stalls and flips bits."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache

import numpy as np

from polyrl.weights.buffers import Buffer
from polyrl.weights.manifest import Layout, Spec, lay_out
from polyrl.weights.peer import WeightPeer
from polyrl.weights.server import Offer, WeightServer
from polyrl.weights.settings import Tls, WeightSettings
from polyrl.weights.shares import ServingNodes
from polyrl.weights.store import Blob

KEY = b"k" * 32
SETTINGS = WeightSettings(interfaces=("127.0.0.0/8",), chunk_bytes=4096, stall_s=2.0, grace_s=0.2, shared_memory=False)
NUM_ELEMENTS = 50_000


@lru_cache(maxsize=16)
def layout_of(num_elements: int = NUM_ELEMENTS) -> Layout:
    half = num_elements // 2
    return lay_out([Spec("first", "bfloat16", (half,)), Spec("second", "bfloat16", (num_elements - half,))])


@lru_cache(maxsize=16)
def weights(seed: int, num_elements: int = NUM_ELEMENTS) -> bytes:
    """A version's bytes. The next seed's differ in one element of a hundred."""
    layout = layout_of(num_elements)
    bits = np.random.default_rng(0).integers(0, 1 << 16, layout.num_bytes // 2, dtype=np.uint16)
    for step in range(seed):
        bits[step::100] += 1
    data = bytearray(bits.tobytes())
    padding = layout.tensors[1].start
    data[layout.tensors[0].end : padding] = bytes(padding - layout.tensors[0].end)
    data[layout.tensors[1].end :] = bytes(layout.num_bytes - layout.tensors[1].end)
    return bytes(data)


class Stage:
    """Everything made on it is closed at the end, and must leave no thread behind."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def server(
        self,
        settings: WeightSettings = SETTINGS,
        key: bytes = KEY,
        tls: Tls | None = None,
        prepare: Callable[[Buffer], object] | None = None,
        nodes: ServingNodes | None = None,
    ) -> WeightServer:
        server = WeightServer(settings, key, tls, prepare, nodes)
        self._stack.callback(server.close)
        server.start()
        return server

    def peer(
        self, number: int = 0, settings: WeightSettings = SETTINGS, key: bytes = KEY, tls: Tls | None = None
    ) -> WeightPeer:
        peer = WeightPeer(settings, key, tls, number=number)
        self._stack.callback(peer.close)
        return peer

    def wire(self, address: str, faults: "Faults | None" = None) -> "Wire":
        wire = Wire(address, faults or Faults())
        self._stack.callback(wire.close)
        return wire


@contextmanager
def stage() -> Iterator[Stage]:
    before = set(threading.enumerate())
    with ExitStack() as stack:
        yield Stage(stack)
    deadline = time.monotonic() + 5
    while left := [one.name for one in threading.enumerate() if one not in before]:
        assert time.monotonic() < deadline, f"threads are left: {left}"
        time.sleep(0.01)


def publish(server: WeightServer, version: int, num_elements: int = NUM_ELEMENTS, *, deltas: bool = True) -> Offer:
    data = weights(version, num_elements)

    def fill(view: memoryview) -> None:
        view[:] = data

    offer = server.publish(version, layout_of(num_elements), fill)
    if deltas:
        assert server.wait_for_deltas(10)
    return offer


def pull(peer: WeightPeer, offer: Offer, addresses: tuple[str, ...] | None = None, deadline_s: float = 15.0) -> bytes:
    with peer.pull(offer.version, offer.digest, addresses or offer.addresses, deadline_s) as copy:
        return bytes(copy.view)


def blob_of(server: WeightServer, name: str) -> Blob:
    """To spoil it."""
    blob = server._store.find(name)
    assert blob is not None
    return blob


def held_by(peer: WeightPeer) -> memoryview:
    """The memory of what it holds, to spoil it."""
    assert peer._shelf.held is not None
    return peer._shelf.held[0].buffer.view


class Faults:
    """What a wire does to the bytes that the server sends."""

    def __init__(
        self,
        *,
        cut_at: int | None = None,
        stall_at: int | None = None,
        flip_bit_at: int | None = None,
        bytes_per_s: float = 0.0,
        once: bool = True,
        cut_s: float | None = None,
    ) -> None:
        """Bytes are counted over all connections; `once` heals the wire after the first fault.

        With `cut_s` a cut is the wire's: it takes all connections down, and those that come in the next seconds.
        """
        self.cut_at, self.stall_at, self.flip_bit_at, self.cut_s = cut_at, stall_at, flip_bit_at, cut_s
        self.bytes_per_s, self.once = bytes_per_s, once
        self.num_bytes = 0
        self.num_faults = 0
        self.guard = threading.Lock()

    def apply(self, data: bytes) -> tuple[bytes, bool, bool]:
        """What goes on, whether the connection is cut after it, and whether nothing more comes."""
        with self.guard:
            start, self.num_bytes = self.num_bytes, self.num_bytes + len(data)
            healed = self.once and self.num_faults > 0
            if self.cut_at is not None and self.num_bytes > self.cut_at and not healed:
                self.num_faults += 1
                return data[: max(0, self.cut_at - start)], True, False
            if self.stall_at is not None and self.num_bytes > self.stall_at and not healed:
                self.num_faults += 1
                return data[: max(0, self.stall_at - start)], False, True
            bit = self.flip_bit_at
            if bit is not None and start <= bit // 8 < self.num_bytes:
                self.num_faults += 1
                flipped = bytearray(data)
                flipped[bit // 8 - start] ^= 1 << bit % 8
                return bytes(flipped), False, False
            return data, False, False


class Wire:
    """Forwards connections to an address, with faults on the way back."""

    def __init__(self, address: str, faults: Faults) -> None:
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self.faults = faults
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._guard = threading.Lock()
        self._cut_until = 0.0
        self._closed = threading.Event()
        self._start(self._accept)

    def _start(self, target: Callable[..., None], *args: object) -> None:
        threading.Thread(target=target, args=args, daemon=True, name="wire").start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                if time.monotonic() < self._cut_until:
                    near.close()
                    continue
                far = socket.create_connection(self._target, timeout=5)
                far.settimeout(None)
            except OSError:
                if self._closed.is_set():
                    return
                with contextlib.suppress(UnboundLocalError):
                    near.close()  # pyright: ignore[reportPossiblyUnboundVariable]
                continue
            with self._guard:
                self._sockets += [near, far]
            self._start(self._forward, near, far, False)
            self._start(self._forward, far, near, True)

    def _forward(self, source: socket.socket, target: socket.socket, is_back: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                cut = stall = False
                if is_back:
                    data, cut, stall = self.faults.apply(data)
                    if self.faults.bytes_per_s:
                        self._closed.wait(len(data) / self.faults.bytes_per_s)
                target.sendall(data)
                if cut:
                    if self.faults.cut_s is not None:
                        self._cut_all(self.faults.cut_s)
                    break
                if stall:
                    self._closed.wait()
                    break
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._cut_all(0.0)

    def _cut_all(self, seconds: float) -> None:
        self._cut_until = time.monotonic() + seconds
        with self._guard:
            for one in self._sockets:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
