"""The resources that a program uses at this moment, over all of its processes, as /proc tells them.

Memory means anonymous pages, shared memory and page tables; cached pages of the system's files do not count. A forked
process shares the zygote's pages until it writes; those would be counted for each, so they are subtracted. A socket can
hold bytes that no process is charged with; each counts as if it were full. Programs cannot make its buffers larger,
share memory without a file, or leave children without a parent that waits (seccomp.py).
"""

import contextlib
import os
import socket
from collections.abc import Iterable
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_ANONYMOUS = b"RssAnon:"


def _socket_bytes() -> int:
    """Return what both directions of a Unix socket hold with the buffers that this machine gives by default."""
    with socket.socket(socket.AF_UNIX) as one:
        return 2 * one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


_SOCKET_BYTES = _socket_bytes()


class TreeUsage(NamedTuple):
    cpu_s: float
    memory_bytes: int
    num_processes: int


def pids_of_namespace() -> list[int]:
    """Return every process of this pid namespace, and of those below it, but process 1 and this one."""
    own = ("1", str(os.getpid()))
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and name not in own]


def usage_of_namespace() -> TreeUsage:
    found = _usage(pids_of_namespace())
    return found._replace(memory_bytes=found.memory_bytes + max(0, _num_sockets() - 1) * _SOCKET_BYTES)


def pids_of_session(leader: int) -> list[int]:
    """Return the processes of a session. Without a namespace of its own, a process can leave it."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.getsid(int(name)) == leader:
                    found.append(int(name))
            except OSError:
                continue
    return found


def usage_of_session(leader: int) -> TreeUsage:
    return _usage(pids_of_session(leader))


def queued_s(pids: Iterable[int]) -> float:
    """Return for how long any thread of these processes could have run and had no core: it is not to blame for a busy
    machine."""
    return max((_queued_s(path) for pid in pids for path in _threads(pid)), default=0.0)


def _queued_s(path: str) -> float:
    try:
        with open(f"{path}/schedstat", "rb") as file:
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
    status = _read_status(f"/proc/{pid}")
    if _ANONYMOUS in status:
        return status
    for path in _threads(pid):
        with contextlib.suppress(OSError):
            of_thread = _read_status(path)
            if _ANONYMOUS in of_thread:
                return of_thread
    return status


def _read_status(folder: str) -> bytes:
    """Return all lines but the first, which is a name of the process's own choice, such as `RssAnon: 0`."""
    with open(f"{folder}/status", "rb") as file:
        return file.read().partition(b"\n")[2]


def _threads(pid: int) -> list[str]:
    try:
        return [f"/proc/{pid}/task/{one}" for one in os.listdir(f"/proc/{pid}/task")]
    except OSError:  # it has ended
        return []


def _private_kb(status: bytes) -> int:
    return _kb(status, _ANONYMOUS) + _kb(status, b"VmSwap:")


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
