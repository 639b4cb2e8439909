"""Programs that a benchmark starts: pinned, bounded in time, measured as a tree, and stopped for sure.

The relay under test has one core of its own and the load has two others (on two cores: the other one), so that a figure
per CPU-second means the same for a relay of one thread and of many. On a machine of one core they share it.

Each program runs under `timeout`, in a session of its own; `stop` signals that session and nothing else.
"""

import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from benchmarks.environments import CannotMeasure

LIFETIME_S = 300
STOP_S = 3.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def relay_cpus() -> list[int]:
    return sorted(os.sched_getaffinity(0))[:1]


def load_cpus() -> list[int]:
    return sorted(os.sched_getaffinity(0))[1:3] or relay_cpus()


def allow_many_files() -> None:
    """As many as the machine lets us: a relay needs two a sample, and the usual limit is 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def busy_s() -> float:
    """CPU time that the cores in use have spent on anything, with what the machine underneath kept from them."""
    ours = {f"cpu{cpu}" for cpu in (*relay_cpus(), *load_cpus())}
    lines = (line.split() for line in Path("/proc/stat").read_text(encoding="utf-8").splitlines())
    user, nice, system, _idle, _waiting, irq, softirq, steal = (
        sum(column) for column in zip(*(map(int, line[1:9]) for line in lines if line[0] in ours), strict=True)
    )
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_S


class Program:
    """A process and its children. `log` takes what it says on stderr, and on stdout unless that is `piped`."""

    def __init__(
        self,
        argv: Sequence[str | Path],
        *,
        cpus: Sequence[int],
        log: Path,
        piped: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        if not shutil.which(argv[0]):
            raise CannotMeasure(f"{argv[0]} is not there")
        pinned = ["taskset", "-c", ",".join(map(str, cpus)), "timeout", "-k", "1", str(LIFETIME_S), *map(str, argv)]
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log = log
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                pinned,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else sink,
                stderr=sink,
                start_new_session=True,
                env={**os.environ, **(env or {})},
            )

    def read_line(self) -> bytes:
        """The next line of stdout; empty when it has ended. `timeout` bounds the wait."""
        return _stdout(self._process).readline()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def last_words(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1][-300:] if lines else "it said nothing"

    def cpu_s(self) -> float:
        """Time on a core of all threads of the tree, to the nanosecond: a tick is too coarse for what sleeps a lot."""
        return sum(_on_core_ns(pid) for pid in self._pids()) / 1e9

    def rss_bytes(self) -> int:
        return sum(int(_stat(pid)[21]) for pid in self._pids()) * _PAGE_BYTES

    def stop(self) -> None:
        """A relay may wait minutes for streams to end; it gets seconds."""
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        self._signal(signal.SIGKILL)
        self._process.wait(STOP_S)
        if self._process.stdout:
            self._process.stdout.close()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _pids(self) -> list[int]:
        found = [self._process.pid]
        for pid in found:  # grows while it is walked
            found += _children(pid)
        return [pid for pid in found if len(_stat(pid)) > 21]


def _stdout(process: subprocess.Popen[bytes]) -> IO[bytes]:
    if process.stdout is None:
        raise ValueError("this program's output goes to its log")
    return process.stdout


def _stat(pid: int) -> list[str]:
    """The fields after the name, which may hold spaces: utime is [11], rss [21]. Empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _on_core_ns(pid: int) -> int:
    """Of the threads that live; those that have ended are few in a relay, and not counted."""
    found = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            found += int(path.read_text(encoding="ascii").split()[0])
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, path.read_text(encoding="utf-8").split())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
