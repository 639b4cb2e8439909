"""Processes on this machine: those that a test finds, and those that it starts."""

import fcntl
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]


def children(pid: int, word: str) -> list[int]:
    """Processes that this one started, of that command."""
    found = []
    for name in (entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        try:
            stat = (Path("/proc") / name / "stat").read_text()
            words = (Path("/proc") / name / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if int(stat.rpartition(")")[2].split()[1]) == pid and word.encode() in words:
            found.append(int(name))
    return found


def fork_each(size: int, run: Callable[[int], None]) -> None:
    """Run it in so many processes, which share this one's imports, and end this one if one of them fails."""
    numbers = {_fork(run, number) for number in range(size)}
    while numbers:
        pid, status = os.wait()
        numbers.discard(pid)
        if status != 0:
            for other in numbers:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"one of {size} processes failed: {os.waitstatus_to_exitcode(status)}")


def _fork(run: Callable[[int], None], number: int) -> int:
    if (pid := os.fork()) != 0:
        return pid
    code = 1
    try:
        run(number)
        code = 0
    finally:
        if code:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)


def run_module(module: str, *arguments: str, timeout_s: float = 300) -> None:
    """Run a module of the tests; the processes that it forks end with it."""
    started = subprocess.Popen([sys.executable, "-m", module, *arguments], cwd=ROOT, start_new_session=True)
    try:
        assert started.wait(timeout=timeout_s) == 0
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()


def made_once(base: Path, name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder with what `make` left in it: once, however many processes run these tests.

    `base` is pytest's folder for this process.
    """
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    place = shared / name
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "done").exists():
            place.mkdir()
            make(place)
            (place / "done").touch()
    return place
