"""What a program uses at this moment, over all of its processes, as /proc tells it.

Memory means anonymous pages, shared memory and page tables; cached pages of the system's files do not count. A forked
process shares the zygote's pages until it writes; those would be counted for each, so they are subtracted. A socket can
hold bytes that no process is charged with; each counts as if it were full. Programs cannot make its buffers larger,
share memory without a file, or have children that nobody waits for (seccomp.py).
"""

import os
import socket
from collections.abc import Iterator
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")


def _socket_bytes() -> int:
    """Return what both directions of a Unix socket hold with the buffers that this machine gives by default."""
    with socket.socket(socket.AF_UNIX) as one:
        return 2 * one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


_SOCKET_BYTES = _socket_bytes()


class TreeUsage(NamedTuple):
    cpu_s: float
    memory_bytes: int
    num_processes: int


def usage_of_namespace() -> TreeUsage:
    """Count every process of this pid namespace, and of those below it, but process 1 and this one."""
    own = ("1", str(os.getpid()))
    found = _usage([int(name) for name in os.listdir("/proc") if name.isdigit() and name not in own])
    return found._replace(memory_bytes=found.memory_bytes + max(0, _num_sockets() - 1) * _SOCKET_BYTES)


def usage_of_session(leader: int) -> TreeUsage:
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


def _usage(pids: list[int]) -> TreeUsage:
    cpu_s, memory_kb, num = 0.0, 0, 0
    own_kb = _own_kb()
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            status = _status(pid)
        except OSError:  # it has ended
            continue
        # utime and stime: of all threads. Children that were waited for are in cutime and cstime.
        cpu_s += sum(int(fields[at]) for at in (11, 12, 13, 14)) / _TICKS
        num += int(fields[17])
        memory_kb += max(0, _private_kb(status) - own_kb)
        memory_kb += _kb(status, b"RssShmem:") + _kb(status, b"VmPTE:")
    return TreeUsage(cpu_s, memory_kb << 10, num)


def _own_kb() -> int:
    return _private_kb(_status(os.getpid()))


def _status(pid: int) -> bytes:
    """Return what /proc says of a process. Once its first thread has ended, only the other threads tell its memory."""
    for path in (f"/proc/{pid}", *_threads(pid)):
        with open(f"{path}/status", "rb") as file:
            status = file.read()
        if b"RssAnon:" in status:
            break
    return status


def _threads(pid: int) -> Iterator[str]:
    yield from (f"/proc/{pid}/task/{one}" for one in os.listdir(f"/proc/{pid}/task"))


def _private_kb(status: bytes) -> int:
    return _kb(status, b"RssAnon:") + _kb(status, b"VmSwap:")


def _num_sockets() -> int:
    """Return how many sockets the network namespace has, which is this zygote's alone."""
    try:
        with open("/proc/self/net/sockstat", "rb") as file:
            return int(file.readline().split()[2])
    except (OSError, IndexError, ValueError):
        return 0


def _kb(status: bytes, name: bytes) -> int:
    found = status.partition(name)[2]
    return int(found.split(None, 1)[0]) if found else 0
