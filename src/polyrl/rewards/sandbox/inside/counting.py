"""What a program uses at this moment, over all of its processes, as /proc tells it.

Memory is what nobody else has to give back: anonymous pages and shared memory, without files of the system. A forked
process shares its parent's pages until it writes; those are counted for each, so the zygote's own are subtracted.
"""

import os
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_OWN_KB = 12 << 10
"""Pages that every process has from the zygote."""


class Usage(NamedTuple):
    cpu_s: float
    memory_bytes: int
    num_processes: int


def usage_of_namespace() -> Usage:
    """Count every process of this pid namespace, and of those below it, but process 1 and this one."""
    own = ("1", str(os.getpid()))
    return _usage([int(name) for name in os.listdir("/proc") if name.isdigit() and name not in own])


def usage_of_session(leader: int) -> Usage:
    """Count the processes of a session. Without a namespace of its own, a process can leave it."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.getsid(int(name)) == leader:
                    found.append(int(name))
            except OSError:
                continue
    return _usage(found)


def queued_s(pid: int) -> float:
    """Return for how long a process could have run and had no core: it is not to blame for a busy machine."""
    try:
        with open(f"/proc/{pid}/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _usage(pids: list[int]) -> Usage:
    cpu_s, memory_kb, num = 0.0, 0, 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            with open(f"/proc/{pid}/status", "rb") as file:
                status = file.read()
        except OSError:  # it has ended
            continue
        # utime and stime: of all threads. Children that were waited for are in cutime and cstime.
        cpu_s += sum(int(fields[at]) for at in (11, 12, 13, 14)) / _TICKS
        num += int(fields[17])
        memory_kb += max(0, _kb(status, b"RssAnon:") - _OWN_KB) + _kb(status, b"RssShmem:")
    return Usage(cpu_s, memory_kb << 10, num)


def _kb(status: bytes, name: bytes) -> int:
    found = status.partition(name)[2]
    return int(found.split(None, 1)[0]) if found else 0
