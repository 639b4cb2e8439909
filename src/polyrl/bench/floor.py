"""The time that this machine needs for the bytes of a pull: the same system calls in a bare loop, with no protocol.

    python -m polyrl.bench.floor NUM_BYTES     # the sending side, until its input ends

Three steps, taken in turn: into one megabyte that stays in the cache, as iperf3 does; into the place where each chunk
belongs; and hashed there. Time of a pull beyond the third step is our protocol's.
"""

import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import NamedTuple

import numpy as np

from polyrl.weights.buffers import Buffer
from polyrl.weights.chunks import CHUNK_BYTES, digest_function

NUM_STREAMS = 2
_SMALL_BYTES = 1 << 20
_WAIT_S = 60.0
_PLACE = struct.Struct("=q")
_CPU_S = struct.Struct("=d")
_TELL = -1
"""Where a place is asked for: how much CPU time has been used?"""


class FloorStep(NamedTuple):
    name: str
    in_place: bool
    hashed: bool


STEPS = (
    FloorStep("one_place", False, False),
    FloorStep("in_place", True, False),
    FloorStep("in_place_hashed", True, True),
)


def measure(num_bytes: int, num_rounds: int) -> dict[str, dict[str, float]]:
    """Return, for each step, the best GB/s and the median CPU seconds per GB at either end."""
    buffer = _filled(num_bytes, 0)
    try:
        return measure_into(buffer.view, num_rounds)
    finally:
        buffer.close()


def measure_into(view: memoryview, num_rounds: int) -> dict[str, dict[str, float]]:
    """Measure the same, into memory of whole chunks, which are all ones afterwards."""
    found: dict[str, list[tuple[float, float, float]]] = {step.name: [] for step in STEPS}
    argv = [sys.executable, "-m", "polyrl.bench.floor", str(len(view))]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sender:
        assert sender.stdin is not None and sender.stdout is not None
        port = int(sender.stdout.readline())
        streams = [_connect(port) for _ in range(NUM_STREAMS)]
        for _ in range(num_rounds):
            for step in STEPS:
                found[step.name].append(_once(streams, view, step))
        for stream in streams:
            stream.close()
        sender.stdin.close()
    keys = ("gb_s", "sender_cpu_s_per_gb", "receiver_cpu_s_per_gb")
    return {
        name: dict(zip(keys, (round(max(gb_s), 2), round(median(sent), 3), round(median(received), 3)), strict=True))
        for name, (gb_s, sent, received) in ((name, zip(*runs, strict=True)) for name, runs in found.items())
    }


def _filled(num_bytes: int, value: int) -> Buffer:
    """Whole chunks, as many as fit but one at least, and all pages there: what is asked for is a whole chunk."""
    buffer = Buffer(max(1, num_bytes // CHUNK_BYTES) * CHUNK_BYTES)
    np.frombuffer(buffer.view, np.uint8).fill(value)
    return buffer


def _connect(port: int) -> socket.socket:
    stream = socket.create_connection(("127.0.0.1", port), timeout=_WAIT_S)
    stream.settimeout(None)
    _tune(stream)
    return stream


def _tune(stream: socket.socket) -> None:
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def _once(streams: list[socket.socket], view: memoryview, step: FloorStep) -> tuple[float, float, float]:
    gb = len(view) / 1e9
    sent, received, start = _sender_cpu_s(streams[0]), cpu_s(), time.perf_counter()
    with ThreadPoolExecutor(len(streams)) as pool:
        parts = [range(part * CHUNK_BYTES, len(view), len(streams) * CHUNK_BYTES) for part in range(len(streams))]
        list(pool.map(lambda stream, places: _receive(stream, view, places, step), streams, parts))
    took_s = time.perf_counter() - start
    return gb / took_s, (_sender_cpu_s(streams[0]) - sent) / gb, (cpu_s() - received) / gb


def _receive(stream: socket.socket, view: memoryview, places: range, step: FloorStep) -> None:
    digest, small = digest_function("xxh3-128"), view[:_SMALL_BYTES]
    for ahead in places[:2]:
        stream.sendall(_PLACE.pack(ahead))
    for number, place in enumerate(places):
        chunk = view[place : place + CHUNK_BYTES]
        for piece in [chunk] if step.in_place else [small] * (CHUNK_BYTES // _SMALL_BYTES):
            if stream.recv_into(piece, len(piece), socket.MSG_WAITALL) != len(piece):
                raise OSError("the sending side of the floor has ended")
        for ahead in places[number + 2 : number + 3]:
            stream.sendall(_PLACE.pack(ahead))
        if step.hashed:
            digest(chunk)


def _sender_cpu_s(stream: socket.socket) -> float:
    stream.sendall(_PLACE.pack(_TELL))
    return _CPU_S.unpack(stream.recv(_CPU_S.size, socket.MSG_WAITALL))[0]


def send(num_bytes: int) -> None:
    buffer = _filled(num_bytes, 1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        threading.Thread(target=_accept, args=(listener, buffer.fd), daemon=True).start()
        sys.stdin.read()


def _accept(listener: socket.socket, fd: int) -> None:
    for _ in range(NUM_STREAMS):
        stream, _ = listener.accept()
        _tune(stream)
        threading.Thread(target=_serve, args=(stream, fd), daemon=True).start()


def _serve(stream: socket.socket, fd: int) -> None:
    while request := stream.recv(_PLACE.size, socket.MSG_WAITALL):
        (place,) = _PLACE.unpack(request)
        if place == _TELL:
            stream.sendall(_CPU_S.pack(cpu_s()))
            continue
        end = place + CHUNK_BYTES
        while place < end:
            place += os.sendfile(stream.fileno(), fd, place, end - place)


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    send(int(sys.argv[1]))
