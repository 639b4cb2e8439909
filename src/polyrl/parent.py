"""A child that ends with the process that started it, however that ends."""

import contextlib
import ctypes
import signal

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
"""Loaded here: between fork and exec, a lock that a thread held would never be released."""


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask Linux, in the child, for this signal when the thread that started it ends. Does nothing elsewhere."""
    with contextlib.suppress(OSError, AttributeError):
        _LIBC.prctl(_PR_SET_PDEATHSIG, number)
