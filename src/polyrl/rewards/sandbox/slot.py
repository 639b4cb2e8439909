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
import signal
import socket
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from polyrl.errors import UserError, one_line, plain, shorten
from polyrl.rewards.sandbox import policy
from polyrl.rewards.sandbox.cgroups import Cgroup
from polyrl.rewards.sandbox.inside import frames
from polyrl.rewards.sandbox.inside.zygote import MESSAGE_BYTES, NONCE_BYTES, READY, STATUS

START_TIMEOUT_S = 20.0
GRACE_S = 0.6
"""How long after its limit a run may take to be killed and told of, before the host ends the zygote."""
_CHILD = re.compile(rb'"child-pid": (\d+)[,\s}]')


class SlotBroke(Exception):
    """The zygote is gone or cannot be trusted any more. The message is one line."""


class SandboxJob(NamedTuple):
    """A run of a program, as the warden gets it."""

    header: dict[str, Any]
    pieces: list[bytes]
    longest_s: float
    """When the warden has ended the run at the latest."""
    most_bytes: int
    """The longest result that is taken."""
    tests: tuple[dict[str, Any], list[bytes]] | None = None
    """What follows once the program's process is there."""


class _Header(Struct, frozen=True):
    reason: str
    status: int
    cpu_s: float
    wall_s: float
    pieces: tuple[int, int, int, int]


class RunResult(NamedTuple):
    """What a run left behind, as bytes that a stranger wrote."""

    reason: str
    """`ended`, or the limit that was exceeded: cpu, wall, memory, output, processes."""
    status: int
    """How the program's process ended, as waitpid has it."""
    cpu_s: float
    wall_s: float
    output: bytes
    errors: bytes
    value: bytes
    collected: bytes


class Slot:
    """One zygote. `start` it, `run` programs one after the other, `close` it."""

    def __init__(
        self, layout: policy.Layout | None, settings: dict[str, Any], seccomp: bytes, cgroup: Cgroup | None
    ) -> None:
        self._layout, self._settings, self._seccomp, self._cgroup = layout, settings, seccomp, cgroup
        self._process: subprocess.Popen[bytes] | None = None
        self._init = 0
        """Process 1 of the sandbox's pid namespace, by its number outside."""
        self._control, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed by close()
        self.num_runs = 0

    async def start(self) -> None:
        """Raises SlotBroke, with what the sandbox said."""
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
        loop = asyncio.get_running_loop()
        nonce = secrets.token_bytes(NONCE_BYTES)
        line, theirs = socket.socketpair()
        self.num_runs += 1
        try:
            line.setblocking(False)
            with theirs:
                socket.send_fds(self._control, [b"run"], [theirs.fileno()])
            self._control.send(nonce)
            async with asyncio.timeout(job.longest_s + GRACE_S):
                await loop.sock_sendall(line, frames.pack(job.header, job.pieces))
                if job.tests is not None:
                    await loop.sock_sendall(line, frames.pack(*job.tests))
                result = await _read_result(line, job.most_bytes)
                ended = await loop.sock_recv(self._control, MESSAGE_BYTES)
        except TimeoutError as error:
            raise SlotBroke("the sandbox did not answer in time") from error
        except (OSError, EOFError, frames.BadFrame, msgspec.ValidationError, msgspec.DecodeError) as error:
            raise SlotBroke(self._complaint(one_line(error))) from error
        finally:
            line.close()
        if ended != nonce + STATUS.pack(0):
            raise SlotBroke(self._complaint("the sandbox answered what nobody asked"))
        return result

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

    def _complaint(self, what: str) -> str:
        """Return what went wrong, with the last line that the sandbox wrote to its standard error."""
        with contextlib.suppress(OSError, ValueError):
            self._errors.seek(0)
            said = self._errors.read(1 << 16).decode(errors="replace").strip()
            if said:
                return shorten(plain(f"{what}: {said.splitlines()[-1]}"))
        return what

    # Starting

    async def _start_safe(self, layout: policy.Layout) -> None:
        info, info_far = os.pipe()
        block_far, block = os.pipe()
        seccomp, seccomp_far = os.pipe()
        os.write(seccomp_far, self._seccomp)
        os.close(seccomp_far)
        pipes = policy.Pipes(self._theirs.fileno(), info_far, block_far, seccomp)
        try:
            self._popen(
                policy.command(layout, pipes, self._settings), (pipes.control, info_far, block_far, pipes.seccomp)
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
        words = [sys.executable, "-c", code, str(self._theirs.fileno()), json.dumps(self._settings)]
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
        """Read the number of the sandbox's process 1, which bubblewrap tells in several pieces."""
        os.set_blocking(info, False)
        said, loop = b"", asyncio.get_running_loop()
        while (found := _CHILD.search(said)) is None:
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

    def _map_users(self, layout: policy.Layout) -> None:
        folder = f"/proc/{self._init}"
        if not layout.is_root:
            _write(f"{folder}/setgroups", "deny")
        _write(f"{folder}/uid_map", policy.id_map(layout.uid, is_root=layout.is_root))
        _write(f"{folder}/gid_map", policy.id_map(layout.gid, is_root=layout.is_root))

    def _wait_a_moment(self) -> None:
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.2)


async def _read_result(line: socket.socket, most: int) -> RunResult:
    total, header_bytes = frames.check_sizes(await _read_exactly(line, frames.SIZES.size), most)
    body = await _read_exactly(line, total)
    header = msgspec.json.decode(body[:header_bytes], type=_Header)
    _, pieces = frames.unpack(body, header_bytes)
    output, errors, value, collected = pieces
    return RunResult(header.reason, header.status, header.cpu_s, header.wall_s, output, errors, value, collected)


async def _read_exactly(line: socket.socket, length: int) -> bytes:
    held, loop = bytearray(), asyncio.get_running_loop()
    while len(held) < length:
        data = await loop.sock_recv(line, min(1 << 20, length - len(held)))
        if not data:
            raise EOFError("the sandbox hung up")
        held += data
    return bytes(held)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
