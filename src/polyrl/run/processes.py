"""Processes that a training run starts and ends: its manager, and workers on the same machine.

Rules kept here: each has its log in the run's directory. They are not reached by a Ctrl+C that is meant for the
trainer, and they end when it dies, however it dies. A manager that dies is started again, at the same port: its journal
is there, and everyone dials in by themselves. A manager that ended with an error that the user must fix, a full disk
for example, is not. If it does so during a restart, it is tried once more: its port may be taken for a moment.
A worker that dies is not started again; workers.py says so.

A port that the recipe names is that one, or an error. Without one it is the usual port, or any that is free where
another run has that: several runs on one machine need no settings. A run that is resumed takes the port that it had,
since workers dial there, if it is free.
"""

import asyncio
import contextlib
import errno
import json
import logging
import os
import shutil
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from polyrl.config.recipe import ManagerSection
from polyrl.errors import EXIT_BAD_INPUT, UserError
from polyrl.manager.http import PortTaken, check_that_it_can_listen
from polyrl.parent import end_with_parent
from polyrl.run.encryption import Encryption
from polyrl.wire.control import DEFAULT_PORT

log = logging.getLogger("polyrl.train")
StartedT = TypeVar("StartedT")

_START_TIMEOUT_S = 300.0
"""The time for a manager to start. It is long because a long journal takes time to read."""
_STOP_TIMEOUT_S = 30.0
_RESTART_PAUSE_S = 0.5
_MAX_QUICK_DEATHS = 5
"""A manager that dies this often within a minute is not started again."""
_MAX_FAILED_STARTS = 5
"""Nor is one that dies this often in a row before it is up: with a long journal each start may take minutes."""
_MAX_BAD_RESTARTS = 2
"""Nor is one whose restarts fail this often in a row with an error that the user must fix."""
_LITTLE_ROOM_BYTES = 1 << 16
_ANY = 0


class ManagerAddress(NamedTuple):
    url: str
    port: int
    tls: Encryption | None = None


async def start(arguments: Sequence[str], log_file: Path, more: Mapping[str, str] | None = None) -> Process:
    """Start `polyrl` with these arguments and more environment variables. Its output is appended to the file."""
    with log_file.open("ab") as output:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "polyrl", *arguments,
            stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
            env={**os.environ, **(more or {})}, start_new_session=True, preexec_fn=terminate_with_parent,
        )  # fmt: skip


def terminate_with_parent() -> None:
    """Have the child end with its parent. Runs in the child."""
    end_with_parent(signal.SIGTERM)


