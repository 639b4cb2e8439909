"""One connection, plain or TLS, on which every wait has a deadline. A peer that misses the deadline is cut off.

Sockets block, and a `DeadlineWatch` shuts down those whose deadline has passed. That wakes a thread wherever it hangs,
even inside `sendfile`. A thread can hand the kernel a whole chunk at once, because the kernel counts the bytes that
move meanwhile: a peer that moved at least `PROGRESS_BYTES` since the last look gets more time, a slower one does not.
"""

import contextlib
import math
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from ipaddress import ip_address

PROGRESS_BYTES = 128 << 10
"""A peer that moves this many bytes before its deadline gets a new deadline. It is small because many streams may
share a source's bandwidth.
"""
_TCP_INFO_BYTES = 136
_MOVED = struct.Struct("=QQ")
_MOVED_AT = 120
"""The offset in the kernel's tcp_info of the counts of acknowledged and of received bytes."""
_LOOPBACK_CONGESTION = "reno"


class Cut(OSError):
    """The connection was shut down on purpose, or by the other side. The message says why."""


class Channel:
    """A connected socket with a deadline. One thread uses it; any may cut it."""

    def __init__(self, sock: socket.socket, stall_s: float) -> None:
        self._socket = sock
        self.stall_s = stall_s
        self._why = ""
        self._ended = False
        self._guard = threading.Lock()
        self._num_moved = 0
        self.moved_at = -math.inf
        """When the connection was last seen to have moved at least `PROGRESS_BYTES`."""
        self.deadline = time.monotonic() + stall_s

    def has_moved(self) -> bool:
        """Return whether at least `PROGRESS_BYTES` moved since the last call. Always False on a UNIX socket."""
        if self.is_on_host:
            return False
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        except OSError:
            return False
        num_moved = sum(_MOVED.unpack_from(info, _MOVED_AT)) if len(info) == _TCP_INFO_BYTES else 0
        before, self._num_moved = self._num_moved, num_moved
        if num_moved - before < PROGRESS_BYTES:
            return False
        self.moved_at = time.monotonic()
        return True

    def extend(self, seconds: float | None = None) -> None:
        """Set the deadline this many seconds from now; by default `stall_s`."""
        self.deadline = time.monotonic() + (self.stall_s if seconds is None else seconds)

    @property
    def is_cut(self) -> bool:
        return bool(self._why)

    @property
    def is_plain(self) -> bool:
        return not isinstance(self._socket, ssl.SSLSocket)

    @property
    def is_on_host(self) -> bool:
        return self._socket.family == socket.AF_UNIX

    def take_files(self, num_bytes: int) -> tuple[bytes, list[int]]:
        """Receive up to `num_bytes` bytes, and the file descriptors that came with them."""
        with self._failures("receiving"):
            data, fds, _, _ = socket.recv_fds(self._socket, num_bytes, 1)
        return data, fds

    def pass_file(self, data: bytes, fd: int) -> None:
        with self._failures("sending"):
            socket.send_fds(self._socket, [data], [fd])

    def tune(self, congestion: str) -> None:
        """Send small frames without delay; on loopback, use a congestion control that does not pace."""
        with self._failures("a fresh connection"):
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not congestion and ip_address(self._socket.getpeername()[0]).is_loopback:
                congestion = _LOOPBACK_CONGESTION
        if congestion:
            with contextlib.suppress(OSError):  # this system does not know or allow that name: keep its own choice
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())

    def encrypt(self, wrap: Callable[[socket.socket], ssl.SSLSocket]) -> None:
        """Switch to TLS. `wrap` must not do the handshake: it is done here, so that the deadline covers it too."""
        with self._failures("TLS"):
            with self._guard:
                secure = self._socket = wrap(self._socket)
            if self._why:
                raise Cut(self._why)
            secure.do_handshake()

    def send(self, data: bytes | memoryview, *, more: bool = False) -> None:
        with self._failures("sending"):
            if more and self.is_plain:
                self._socket.sendall(data, socket.MSG_MORE)
            else:
                self._socket.sendall(data)

    def send_file(self, fd: int, start: int, num_bytes: int) -> None:
        """Send part of a file without copying it through this process.

        The bytes must not change until the other side has received them.
        """
        end, out = start + num_bytes, self._socket.fileno()
        with self._failures("sending"):
            while start < end:
                start += self._sent(os.sendfile(out, fd, start, end - start))

    def receive(self, most: int) -> bytes:
        """Receive between one and `most` bytes."""
        with self._failures("receiving"):
            data = self._socket.recv(most)
        if not data:
            raise Cut(self._why or "closed by the other side")
        return data

    def receive_into(self, view: memoryview) -> None:
        """Fill the whole view."""
        flags = socket.MSG_WAITALL if self.is_plain else 0
        done, num_bytes = 0, len(view)
        with self._failures("receiving"):
            while done < num_bytes:
                done += self._sent(self._socket.recv_into(view[done:], num_bytes - done, flags))

    def receive_exactly(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        self.receive_into(memoryview(data))
        return data

    def cut(self, why: str) -> None:
        """Shut down from any thread. Pending operations fail with this reason; later cuts are ignored."""
        with self._guard:
            if self._ended or self._why:
                return
            self._why = why
            with contextlib.suppress(OSError):  # the other side may have closed it already
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Only the thread that uses the channel may call this."""
        with self._guard:
            self._ended = True
            with contextlib.suppress(OSError):
                self._socket.close()

    def _sent(self, num_bytes: int) -> int:
        if num_bytes == 0:
            raise Cut(self._why or "closed by the other side")
        return num_bytes

    @contextlib.contextmanager
    def _failures(self, doing: str):  # noqa: ANN202
        try:
            yield
        except Cut:
            raise
        except OSError as error:
            raise Cut(self._why or f"{doing}: {error.strerror or error}") from error


class DeadlineWatch:
    """Cuts the channels whose deadline has passed. One thread watches all of them."""

    def __init__(self, name: str) -> None:
        self._channels: list[Channel] = []
        self._guard = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name=name, daemon=True)
        self._thread.start()

    def add(self, channel: Channel) -> None:
        with self._guard:
            self._channels.append(channel)
            stopped = self._stop.is_set()
        if stopped:
            channel.cut("closing")

    def remove(self, channel: Channel) -> None:
        with self._guard, contextlib.suppress(ValueError):
            self._channels.remove(channel)

    def close(self) -> None:
        """Cut all channels, and end the thread."""
        with self._guard:
            self._stop.set()
            channels = list(self._channels)
        for channel in channels:
            channel.cut("closing")
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(0.1):
            now = time.monotonic()
            with self._guard:
                late = [channel for channel in self._channels if channel.deadline < now]
            for channel in late:
                if channel.has_moved():
                    channel.extend()
                    continue
                channel.cut(f"less than {PROGRESS_BYTES >> 10} KiB moved in {channel.stall_s:g} s")
