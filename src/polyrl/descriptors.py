"""File descriptors: raise the limit to the system's maximum, and reserve some for work that must not run out of them.

Every incoming connection takes one, with or without a token. Connections are bounded where they are accepted
(manager/http.py); the reserve covers moments in which the system accepts them faster than they can be counted.
"""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_MOST = 1 << 20
"""The limit where the system has none: a table of descriptors takes memory."""


def raise_limit() -> int:
    """Raise the soft limit of this process to the hard one. Return the number of descriptors it may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # a system that counts otherwise keeps what it has
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return limit()


def limit() -> int:
    """Return the number of descriptors that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else soft


class Spare:
    """A reserve of descriptors, held open so that nothing else can take them."""

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
        """Free the reserve inside a `with` block. Call it in the event loop's thread: nothing is accepted meanwhile."""
        self.close()
        try:
            yield
        finally:
            self._fill()

    def close(self) -> None:
        while self._held:
            os.close(self._held.pop())
