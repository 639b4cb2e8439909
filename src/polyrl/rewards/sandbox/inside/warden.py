"""Process 1 of a program's own pid namespace: it starts the program, watches its limits, and tells what became of it.

Rules kept here: the program is another process, without the line to the host and without any capability. CPU time,
memory and processes are counted over the whole tree, however its members were forked. The warden ends with the
program, and the kernel then kills whatever is left in the namespace. Signals from inside cannot end a process 1.
Left out: what a result means. The warden reports bytes and how the program ended; the host compares.
"""

import contextlib
import os
import resource
import select
import signal
import socket
import time
from typing import Any, NoReturn

from polyrl.rewards.sandbox.inside import child, frames, kernel
from polyrl.rewards.sandbox.inside.counting import Usage, queued_s, usage_of_namespace, usage_of_session

_TICK_S = 0.02
_READ_BYTES = 1 << 16


def run(line: socket.socket, settings: dict[str, Any]) -> NoReturn:
    """Run the job that the line brings, send its result, and end."""
    code = 1
    try:
        if settings["is_unsafe"]:
            settings = {**settings, "home": _make_home()}
        else:
            _raise_walls(settings)
        header, pieces = frames.read(line, frames.MAX_JOB_BYTES)
        line.sendall(_run_job(line, header, pieces, settings))
        code = 0
    finally:
        if settings["is_unsafe"]:
            _remove_home(settings["home"])
        os._exit(code)


def _raise_walls(settings: dict[str, Any]) -> None:
    """Give the program its own mounts: an empty disk of limited size, and the processes of its own namespace."""
    kernel.unshare(kernel.NEW_MOUNTS)  # the filter refuses all IPC that a namespace would divide
    kernel.mount("tmpfs", settings["home"], kernel.NO_SUID | kernel.NO_DEVICES, settings["disk_options"])
    flags = kernel.NO_SUID | kernel.NO_DEVICES | kernel.NO_EXEC
    try:
        kernel.mount("proc", "/proc", flags, "subset=pid")
    except OSError:  # before Linux 5.8
        kernel.mount("proc", "/proc", flags, "")


def _run_job(line: socket.socket, job: dict[str, Any], pieces: list[bytes], settings: dict[str, Any]) -> bytes:
    streams = _Streams(job["output_bytes"], pieces[0])
    began = time.monotonic()
    start = _start_tests if job["mode"] == "tests" else _start
    pid = start(line, job, pieces, streams.far_ends(), settings)
    streams.close_far_ends()
    watch = _Watch(pid, job, settings)
    reason, status = watch.until_end(streams)
    wall_s = time.monotonic() - began
    collected = b"" if reason != "ended" else _collect(settings["home"], job.get("collect", ""), job["collect_bytes"])
    result = {"reason": reason, "status": status, "cpu_s": watch.cpu_s, "wall_s": wall_s}
    return frames.pack(result, [*(bytes(one) for one in streams.heard), collected])


def _make_home() -> str:
    import tempfile  # without a sandbox alone: what the zygote imports, every fork copies

    return tempfile.mkdtemp(prefix="polyrl-unsafe-")


def _remove_home(home: str) -> None:
    import shutil

    shutil.rmtree(home, ignore_errors=True)


def _start(
    line: socket.socket, job: dict[str, Any], pieces: list[bytes], streams: list[int], settings: dict[str, Any]
) -> int:
    pid = os.fork()
    if pid == 0:
        line.close()
        child.run(job, pieces, streams, settings)
    return pid


def _start_tests(
    line: socket.socket, job: dict[str, Any], pieces: list[bytes], streams: list[int], settings: dict[str, Any]
) -> int:
    """Start the program, then read the tests, and start them: the program has never had them in its memory."""
    ours, theirs = socket.socketpair()
    _start(line, {**job, "mode": "module"}, pieces, [*streams[:3], theirs.fileno()], settings)
    theirs.close()
    header, tests = frames.read(line, frames.MAX_JOB_BYTES)
    pid = _start(line, {**job, **header}, [b"", *tests], [*streams, ours.fileno()], settings)
    ours.close()
    return pid


