"""Anonymous shared memory: it has no name, so even a process that is killed leaves none of it behind.

Page faults decide how fast bytes move, so a buffer gets all its pages when it is made, and is then kept. It is sealed:
its owner writes through the mapping made here, and a process that was passed the descriptor can only read. A buffer
larger than the available memory is refused here, before the kernel's OOM killer has to find a victim.
"""

import contextlib
import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

from polyrl.errors import UserError
from polyrl.weights.huge_pages import map_file

_SEAL_FUTURE_WRITE = 0x10
"""Available since Linux 5.1. Python names it from 3.13 on."""


class Buffer:
    """A fixed number of bytes in memory, as a view to write to and as a file to send from."""

    def __init__(self, num_bytes: int, held: range | None = None) -> None:
        """`held` are the bytes that are used, if not all are: only they take memory."""
        self.num_bytes = num_bytes
        self.held = range(num_bytes) if held is None else held
        self._num_users = 0
        self._guard = threading.Lock()
        self.before_close: list[Callable[[], None]] = []
        size = max(num_bytes, mmap.PAGESIZE)
        left = available_bytes()
        if len(self.held) > left:
            raise UserError(f"no memory for {len(self.held)} bytes of weights: {left} are left")
        self.fd = os.memfd_create("polyrl-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            self.view = map_file(self.fd, size, self.held)[:num_bytes]
        except OSError as error:
            self._close_file()
            raise UserError(f"no memory for {len(self.held)} bytes of weights: {error.strerror}") from error
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)

    @property
    def is_used(self) -> bool:
        """Whether a reader outside of any store uses the buffer. A used buffer is neither closed nor written to."""
        return self._num_users > 0

    def use(self) -> None:
        with self._guard:
            self._num_users += 1

    def leave(self) -> None:
        with self._guard:
            self._num_users -= 1

    def close(self) -> None:
        """Give the memory back. The memory of a buffer that still has users is freed with the last of their views."""
        if self.is_used or self.fd < 0:
            return
        for prepare in self.before_close:
            prepare()
        self._close_file()
        with contextlib.suppress(BufferError):
            self.view.release()

    def _close_file(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            self._close_file()


def available_bytes(processes: Path = Path("/proc"), group: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process may still take, bounded by the machine's memory and by its control group's."""
    machine = _read_figures(processes / "meminfo")
    left = (machine["MemAvailable:"] + machine["SwapFree:"]) << 10
    with contextlib.suppress(OSError, ValueError):  # there is no such group, or the limit is "max"
        allowed = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        given_back = _read_figures(group / "memory.stat").get("inactive_file", 0)  # freed by the kernel on demand
        left = min(left, max(0, allowed - used + given_back))
    return left


def _read_figures(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines}
