"""Workers as processes on this machine.

Each has a file `NAME.json` with its process id and when that process began, so that another process finds it and no
foreign one is taken for it. Workers that a run starts end with the run; those of `polyrl up` stay.

With `supply`, a file of config/supply_trace.py, this machine plays a spot market for the process that keeps the fleet:
no more workers start than the file offers, and when it offers fewer than there are, the newest get notice (SIGTERM) and
are killed `notice_s` later.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import msgspec
import psutil
from msgspec import Struct

from polyrl.disk import write_whole
from polyrl.errors import EXIT_BAD_INPUT, ConfigError
from polyrl.parent import end_with_parent
from polyrl.providers.market import MarketOffer, TraceMarket
from polyrl.providers.provider import HeldWorker, ProviderError, ProviderRun, WorkerOrder

_STOP_S = 30.0
_SAME_BEGIN_S = 0.05
_MAX_NOTICE_S = 3600.0


class _Started(Struct, frozen=True):
    pid: int
    began_at: float


class LocalProvider:
    shares_files: ClassVar[bool] = True
    is_here: ClassVar[bool] = True

    def __init__(self, run: ProviderRun, supply: str = "", notice_s: float = 0.0) -> None:
        self._run = run
        self._processes: dict[str, Process] = {}
        """The newest last."""
        self._stopping: dict[str, None] = {}
        self._market = TraceMarket(supply, "fleet.provider_args.supply") if supply else None
        if not 0 <= notice_s <= _MAX_NOTICE_S:
            raise ConfigError(f"fleet.provider_args.notice_s: {notice_s:g}, expected 0 to {_MAX_NOTICE_S:g}")
        if notice_s and not supply:
            raise ConfigError("fleet.provider_args.notice_s: is for `supply`, a file that takes workers back")
        self._notice_s = notice_s
        self._began_at = time.monotonic()
        self._going: dict[str, float] = {}
        """Workers that the market takes back, with the moment at which they are killed."""

    def check(self) -> None:
        """Check nothing: this machine is all that is needed."""

    async def offer(self) -> MarketOffer | None:
        return None if self._market is None else self._market.at(time.monotonic() - self._began_at)

    async def held(self) -> Mapping[str, HeldWorker]:
        self._take_back(await self.offer())
        found = {name: self._show(name, process) for name, process in self._processes.items()}
        for file in sorted(self._run.folder.glob("*.json")) if self._run.folder.is_dir() else ():
            pid = _alive(file)
            if file.stem not in found and pid is not None:
                found[file.stem] = HeldWorker(file.stem, "running", f"process {pid}")
        return {
            name: msgspec.structs.replace(one, state="stopping") if name in self._stopping and one.is_there else one
            for name, one in found.items()
        }

    def _take_back(self, offer: MarketOffer | None) -> None:
        """Give notice to the newest workers if fewer are offered than there are, and kill those whose time is up."""
        there = [name for name, one in self._processes.items() if one.returncode is None and name not in self._going]
        now = time.monotonic()
        for name in [] if offer is None else there[offer.num_workers :]:
            self._going[name] = now + self._notice_s
            if self._notice_s:
                self._signal(name, signal.SIGTERM)
        for name in [name for name, goes_at in self._going.items() if goes_at <= now]:
            self._signal(name, signal.SIGKILL)

    def _signal(self, name: str, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, KeyError):
            self._processes[name].send_signal(number)

    def _show(self, name: str, process: Process) -> HeldWorker:
        shown = _show(name, process)
        if name not in self._going:
            return shown
        why = "its machine was taken back"
        return msgspec.structs.replace(shown, state="stopping" if shown.is_there else "ended", why=why, failed=False)

    async def start(self, order: WorkerOrder) -> None:
        everyone = await self.held()
        held, offer = everyone.get(order.name), await self.offer()
        if held is not None and held.state != "ended":
            return
        if offer is not None and sum(one.is_there for one in everyone.values()) >= offer.num_workers:
            raise ProviderError(f"{order.name} cannot be started: the market offers {offer.num_workers} workers")
        self._processes.pop(order.name, None)
        self._going.pop(order.name, None)
        file = self._file(order.name)
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with order.log_file.open("ab") as output:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "polyrl", *self._with_notice(order.arguments),
                    stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                    env={**os.environ, **order.environment}, start_new_session=True,
                    preexec_fn=_terminate_with_parent if self._run.ends_with_us else None,
                )  # fmt: skip
            write_whole(file, msgspec.json.encode(_Started(process.pid, _began_at(process.pid))), 0o600)
        except OSError as error:
            raise ProviderError(f"{order.name} cannot be started: {error.strerror or error}") from error
        self._processes[order.name] = process

    async def stop(self, name: str) -> None:
        process, pid = self._processes.get(name), _alive(self._file(name))
        self._stopping[name] = None
        try:
            if process is not None:
                await _end(process)
            elif pid is not None:
                await _end_other(pid)
        finally:
            self._stopping.pop(name, None)
        self._processes.pop(name, None)
        self._going.pop(name, None)
        self._file(name).unlink(missing_ok=True)

    async def close(self) -> None:
        """Do nothing: nothing is held open."""

    def _with_notice(self, arguments: Sequence[str]) -> list[str]:
        notice = ("--notice", f"{self._notice_s:g}") if self._notice_s else ()
        return [*arguments[:1], *notice, *arguments[1:]]

    def kill(self, name: str) -> None:
        """Kill a worker of this process: as if its machine had died."""
        with contextlib.suppress(ProcessLookupError):
            self._processes[name].kill()

    def _file(self, name: str) -> Path:
        return self._run.folder / f"{name}.json"


def _terminate_with_parent() -> None:
    end_with_parent(signal.SIGTERM)


def _show(name: str, process: Process) -> HeldWorker:
    code = process.returncode
    if code is None:
        return HeldWorker(name, "running", f"process {process.pid}")
    how = f"exit code {code}" if code >= 0 else _signal_name(-code)
    return HeldWorker(name, "ended", f"process {process.pid}", how, failed=code == EXIT_BAD_INPUT)


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _began_at(pid: int) -> float:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).create_time()
    return 0.0


def _alive(file: Path) -> int | None:
    """Return the process that a file names, if it is still that one."""
    try:
        started = msgspec.json.decode(file.read_bytes(), type=_Started)
        process = psutil.Process(started.pid)
        same = abs(process.create_time() - started.began_at) < _SAME_BEGIN_S
        return started.pid if same and process.status() != psutil.STATUS_ZOMBIE else None
    except (OSError, msgspec.DecodeError, psutil.Error, ValueError, OverflowError):
        return None


async def _end(process: Process) -> None:
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _STOP_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _end_other(pid: int) -> None:
    """End a process that is no child of this one."""
    process = psutil.Process(pid)
    loop = asyncio.get_running_loop()
    with contextlib.suppress(psutil.NoSuchProcess):
        process.terminate()
        deadline = loop.time() + _STOP_S
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            if loop.time() > deadline:
                process.kill()
            await asyncio.sleep(0.05)