class _Streams:
    """The program's standard input, its standard output and error, and the channel of a function's value."""

    def __init__(self, most: int, given: bytes) -> None:
        pairs = [os.pipe() for _ in range(4)]
        self._far = [pairs[0][0], *(one[1] for one in pairs[1:])]
        self._input = pairs[0][1]
        self._near = [one[0] for one in pairs[1:]]
        self._given, self._most = memoryview(given), most
        self.heard = [bytearray() for _ in self._near]
        self.poll = select.poll()
        for one in self._near:
            os.set_blocking(one, False)
            self.poll.register(one, select.POLLIN)
        os.set_blocking(self._input, False)
        self.feed()

    def far_ends(self) -> list[int]:
        return self._far

    def close_far_ends(self) -> None:
        for one in self._far:
            os.close(one)

    def feed(self) -> None:
        """Write what the pipe takes of the standard input; close it after the last byte."""
        if self._input < 0:
            return
        try:
            while self._given:
                self._given = self._given[os.write(self._input, self._given) :]
        except BlockingIOError:
            self.poll.register(self._input, select.POLLOUT)
            return
        except OSError:  # the program closed its standard input
            pass
        self._forget(self._input)
        os.close(self._input)
        self._input = -1

    def serve(self, ready: list[tuple[int, int]]) -> bool:
        """Move bytes of the descriptors that are ready. False: the program printed more than it may."""
        for number, _ in ready:
            if number == self._input:
                self.feed()
            elif number in self._near and not self._hear(number):
                return False
        return True

    def drain(self) -> bool:
        return all(self._hear(number) for number in self._near)

    def _forget(self, number: int) -> None:
        with contextlib.suppress(KeyError):
            self.poll.unregister(number)

    def _hear(self, number: int) -> bool:
        heard = self.heard[self._near.index(number)]
        while True:
            try:
                data = os.read(number, _READ_BYTES)
            except BlockingIOError:
                return True
            if not data:
                self._forget(number)
                return True
            if len(heard) + len(data) > self._most:
                heard += data[: self._most - len(heard)]
                return False
            heard += data


class _Watch:
    """The program's limits, looked at every few milliseconds until it ends or exceeds one."""

    def __init__(self, pid: int, job: dict[str, Any], settings: dict[str, Any]) -> None:
        self._pid, self._job, self._settings = pid, job, settings
        self.cpu_s = 0.0

    def until_end(self, streams: _Streams) -> tuple[str, int]:
        """Return why the run is over, and the program's status as waitpid has it."""
        handle = os.pidfd_open(self._pid)
        streams.poll.register(handle, select.POLLIN)
        began = looked_at = time.monotonic()
        reason = ""
        while not reason:
            ready = streams.poll.poll(_TICK_S * 1e3)
            if any(number == handle for number, _ in ready):
                reason = "ended"
            elif not streams.serve(ready):
                reason = "output"
            elif time.monotonic() - looked_at >= _TICK_S:
                reason, looked_at = self._exceeded(time.monotonic() - began), time.monotonic()
                self._reap_orphans()
        status = self._end_all() if reason != "ended" else self._wait(os.WNOHANG)
        if reason == "ended" and not streams.drain():
            reason = "output"
        if reason == "ended":
            self._end_all()
        own = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.cpu_s = max(self.cpu_s, own.ru_utime + own.ru_stime)
        if reason == "ended" and self.cpu_s > self._job["cpu_s"]:
            reason = "cpu"
        return reason, status

    def _usage(self) -> Usage:
        return usage_of_session(self._pid) if self._settings["is_unsafe"] else usage_of_namespace()

    def _exceeded(self, passed_s: float) -> str:
        usage = self._usage()
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.cpu_s = max(self.cpu_s, usage.cpu_s + ended.ru_utime + ended.ru_stime)
        if self.cpu_s > self._job["cpu_s"]:
            return "cpu"
        if passed_s - queued_s(self._pid) > self._job["wall_s"] or passed_s > self._job["longest_s"]:
            return "wall"
        if usage.memory_bytes > self._job["memory_bytes"]:
            return "memory"
        return "processes" if usage.num_processes > self._settings["processes"] else ""

    def _reap_orphans(self) -> None:
        """Wait for processes that lost their parent, which the kernel gave to process 1; never for the program."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if found is None or found.si_pid == self._pid:
                    return
                os.waitpid(found.si_pid, 0)
            except ChildProcessError:
                return

    def _wait(self, flags: int) -> int:
        _, status = os.waitpid(self._pid, flags)
        return status

    def _end_all(self) -> int:
        """Kill every process of the namespace but this one, and return the program's status."""
        status, unsafe = 0, self._settings["is_unsafe"]
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL) if unsafe else os.kill(-1, signal.SIGKILL)
        while True:
            try:
                pid, found = os.waitpid(-1, 0)
            except ChildProcessError:
                return status
            if pid == self._pid:
                status = found


def _collect(home: str, name: str, most: int) -> bytes:
    """Read a file that the program made, if it is a plain one and not too long."""
    if not name:
        return b""
    try:
        descriptor = os.open(os.path.join(home, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    with open(descriptor, "rb") as file:
        held = file.read(most + 1)
    return held if len(held) <= most else b""
