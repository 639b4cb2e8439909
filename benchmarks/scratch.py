"""A directory in memory for the length of a command, where the machine has memory as a directory.

A process that is killed cannot tidy up, and memory without an owner is missed until the machine restarts. So an owner
locks its directory, the kernel drops the lock however the owner ends, and the next owner removes what has no lock.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "polyrl-scratch-"


@contextmanager
def scratch(parent: Path | None = None) -> Iterator[Path]:
    parent = parent or memory()
    for left in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it is in use, or not ours
            os.close(_lock(left))
            shutil.rmtree(left, ignore_errors=True)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        with suppress(OSError):  # somebody who tidied up was faster than we
            lock = _lock(folder)
            if folder.exists():
                break
            os.close(lock)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def memory() -> Path:
    """Where files are in memory; where there is no such place, the directory for temporary files."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def _lock(folder: Path) -> int:
    """Raises OSError when somebody has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
