"""Processes that outlived the one that started them, found by a mark in their environment variables.

A killed host cannot end what its environment had started, and those may be in sessions of their own. Marks are
inherited. On a system without /proc nothing is found.
"""

import os
import signal
from contextlib import suppress
from pathlib import Path

MARK = "POLYRL_HOST_MARK"
"""The variable that bears the mark."""


def end(mark: str, proc: Path = Path("/proc")) -> int:
    """Kill the processes that bear this mark, and return how many there were."""
    wanted, found = f"{MARK}={mark}".encode(), 0
    for folder in proc.iterdir() if proc.is_dir() else ():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        with suppress(OSError):  # ended meanwhile, or somebody else's
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
                found += 1
    return found
