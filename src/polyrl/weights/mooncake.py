"""Reading a source's memory through mooncake's transfer engine: over RDMA where available, otherwise in its TCP mode.

Only full versions are read this way, chunk by chunk, and every chunk is verified as over our own TCP: mooncake does not
check the bytes it moves. Requests still go over our own protocol, from peers that hold the key; a lease lasts as long
as that connection.

A warning for every guide: mooncake's own port listens on all interfaces and does not ask for a key. Any process that
reaches it can read and write the registered memory. Use it only inside a trusted network. It is off by default.
"""

import threading
from typing import Literal

import numpy as np

from polyrl.errors import UserError
from polyrl.weights.buffers import Buffer

Mode = Literal["tcp", "rdma"]


class Mooncake:
    """The transfer engine, one per process. A registered buffer stays registered until it or the engine is closed."""

    def __init__(self, mode: Mode, host: str, devices: str = "") -> None:
        """Start the engine. `host` is where others reach this machine; `devices` names RDMA devices (default: all)."""
        try:
            from mooncake.engine import TransferEngine  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise UserError(f"mooncake: it cannot be loaded: pip install polyrl[rdma] ({error})") from error
        self._engine = TransferEngine()
        self._guard = threading.Lock()
        self._registered: dict[Buffer, int] = {}
        if self._engine.initialize(host, "P2PHANDSHAKE", mode, devices):
            raise UserError(f"mooncake: its engine does not start in mode {mode!r} on {host}")
        self.address = f"{host}:{self._engine.get_rpc_port()}"

    def place_of(self, buffer: Buffer) -> int:
        """Register a buffer if it is not registered yet, and return its address for remote readers. Raises OSError."""
        with self._guard:
            if buffer not in self._registered:
                place = _address(buffer.view)
                if self._engine.register_memory(place, max(1, buffer.num_bytes)):
                    raise OSError("mooncake does not register the buffer")
                self._registered[buffer] = place
                buffer.before_close.append(lambda: self._forget(buffer))
            return self._registered[buffer]

    def read(self, address: str, place: int, into: memoryview) -> None:
        """Read remote memory into `into`, which must be part of a buffer registered here. Raises OSError."""
        if self._engine.transfer_sync_read(address, _address(into), place, len(into)):
            raise OSError(f"mooncake: reading from {address} failed")

    def _forget(self, buffer: Buffer) -> None:
        with self._guard:
            place = self._registered.pop(buffer, None)
            if place is not None:
                self._engine.unregister_memory(place)

    def close(self) -> None:
        with self._guard:
            for place in self._registered.values():
                self._engine.unregister_memory(place)
            self._registered.clear()


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)
