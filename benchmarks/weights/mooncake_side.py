"""One end of mooncake's transfer engine in TCP mode. Run by the Python that has it installed; knows no PolyRL.

python mooncake_side.py hold NUM_BYTES               says {"address": ..., "buffer": ...}, and waits for its input's end
python mooncake_side.py read NUM_BYTES ADDRESS BUFFER  reads it whole and in pieces, says {"gb_s": {...}}
"""

import ctypes
import json
import mmap
import os
import sys
import time

PIECES = (4 << 20, 64 << 20, 0)
"""Bytes of a request; 0 is one request for all."""
NUM_READS = 3


def engine_with(num_bytes: int):
    from mooncake.engine import TransferEngine  # pyright: ignore[reportMissingImports]

    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        raise SystemExit("mooncake does not initialize in TCP mode")
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
    buffer = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if engine.register_memory(buffer, num_bytes):
        raise SystemExit("mooncake does not register memory")
    return engine, memory, buffer


def hold(num_bytes: int) -> None:
    engine, memory, buffer = engine_with(num_bytes)
    memory[:4] = memory[-4:] = b"held"
    say({"address": f"127.0.0.1:{engine.get_rpc_port()}", "buffer": buffer})
    sys.stdin.read()


def read(num_bytes: int, address: str, peer_buffer: int) -> None:
    engine, memory, buffer = engine_with(num_bytes)
    gb_s: dict[str, float] = {}
    for piece in PIECES:
        size = piece or num_bytes
        offsets = range(0, num_bytes, size)
        for _ in range(NUM_READS):
            start = time.perf_counter()
            code = engine.batch_transfer_sync_read(
                address,
                [buffer + offset for offset in offsets],
                [peer_buffer + offset for offset in offsets],
                [min(size, num_bytes - offset) for offset in offsets],
            )
            took_s = time.perf_counter() - start
            if code:
                raise SystemExit(f"mooncake's read failed with {code}")
            name = f"{piece >> 20} MiB" if piece else "whole"
            gb_s[name] = max(gb_s.get(name, 0.0), num_bytes / 1e9 / took_s)
    if memory[:4] != b"held" or memory[-4:] != b"held":
        raise SystemExit("mooncake's bytes did not arrive")
    say({"gb_s": {name: round(value, 2) for name, value in gb_s.items()}})


def say(what: dict) -> None:
    print("polyrl:" + json.dumps(what), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        hold(int(sys.argv[2]))
    else:
        read(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    sys.stdout.flush()
    os._exit(0)  # its threads do not end by themselves
