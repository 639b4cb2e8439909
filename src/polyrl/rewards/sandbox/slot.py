"""One zygote as the host sees it: started, asked for one run at a time, and killed if anything is odd.

Rules kept here: a run ends when the zygote has repeated the run's nonce, which it does when every process of the
program is gone; and a zygote that sends anything else, more than it may, or nothing in time is not used again. Killing
process 1 of its pid namespace ends everything inside.
"""

import asyncio
import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

from polyrl.errors import UserError, one_line, plain, shorten
from polyrl.rewards.sandbox import bubblewrap
from polyrl.rewards.sandbox.cgroups import Cgroup
from polyrl.rewards.sandbox.inside import frames
from polyrl.rewards.sandbox.inside.watching import Bounds
from polyrl.rewards.sandbox.inside.zygote import BOUNDS, END_IT, ENDED, MESSAGE_BYTES, NONCE_BYTES, READY

START_TIMEOUT_S = 20.0
GRACE_S = 0.6
"""The time after a program's limit in which the zygote must kill it and say so; otherwise the zygote is ended."""
_READ_BYTES = 1 << 16
_MORE_BYTES = 128 << 20
"""Of a control group: the zygote itself, and the files that the kernel has read for it."""
_CHILD = re.compile(rb'"child-pid": (\d+)[,\s}]')


class SlotBroke(Exception):
    """The zygote is gone or cannot be trusted any more. The message is one line."""


class SandboxJob(NamedTuple):
    """A run of a program, as its process gets it."""

    header: dict[str, Any]
    pieces: list[bytes]
    bounds: Bounds
    output_bytes: int
    """The most that is taken of the output, and of the errors."""
    value_bytes: int
    tests: tuple[dict[str, Any], list[bytes]] | None = None
    """The part of a run that follows once the program's process is there."""


class RunResult(NamedTuple):
    """The output of a program, as bytes that a stranger wrote."""

    reason: str
    """`ended`, or the limit that was exceeded: cpu, wall, memory, output, processes; `late`: time on the clock, which
    also counts waiting for a core."""
    status: int
    """How the program's process ended, as waitpid has it."""
    cpu_s: float
    wall_s: float
    queued_s: float
    """The part of `wall_s` for which the program had no core."""
    output: bytes
    errors: bytes
    value: bytes


class _Stream:
    """The near end of a pipe that a program writes to. `tell` is called if it writes too much."""

    def __init__(self, most: int, tell: Callable[[], None]) -> None:
        self._near, self.far = os.pipe()
        self._most, self._tell = most, tell
        self._loop = asyncio.get_running_loop()
        self.heard = bytearray()
        self.is_full = False
        os.set_blocking(self._near, False)
        self._loop.add_reader(self._near, self.read)

    def read(self) -> bool:
        """Read what is there. False: there is no more, or no more is taken."""
        try:
            data = os.read(self._near, _READ_BYTES)
        except BlockingIOError:
            return False
        if data and len(self.heard) + len(data) <= self._most:
            self.heard += data
            return True
        self._loop.remove_reader(self._near)
        if data and not self.is_full:
            self.heard += data[: self._most - len(self.heard)]
            self.is_full = True
            self._tell()
        return False

    def close_far(self) -> None:
        os.close(self.far)
        self.far = -1

    def close(self) -> None:
        self._loop.remove_reader(self._near)
        os.close(self._near)
        if self.far >= 0:
            self.close_far()


