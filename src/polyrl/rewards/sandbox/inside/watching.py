"""The limits of a running program, looked at every few milliseconds from outside of its pid namespace.

Rules kept here: CPU time, memory and processes are counted over the whole tree, however its members were forked. The
program is process 1 of its namespace: when it ends or is killed, the kernel kills whatever else is in there, and it is
waited for until all of that is gone.
"""

import contextlib
import os
import select
import signal
import socket
import time
from typing import Any, NamedTuple

from polyrl.rewards.sandbox.inside.counting import (
    TreeUsage,
    pids_of_namespace,
    pids_of_session,
    queued_s,
    usage_of_namespace,
    usage_of_session,
)

_TICK_S = 0.02


class Bounds(NamedTuple):
    """The limits of one run, as the host packs them."""

    cpu_s: float
    wall_s: float
    longest_s: float
    """Time on the clock that also counts waiting for a core."""
    memory_bytes: float


class Watched(NamedTuple):
    reason: str
    status: int
    cpu_s: float
    wall_s: float
    queued_s: float
    """The part of `wall_s` for which it could have run and had no core."""


def watch(pid: int, control: socket.socket, bounds: Bounds, settings: dict[str, Any]) -> Watched:
    """Wait until the program has ended, or end it; `control` becomes readable if the host wants that."""
    poll, handle = select.poll(), os.pidfd_open(pid)
    poll.register(handle, select.POLLIN)
    poll.register(control, select.POLLIN)
    began = looked_at = time.monotonic()
    reason, cpu_s, no_core_s = "", 0.0, 0.0
    while not reason:
        ready = [number for number, _ in poll.poll(_TICK_S * 1e3)]
        now = time.monotonic()
        if handle in ready:
            reason = "ended"
        elif ready:
            reason = "host"
        elif now - looked_at >= _TICK_S:
            usage, looked_at = _usage(pid, settings), now
            cpu_s = max(cpu_s, usage.cpu_s)
            no_core_s = max(no_core_s, queued_s(_pids(pid, settings)))
            reason = _exceeded(usage, now - began, no_core_s, bounds, settings["processes"])
    os.close(handle)
    no_core_s = max(no_core_s, queued_s([pid]))  # it is not waited for yet, so that /proc still tells
    if reason != "ended" or settings["is_unsafe"]:
        _kill(pid, settings)
    _, status, used = os.wait4(pid, 0)
    cpu_s = max(cpu_s, used.ru_utime + used.ru_stime)
    if reason == "ended" and cpu_s > bounds.cpu_s:
        reason = "cpu"
    return Watched(reason, status, cpu_s, time.monotonic() - began, no_core_s)


def _usage(pid: int, settings: dict[str, Any]) -> TreeUsage:
    return usage_of_session(pid) if settings["is_unsafe"] else usage_of_namespace()


def _pids(pid: int, settings: dict[str, Any]) -> list[int]:
    return pids_of_session(pid) if settings["is_unsafe"] else pids_of_namespace()


def _exceeded(usage: TreeUsage, passed_s: float, no_core_s: float, bounds: Bounds, processes: int) -> str:
    if usage.cpu_s > bounds.cpu_s:
        return "cpu"
    if passed_s - no_core_s > bounds.wall_s:
        return "wall"
    if passed_s > bounds.longest_s:
        return "late"
    if usage.memory_bytes > bounds.memory_bytes:
        return "memory"
    return "processes" if usage.num_processes > processes else ""


def _kill(pid: int, settings: dict[str, Any]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
    if settings["is_unsafe"]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
