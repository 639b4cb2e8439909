"""A server as a child process: its port, its log, its end.

Rules kept here: it has its own process group, so that a Ctrl+C meant for us does not reach it, and its end is that of
all its processes. They die with us, however we die: a guard, which reads from a pipe of ours, ends them when that is
closed. Linux alone tells only the first of them. Its output goes to a file that is kept.
"""

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path

from polyrl.engines.engine import EngineError
from polyrl.engines.served.server import LaunchCommand
from polyrl.parent import end_with_parent

_logger = logging.getLogger("polyrl.engines.served")

_STOP_S = 15.0
_GROUP_S = 5.0
_POLL_S = 0.05
_TAIL_BYTES = 256 << 10
_LINES = 1000
_HEAD = "--- polyrl "
_ERROR = re.compile(r"\b\w*(Error|Exception): .+")


def free_port() -> int:
    """Return a free port. If another process takes it first, the server says so and gets another."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def make_log(kind: str, given: str) -> Path:
    """Return where a server's log goes. Raises EngineError for a file that cannot be written."""
    try:
        if given:
            path = Path(given).expanduser()
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600))  # servers print their settings
            return path
        handle, name = tempfile.mkstemp(prefix=f"polyrl-{kind}-", suffix=".log")
    except OSError as error:
        raise EngineError(f"the server's log cannot be written: {error}") from error
    os.close(handle)
    return Path(name)


_GUARD = 'read -r _; kill -s KILL -- "-$0" 2>/dev/null'


class ServerProcess:
    def __init__(self, process: asyncio.subprocess.Process, guard: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._guard = guard
        self._log = log

    @classmethod
    async def start(cls, command: LaunchCommand, log: Path) -> "ServerProcess":
        """Raises EngineError when there is nothing to start, or nowhere to write."""
        with _opened(log, f"{_HEAD}{time.strftime('%F %T')} {' '.join(command.argv)}\n") as output:
            try:
                process = await asyncio.create_subprocess_exec(
                    *command.argv,
                    env=_environment(command.environment),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    preexec_fn=_on_its_own,
                )
            except OSError as error:
                raise EngineError(f"{command.argv[0]} cannot be started: {error.strerror}") from error
        try:
            guard = await asyncio.create_subprocess_exec(
                "/bin/sh", "-c", _GUARD, str(process.pid),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        except BaseException:  # nobody would hold it
            _signal(process.pid, signal.SIGKILL)
            raise
        return cls(process, guard, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def ended(self) -> str:
        """Waits for it; how it ended, in words."""
        code = await self._process.wait()
        if code >= 0:
            return f"ended with code {code}"
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
        return f"was ended by signal {-code}"

    async def stop(self) -> None:
        """End the server and all that it started: by SIGTERM, then by SIGKILL."""
        if not self.has_ended:
            _signal(self.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _STOP_S)
        await self.kill()

    async def kill(self) -> None:
        """Kill it. A process that hangs in a driver outlives even this, and ends when the driver lets go of it."""
        _signal(self.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _GROUP_S)
        await self._group_gone()
        with contextlib.suppress(ProcessLookupError):
            self._guard.kill()  # the number of the group may be another's from now on
        await self._guard.wait()

    async def _group_gone(self) -> None:
        """Memory, and on a GPU most of it, is free when the last of them is gone."""
        until = time.monotonic() + _GROUP_S
        while (left := members(self._process.pid)) and time.monotonic() < until:
            await asyncio.sleep(_POLL_S)
        if left:
            _logger.warning("processes %s of a server do not end", left)

    def first_error(self) -> str:
        """Return the first error of its last lines; empty when it said none.

        The first, because these servers report the end of one of their processes by the errors of the others.
        """
        lines = self.last_lines(_LINES)
        errors = (
            _unwrapped(match.group()) for line in lines if "WARNING" not in line and (match := _ERROR.search(line))
        )
        return next(errors, "")[:300]

    def last_lines(self, num: int) -> list[str]:
        lines = tail(self._log, _LINES)
        begins = [at for at, line in enumerate(lines) if line.startswith(_HEAD)]
        return lines[begins[-1] + 1 if begins else 0 :][-num:]


@contextlib.contextmanager
def _opened(log: Path, head: str) -> Iterator[FileIO]:
    try:
        output = log.open("ab", buffering=0)
        try:
            output.write(head.encode())
        except OSError:
            output.close()
            raise
    except OSError as error:
        raise EngineError(f"the server's log {log} cannot be written: {error.strerror}") from error
    with output:
        yield output


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def members(group: int) -> list[int]:
    """Return the running processes of a group. In a container, ended processes may stay listed for ever."""
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, its_group = entry.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                found.append(int(entry.parent.name))
    return found


def _unwrapped(error: str) -> str:
    """Remove a closing bracket without an opening one, as `python -m`'s own errors have it."""
    return error[:-1] if error.endswith(")") and error.count(")") > error.count("(") else error


def tail(log: Path, num: int) -> list[str]:
    """Return the last lines of a log that are not empty."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read(_TAIL_BYTES).decode(errors="replace").replace("\0", "")  # a device may have no end
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-num:]


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return our environment without the variables that lead another Python to our modules, plus the server's own."""
    ours = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    return {**ours, **more}


def _on_its_own() -> None:
    """Prepare the child, before it becomes the server."""
    os.setpgid(0, 0)
    end_with_parent()
