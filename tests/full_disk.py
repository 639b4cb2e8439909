"""A disk that is nearly full, and a process that may open nothing more."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Of this process. Nothing is written beyond that, and it is told `File too large`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """In this process: whatever is free is taken."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    try:
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, before[1]))
        while True:
            try:
                taken.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                break
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for one in taken:
            os.close(one)
