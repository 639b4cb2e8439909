"""Write files and folders atomically and synced: after a crash each is complete, or absent."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder to write in. At the end it is synced and renamed to `path`; on an error it is removed.

    Until then it has a random name, since a user may well have a `.cache` beside `cache`. A process that is killed
    leaves the unfinished folder behind. Raises OSError.
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
    """Remove the files of a folder that was empty before a failed write: half a file may look complete.

    For folders that `whole_folder` cannot replace by a rename: a mount point, and the current directory.
    """
    with suppress(OSError):
        for path in folder.iterdir():
            path.unlink()


def write_whole(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file atomically, in place of an earlier one. Raises OSError; a failed write leaves the earlier one.

    For run directories, where every `.NAME` is PolyRL's own: one that a killed process left there is overwritten.
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
    """Sync a folder. Without it the name of a synced file may be missing after a crash, and the file with it."""
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