async def stop(process: Process, *, timeout_s: float = _STOP_TIMEOUT_S) -> None:
    """Send SIGTERM, then SIGKILL if the process has not ended in time."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), timeout_s)
    except TimeoutError:
        log.warning("process %d did not end within %.0f s of SIGTERM; it is killed", process.pid, timeout_s)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


class ManagerProcess:
    """The manager's process, kept alive for as long as the run lasts."""

    def __init__(self, run_dir: Path, host: str, port: int, options: Sequence[str] = ()) -> None:
        """`options` are further ones of `polyrl manager`."""
        self._run_dir, self._host, self._port, self._options = run_dir, host, port, options
        self._log_file = run_dir / "logs" / "manager.log"
        self._process: Process | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> ManagerAddress:
        """Raises UserError if it does not come up: the port is taken, for example. Killed, it is started again."""
        first: asyncio.Future[ManagerAddress] = asyncio.get_running_loop().create_future()
        self._watch = asyncio.create_task(self._keep_alive(first))
        await asyncio.wait((first, self._watch), return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            self._watch.result()
        return first.result()

    async def _start(self) -> ManagerAddress:
        address_file = self._run_dir / "manager.json"
        address_file.unlink(missing_ok=True)
        arguments = ("manager", "--run-dir", str(self._run_dir), "--host", self._host, "--port", str(self._port))
        said_before = self._log_file.stat().st_size if self._log_file.exists() else 0
        self._process = await start((*arguments, *self._options, "--verbose"), self._log_file)
        deadline = asyncio.get_running_loop().time() + _START_TIMEOUT_S
        while self._process.returncode is None and asyncio.get_running_loop().time() < deadline:
            with contextlib.suppress(OSError, ValueError, KeyError):
                url = json.loads(address_file.read_text())["url"]
                return ManagerAddress(url, int(url.rpartition(":")[2]))
            await asyncio.sleep(0.05)
        raise UserError(f"the manager did not start: {self._what_it_said(said_before)}")

    async def _keep_alive(self, first: "asyncio.Future[ManagerAddress]") -> None:
        """Keep a manager alive. `first` is where it listens, and from then on again. Raises UserError when it is not
        worth another try."""
        loop = asyncio.get_running_loop()
        deaths: list[float] = []
        num_failed_starts = num_bad_restarts = 0
        while True:
            why: UserError | None = None
            try:
                address = await self._start()
                if not first.done():
                    first.set_result(address)
                    self._port = address.port
            except UserError as error:
                why = error
            assert self._process is not None
            if why is not None and self._process.returncode is None:
                raise why  # it is there and does not come up: another one would not either
            code = await self._process.wait()
            deaths = [*(one for one in deaths if loop.time() - one < 60.0), loop.time()]
            num_failed_starts = 0 if why is None else num_failed_starts + 1
            is_bad = code == EXIT_BAD_INPUT and first.done()
            num_bad_restarts = num_bad_restarts + 1 if is_bad and why is not None else 0
            if is_bad and (why is None or num_bad_restarts >= _MAX_BAD_RESTARTS):
                ended = why or f"the manager ended: {self._what_it_said()}"
                raise UserError(f"{ended}; then go on with --resume")
            if len(deaths) > _MAX_QUICK_DEATHS:
                raise UserError(f"the manager died {len(deaths)} times in a minute: {self._what_it_said()}")
            if why is not None and (num_failed_starts >= _MAX_FAILED_STARTS or (code >= 0 and not first.done())):
                raise why
            log.warning("the manager ended (%s); it is started again", show_code(code))
            await asyncio.sleep(_RESTART_PAUSE_S)

    def _what_it_said(self, since: int = 0) -> str:
        """Return the manager's last line. Add that the disk is full: its log is on that disk, so it may not say so."""
        said = last_line(self._log_file, since).removeprefix("polyrl: error: ")
        no_space, room = os.strerror(errno.ENOSPC), shutil.disk_usage(self._run_dir).free
        return f"{self._run_dir}: {no_space} ({said})" if room < _LITTLE_ROOM_BYTES and no_space not in said else said

    async def failed(self) -> None:
        """Waits for as long as all is well; raises UserError when the manager cannot be kept alive."""
        assert self._watch is not None
        await asyncio.shield(self._watch)

    async def stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if self._process is not None:
            await stop(self._process)


def show_end(code: int, log_file: Path) -> str:
    """Return how a process ended: what it said last, if it ended by itself, or where that is."""
    said = f": {last_line(log_file)}" if code > 0 else f", see {log_file}"
    return f"has ended ({show_code(code)}){said}"


def show_code(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


def last_line(log_file: Path, since: int = 0) -> str:
    """Return the last line of a log, and where it is; of what came after so many bytes."""
    try:
        lines = log_file.read_bytes()[since:].decode(errors="replace").split("\n")
    except OSError:
        lines = []
    said = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
    return f"{said} ({log_file})"


async def choose_port(wanted: ManagerSection, before: int = _ANY) -> int:
    """Return the manager's port; 0: any free one. `before` is the port that the run had, or 0. Raises UserError."""
    if wanted.port:
        try:
            await check_that_it_can_listen(wanted.host, wanted.port)
        except PortTaken as error:
            raise UserError(f"{error}: manager.port=0") from error
        return wanted.port
    usual = [DEFAULT_PORT] if wanted.port is None else []
    for port in [before] if before else usual:
        try:
            await check_that_it_can_listen(wanted.host, port)
        except PortTaken:
            continue
        return port
    await check_that_it_can_listen(wanted.host, _ANY)
    return _ANY


async def start_at_port(choose: Callable[[], Awaitable[int]], start: Callable[[int], Awaitable[StartedT]]) -> StartedT:
    """Start something at the chosen port; once more if another process takes the port before it listens there."""
    port = await choose()
    try:
        return await start(port)
    except UserError:
        if (again := await choose()) == port:
            raise
        return await start(again)