class Slot:
    """One zygote. `start` it, `run` programs one after the other, `close` it."""

    def __init__(
        self, layout: bubblewrap.MachineLayout | None, settings: dict[str, Any], seccomp: bytes, cgroup: Cgroup | None
    ) -> None:
        self._layout, self._settings, self._seccomp, self._cgroup = layout, settings, seccomp, cgroup
        self._process: subprocess.Popen[bytes] | None = None
        self._init = 0
        """Process 1 of the sandbox's pid namespace, by its number outside."""
        self._control, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._home = ""
        """The folder of programs without a sandbox."""
        self._allowed_bytes = 0
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed by close()

    async def start(self) -> None:
        """Start the zygote. Raises SlotBroke, with what the sandbox said."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await (self._start_unsafe() if self._layout is None else self._start_safe(self._layout))
                self._theirs.close()
                if await asyncio.get_running_loop().sock_recv(self._control, MESSAGE_BYTES) != READY:
                    raise SlotBroke(self._complaint("ended at its start"))
        except (TimeoutError, OSError) as error:
            raise SlotBroke(self._complaint(one_line(error))) from error

    async def run(self, job: SandboxJob) -> RunResult:
        """Run one program. Raises SlotBroke; after it, and after a cancellation, the slot has to be closed."""
        self._allow(int(job.bounds.memory_bytes))
        most = (job.output_bytes, job.output_bytes, job.value_bytes)
        streams = [_Stream(one, self._end_it) for one in most]
        line, far = socket.socketpair()
        try:
            line.setblocking(False)
            with far:
                given = [far.fileno(), *(one.far for one in streams)]
                socket.send_fds(self._control, [BOUNDS.pack(*job.bounds)], given)
            for one in streams:
                one.close_far()
            async with asyncio.timeout(job.bounds.longest_s + GRACE_S):
                return await self._finish(job, line, streams)
        except TimeoutError as error:
            raise SlotBroke("the sandbox did not answer in time") from error
        except (OSError, UnicodeDecodeError) as error:
            raise SlotBroke(self._complaint(one_line(error))) from error
        finally:
            line.close()
            for one in streams:
                one.close()

    async def _finish(self, job: SandboxJob, line: socket.socket, streams: list[_Stream]) -> RunResult:
        """Send the job and the nonce, and wait until the program and all its processes are gone."""
        loop, nonce = asyncio.get_running_loop(), secrets.token_bytes(NONCE_BYTES)
        self._control.send(nonce)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it ended early, and will say why
            await loop.sock_sendall(line, frames.pack(job.header, job.pieces))
            if job.tests is not None:
                await loop.sock_sendall(line, frames.pack(*job.tests))
        said = await loop.sock_recv(self._control, MESSAGE_BYTES)
        if said[:NONCE_BYTES] != nonce or len(said) != NONCE_BYTES + ENDED.size:
            raise SlotBroke(self._complaint("the sandbox sent an answer without a request"))
        reason, status, *times = ENDED.unpack(said[NONCE_BYTES:])
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            if failure := line.recv(1000):
                raise SlotBroke(shorten(plain(f"the sandbox could not be closed: {failure.decode(errors='replace')}")))
        for one in streams:
            while one.read():
                pass
        is_full = any(one.is_full for one in streams)
        why = "output" if is_full else reason.rstrip(b"\0").decode()
        return RunResult(why, status, *times, *(bytes(one.heard) for one in streams))

    def _allow(self, memory_bytes: int) -> None:
        """Have the control group's limit a little above the job's, which is counted without the system's files."""
        if self._cgroup is not None and memory_bytes > self._allowed_bytes:
            self._allowed_bytes = memory_bytes
            self._cgroup.allow(memory_bytes + self._settings["disk_bytes"] + _MORE_BYTES)

    def _end_it(self) -> None:
        with contextlib.suppress(OSError):
            self._control.send(END_IT)

    async def close(self) -> None:
        """Kill everything inside, and wait for it."""
        for number in (self._init, 0 if self._process is None else self._process.pid):
            if number:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(number, signal.SIGKILL)
        self._init = 0
        self._control.close()
        self._theirs.close()
        self._errors.close()
        process, self._process = self._process, None
        while process is not None and process.poll() is None:
            await asyncio.sleep(0.005)
        if self._cgroup is not None:
            await self._cgroup.remove()
        if self._home:
            shutil.rmtree(self._home, ignore_errors=True)

    def _complaint(self, what: str) -> str:
        """Return what went wrong, with the last line that the sandbox wrote to its standard error."""
        with contextlib.suppress(OSError, ValueError):
            self._errors.seek(0)
            said = self._errors.read(1 << 16).decode(errors="replace").strip()
            if said:
                return shorten(plain(f"{what}: {said.splitlines()[-1]}"))
        return what

    # Starting

    async def _start_safe(self, layout: bubblewrap.MachineLayout) -> None:
        info, info_far = os.pipe()
        block_far, block = os.pipe()
        seccomp, seccomp_far = os.pipe()
        os.write(seccomp_far, self._seccomp)
        os.close(seccomp_far)
        pipes = bubblewrap.Pipes(self._theirs.fileno(), info_far, block_far, seccomp)
        try:
            self._popen(
                bubblewrap.command(layout, pipes, self._settings), (pipes.control, info_far, block_far, pipes.seccomp)
            )
            os.close(info_far)
            info_far = -1
            self._init = await self._read_child(info)
            self._map_users(layout)
            if self._cgroup is not None:
                self._cgroup.add(self._init)
            os.write(block, b"1")
        finally:
            for one in (info, info_far, block_far, block, seccomp):
                if one >= 0:
                    os.close(one)

    async def _start_unsafe(self) -> None:
        code = "from polyrl.rewards.sandbox.inside import zygote; zygote.main()"
        self._home = tempfile.mkdtemp(prefix="polyrl-unsafe-")
        settings = json.dumps({**self._settings, "home": self._home})
        words = [sys.executable, "-c", code, str(self._theirs.fileno()), settings]
        paths = os.pathsep.join(one for one in sys.path if one)
        self._popen(words, (self._theirs.fileno(),), {"PYTHONPATH": paths, "PYTHONHASHSEED": "0"})
        await asyncio.sleep(0)

    def _popen(self, words: list[str], descriptors: tuple[int, ...], environment: dict[str, str] | None = None) -> None:
        try:
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._errors,
                pass_fds=descriptors, env={} if environment is None else environment, cwd="/",
            )  # fmt: skip
        except OSError as error:
            raise UserError(f"the sandbox cannot be started: {one_line(error)}") from error

    async def _read_child(self, info: int) -> int:
        """Read the number of the sandbox's process 1. Bubblewrap tells more, and dies if not all of it is read."""
        os.set_blocking(info, False)
        said, loop = b"", asyncio.get_running_loop()
        while (found := _CHILD.search(said)) is None or b"}" not in said:
            readable = asyncio.Event()
            loop.add_reader(info, readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(info)
            data = os.read(info, 4096)
            if not data or len(said) > 1 << 16:
                self._wait_a_moment()
                raise SlotBroke(self._complaint("bubblewrap ended at its start"))
            said += data
        return int(found[1])

    def _map_users(self, layout: bubblewrap.MachineLayout) -> None:
        folder = f"/proc/{self._init}"
        if not layout.is_root:
            _write(f"{folder}/setgroups", "deny")
        _write(f"{folder}/uid_map", bubblewrap.id_map(layout.uid, is_root=layout.is_root))
        _write(f"{folder}/gid_map", bubblewrap.id_map(layout.gid, is_root=layout.is_root))

    def _wait_a_moment(self) -> None:
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.2)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
