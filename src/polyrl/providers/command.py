"""Workers by commands of your own: ssh, a cloud's command line, anything that starts, lists and ends something.

    start = "ssh {host} env POLYRL_TOKEN=$POLYRL_TOKEN {command}"      without it ending before the worker
    list  = "..."     prints one name a line, of all that run for {run}
    stop  = "..."     ends {name}
    offer = "..."     prints how many workers could be had in all, and dollars an hour of one: `6 1.85`

Templates are run by `sh -c`. In them stand {name}, {run}, {number}, {host}, {command} and {log}, each quoted for the
shell; a brace that is meant as one is doubled. The worker's token is in the environment variable POLYRL_TOKEN of the
template and nowhere else: a process list shows no secret.

Without `list`, a worker is there while its `start` command runs, as with ssh; with `list`, `start` may return at once.
"""

import asyncio
import contextlib
import os
import re
import shlex
import signal
import string
import time
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from typing import ClassVar

from polyrl.errors import ConfigError
from polyrl.parent import end_with_parent
from polyrl.providers.calling import call
from polyrl.providers.market import MarketOffer, why_no_offer
from polyrl.providers.provider import HeldWorker, ProviderError, ProviderRun, WorkerOrder
from polyrl.wire.credentials import TOKEN_VARIABLE

_FIELDS = ("name", "run", "number", "host", "command", "log")
_STOP_S = 30.0
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class CommandProvider:
    shares_files: ClassVar[bool] = False
    is_here: ClassVar[bool] = False

    def __init__(
        self,
        run: ProviderRun,
        start: str,
        list: str = "",
        stop: str = "",
        hosts: Sequence[str] = (),
        polyrl: str = "polyrl",
        timeout_s: float = 120.0,
        offer: str = "",
        offer_every_s: float = 60.0,
    ) -> None:
        """`hosts` are given to workers in turn, as {host}; `polyrl` is how PolyRL is called there."""
        self._run, self._start, self._list, self._stop = run, start, list, stop
        self._hosts, self._polyrl, self._timeout_s = tuple(hosts), polyrl, timeout_s
        self._running: dict[str, Process] = {}
        self._offer, self._offer_every_s = offer, offer_every_s
        self._offered: MarketOffer | None = None
        self._next_look_at = 0.0
        if not 1 <= offer_every_s <= 86_400:
            raise ConfigError(f"fleet.provider_args.offer_every_s: {offer_every_s:g}, expected 1 to 86400")
        for key, template in (("start", start), ("list", list), ("stop", stop), ("offer", offer)):
            _check_template(f"fleet.provider_args.{key}", template, has_hosts=bool(hosts))
        if not start.strip():
            raise ConfigError("fleet.provider_args.start: is empty; expected a command with {command} in it")
        if "{command}" not in start and list == "":
            raise ConfigError("fleet.provider_args.start: has no {command}, expected the place of the worker's command")
        if list and not stop:
            raise ConfigError("fleet.provider_args.stop: missing; with `list`, a command must end {name}")

    def check(self) -> None:
        """Check nothing: whether commands of others work is seen when they run."""

    async def held(self) -> Mapping[str, HeldWorker]:
        if not self._list:
            return {name: _show(name, process) for name, process in self._running.items()}
        listed = await call(["sh", "-c", self._fill(self._list, "")], timeout_s=self._timeout_s)
        names = [line.strip() for line in listed.splitlines() if line.strip()]
        strange = [name for name in names if not _NAME.fullmatch(name)]
        if strange:
            raise ProviderError(
                f"fleet.provider_args.list: printed {strange[0][:80]!r}, expected a worker's name a line"
            )
        return {name: HeldWorker(name, "running") for name in names}

    async def offer(self) -> MarketOffer | None:
        if self._offer and time.monotonic() >= self._next_look_at:
            self._next_look_at = time.monotonic() + self._offer_every_s
            said = await call(["sh", "-c", self._fill(self._offer, "")], timeout_s=self._timeout_s)
            self._offered = _read_offer(said)
        return self._offered

    async def start(self, order: WorkerOrder) -> None:
        held = (await self.held()).get(order.name)
        if held is not None and held.is_there:
            return
        line = self._fill(self._start, order.name, shlex.join([*shlex.split(self._polyrl), *order.arguments]), order)
        environment = {TOKEN_VARIABLE: order.token}
        if self._list:
            await call(["sh", "-c", line], timeout_s=self._timeout_s, environment=environment)
            return
        with order.log_file.open("ab") as output:
            self._running[order.name] = await asyncio.create_subprocess_exec(
                "sh", "-c", line, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                env={**os.environ, **environment}, start_new_session=True,
                preexec_fn=_terminate_with_parent if self._run.ends_with_us else None,
            )  # fmt: skip

    async def stop(self, name: str) -> None:
        if self._stop and (self._list or name in self._running):
            await call(["sh", "-c", self._fill(self._stop, name)], timeout_s=self._timeout_s)
        process = self._running.pop(name, None)
        if process is not None and process.returncode is None:
            await _end_group(process)

    async def close(self) -> None:
        """Do nothing: nothing is held open."""

    def _fill(self, template: str, name: str, command: str = "", order: WorkerOrder | None = None) -> str:
        digits = re.findall(r"\d+", name)
        number = int(digits[-1]) if digits else 0
        host = self._hosts[number % len(self._hosts)] if self._hosts else ""
        log = "" if order is None else str(order.log_file)
        words = {"name": name, "run": self._run.id, "number": str(number), "host": host, "log": log}
        return template.format(command=command, **{key: shlex.quote(value) for key, value in words.items()})


def _read_offer(said: str) -> MarketOffer:
    try:
        num, *price = said.split()
        offer = MarketOffer(int(num), float(*price) if price else None)
    except (TypeError, ValueError) as error:
        raise ProviderError(
            f"fleet.provider_args.offer: printed {said.strip()[:80]!r}, "
            "expected a number of workers and dollars an hour"
        ) from error
    if why := why_no_offer(offer.num_workers, offer.usd_per_hour):
        raise ProviderError(f"fleet.provider_args.offer: printed {why}")
    return offer


def _check_template(key: str, template: str, *, has_hosts: bool) -> None:
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ConfigError(f"{key}: {error}; a brace that is meant as one is doubled") from error
    for name in names:
        if name not in _FIELDS:
            raise ConfigError(
                f"{key}: got {{{name}}}, expected one of {', '.join(_FIELDS)}; double a brace meant as one"
            )
    if "host" in names and not has_hosts:
        raise ConfigError(f"{key}: has {{host}}, and fleet.provider_args.hosts is empty; expected names of machines")


def _terminate_with_parent() -> None:
    end_with_parent(signal.SIGTERM)


def _show(name: str, process: Process) -> HeldWorker:
    if process.returncode is None:
        return HeldWorker(name, "running", f"process {process.pid}")
    return HeldWorker(name, "ended", f"process {process.pid}", f"exit code {process.returncode}")


async def _end_group(process: Process) -> None:
    """End a shell and what it runs."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        try:
            await asyncio.wait_for(process.wait(), _STOP_S)
        except TimeoutError:
            continue
        return
