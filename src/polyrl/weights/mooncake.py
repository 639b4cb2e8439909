"""Reading a source's memory through mooncake's transfer engine: RDMA where there is some, its TCP mode where not.

Only full versions go this way, chunk by chunk, and every chunk is verified as it is over our own TCP: mooncake does not
check what it moves. Who has what is still asked over our own protocol, by whoever holds the key; a lease lasts as long
as that connection.

A warning that belongs in every guide: mooncake's own port listens on all interfaces and asks nobody for a key. Whoever
reaches it can read what is registered, and write to it. Use it inside a network that you trust. It is off by default.
"""

import threading
from typing import Literal

import numpy as np

from polyrl.errors import UserError
from polyrl.weights.buffers import Buffer

Mode = Literal["tcp", "rdma"]


class Mooncake:
    """One engine a process. Buffers are registered once and stay so until they are closed with the engine."""

    def __init__(self, mode: Mode, host: str, devices: str = "") -> None:
        """`host` is where others reach this machine; `devices` names RDMA devices, all of them by default."""
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
        """Where a buffer lies, for who reads it from afar."""
        with self._guard:
            if buffer not in self._registered:
                place = _address(buffer.view)
                if self._engine.register_memory(place, max(1, buffer.num_bytes)):
                    raise OSError("mooncake does not register the buffer")
                self._registered[buffer] = place
                buffer.before_close.append(lambda: self._forget(buffer))
            return self._registered[buffer]

    def read(self, address: str, place: int, into: memoryview) -> None:
        """`into` is part of a buffer that is registered here. Raises OSError."""
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
