"""A long link between two network namespaces: `python long_link.py HERE THERE DELAY_S MBIT_S`, until it is killed.

It makes a device `long-THERE` in HERE and `long-HERE` in THERE, says `ready`, and carries packets between them: each
arrives DELAY_S later, and at most so many bits a second go each way. What finds the queue full is lost. Kernels of
small machines lack `netem`; a TUN device is everywhere.
"""

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x1001
_CLONE_NEWNET = 0x40000000
_MTU = 9000
_QUEUE_S = 0.2


def open_tun(namespace: str, device: str) -> int:
    """Return a TUN device in that namespace, in which this process then is."""
    with open(f"/run/netns/{namespace}", "rb") as place:
        if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH", device.encode(), _IFF_TUN_NO_PI))
    return fd


class Way:
    """One direction."""

    def __init__(self, sink: int, delay_s: float, bytes_s: float) -> None:
        self._sink, self._delay_s, self._bytes_s = sink, delay_s, bytes_s
        self._free_at = 0.0
        self._queue: deque[tuple[float, bytes]] = deque()

    def take(self, packet: bytes, now: float) -> None:
        if self._free_at - now < _QUEUE_S:
            self._free_at = max(now, self._free_at) + len(packet) / self._bytes_s
            self._queue.append((self._free_at + self._delay_s, packet))

    def deliver(self, now: float) -> float:
        """Returns the seconds until the next packet is due."""
        while self._queue and self._queue[0][0] <= now:
            try:
                os.write(self._sink, self._queue.popleft()[1])
            except OSError:
                continue  # the device is down: the link is cut
        return self._queue[0][0] - now if self._queue else 1.0


def carry(ends: tuple[int, int], delay_s: float, bytes_s: float) -> None:
    ways = {ends[0]: Way(ends[1], delay_s, bytes_s), ends[1]: Way(ends[0], delay_s, bytes_s)}
    while True:
        wait_s = min(way.deliver(time.monotonic()) for way in ways.values())
        for fd in select.select(ends, (), (), max(0.0, wait_s))[0]:
            try:
                ways[fd].take(os.read(fd, _MTU), time.monotonic())
            except OSError:
                time.sleep(0.01)  # the device is down


if __name__ == "__main__":
    here, there, delay, mbit_s = sys.argv[1:]
    near, far = here.split("-")[1], there.split("-")[1]
    both = open_tun(here, f"long-{far}"), open_tun(there, f"long-{near}")
    print("ready", flush=True)
    carry(both, float(delay), float(mbit_s) * 1e6 / 8)
