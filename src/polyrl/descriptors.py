"""File descriptors: as many as the system grants, and some kept back for what must not fail for want of one.

Whoever dials us costs one, with or without a token. Connections are bounded where they are accepted (manager/http.py);
what is kept back here covers the moments in which the system accepts faster than anybody can count.
"""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_MOST = 1 << 20
"""Where the hard limit is none: a table of descriptors takes memory."""


def raise_limit() -> int:
    """Raise the soft limit of this process to the hard one; returns how many descriptors it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # a system that counts otherwise keeps what it has
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return limit()


def limit() -> int:
    """How many descriptors this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else soft


class Spare:
    """Descriptors that nobody else can take."""

    def __init__(self, num: int) -> None:
        self._num = num
        self._held: list[int] = []
        self._fill()

    def _fill(self) -> None:
        with suppress(OSError):  # as many as there are; the next one to give some back makes room
            while len(self._held) < self._num:
                self._held.append(os.open(os.devnull, os.O_RDONLY))

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Have them free while this lasts. In the thread of the event loop: nothing is accepted meanwhile."""
        self.close()
        try:
            yield
        finally:
            self._fill()

    def close(self) -> None:
        while self._held:
            os.close(self._held.pop())
