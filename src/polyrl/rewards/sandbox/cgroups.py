"""A control group of a zygote's own: the memory and the processes of all that runs in it, limited by the kernel.

Both versions of control groups are tried, beneath the group that this process is in. Rules kept here: a group that
cannot be made, or that has no limits, is left out; the walls do not depend on it. Groups that a killed process left
behind are removed by the next one.
"""

import asyncio
import contextlib
import itertools
import os
from pathlib import Path

from msgspec import Struct

_ROOT = Path("/sys/fs/cgroup")
_NAME = "polyrl-sandbox"
_FILES = {
    "memory": (("memory.max", "memory.limit_in_bytes"), ("memory.swap.max",)),
    "pids": (("pids.max",), ()),
}
_NO_LIMIT = 1 << 62
_REMOVE_S = 2.0
_numbers = itertools.count()


class Cgroup(Struct, frozen=True):
    """Folders of one group, one a controller; with version 2 they are the same."""

    folders: tuple[Path, ...]

    def add(self, pid: int) -> None:
        for folder in self.folders:
            with contextlib.suppress(OSError):
                (folder / "cgroup.procs").write_text(str(pid))

    def allow(self, memory_bytes: int) -> None:
        """Raise the limit of memory: that of a compiler is not that of programs."""
        for folder in self.folders:
            for name in _FILES["memory"][0]:
                if (file := folder / name).exists():
                    with contextlib.suppress(OSError):
                        file.write_text(str(memory_bytes))

    async def remove(self) -> None:
        """Remove the group once its last process is gone."""
        for folder in self.folders:
            for _ in range(int(_REMOVE_S / 0.01)):
                try:
                    folder.rmdir()
                except FileNotFoundError:
                    break
                except OSError:
                    await asyncio.sleep(0.01)
                else:
                    break


def make(processes: int) -> Cgroup | None:
    """Make a group for so many processes, whose memory has no limit yet; None where this process may not."""
    wanted = {"memory": _NO_LIMIT, "pids": processes}
    folders: list[Path] = []
    name = f"{_NAME}-{os.getpid()}-{next(_numbers)}"
    for controller, parent in _parents().items():
        if controller in wanted and (folder := _make_one(parent / name, controller, wanted[controller])) is not None:
            folders.append(folder)
    return Cgroup(tuple(dict.fromkeys(folders))) if folders else None


def remove_left_behind() -> None:
    """Remove the groups of processes that are gone."""
    for parent in set(_parents().values()):
        for folder in parent.glob(f"{_NAME}-*"):
            pid = folder.name.split("-")[-2]
            if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
                with contextlib.suppress(OSError):
                    folder.rmdir()


def _parents() -> dict[str, Path]:
    """Return this process's own group of each controller."""
    found: dict[str, Path] = {}
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers:
            for one in controllers.split(","):
                found[one] = _ROOT / controllers / path.lstrip("/")
        elif (_ROOT / "cgroup.controllers").exists():
            for one in _FILES:
                found.setdefault(one, _ROOT / path.lstrip("/"))
    return found


def _make_one(folder: Path, controller: str, limit: int) -> Path | None:
    names, zeros = _FILES[controller]
    try:
        folder.mkdir(exist_ok=True)
        limits = [folder / one for one in names if (folder / one).exists()]
        if not limits:
            raise FileNotFoundError(folder)
        limits[0].write_text(str(limit))
        for one in zeros:
            if (folder / one).exists():
                (folder / one).write_text("0")
    except OSError:
        with contextlib.suppress(OSError):
            folder.rmdir()
        return None
    return folder
