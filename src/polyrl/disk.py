"""Files that are on the disk, not in somebody's buffer: there whole, or not at all."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A new folder to write in, which gets its name at the end, or is removed. Raises OSError.

    Until then its name is one that nobody else has: a user may well have a `.cache` beside `cache`. A process that is
    killed leaves it behind.
    """
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}.unfinished")
    fresh.mkdir(parents=True)
    try:
        yield fresh
        for folder, _, names in os.walk(fresh):
            for name in names:
                _sync(Path(folder, name))
            sync_folder(Path(folder))
        fresh.rename(path)
        sync_folder(path.parent)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def remove_files(folder: Path) -> None:
    """What was written before the disk was full, from a folder that had been empty: half a file may look whole.

    For where `whole_folder` cannot be: a mount point and the current directory take no other folder's name.
    """
    with suppress(OSError):
        for path in folder.iterdir():
            path.unlink()


def write_whole(path: Path, data: bytes, mode: int = 0o666) -> None:
    """In place of what is there, if anything. Raises OSError; then that is as it was.

    For the directories of runs, whose `.NAME` are all ours: what a killed process left there is written over.
    """
    fresh = path.with_name(f".{path.name}")
    try:
        write_synced(fresh, data, mode)
        fresh.rename(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_synced(path: Path, data: bytes, mode: int = 0o666) -> None:
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """A file that is on the disk is lost all the same if its name is not."""
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
