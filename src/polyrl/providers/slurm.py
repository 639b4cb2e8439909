"""Workers as Slurm jobs: one job each, started by sbatch, requeued by Slurm when its node fails.

A job is called after the run and the worker, and found again by that name among the jobs of our user: others may call
theirs what they like. The run's directory must be on a file system
that the nodes share: the job reads its token there, and writes its log. A job that Slurm preempts, or ends at its time
limit, gets SIGTERM `notice_s` seconds before, and its worker hands over.
"""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import ClassVar

from polyrl.errors import ConfigError, UserError
from polyrl.providers.calling import call, call_for_code
from polyrl.providers.provider import HeldState, HeldWorker, ProviderRun, WorkerOrder

_TIMEOUT_S = 60.0
_STATES: Mapping[str, HeldState] = {
    "PENDING": "starting", "CONFIGURING": "starting", "REQUEUED": "starting", "REQUEUE_HOLD": "starting",
    "REQUEUE_FED": "starting", "SUSPENDED": "starting", "RESIZING": "running", "SIGNALING": "running",
    "RUNNING": "running", "COMPLETING": "stopping", "STAGE_OUT": "stopping",
}  # fmt: skip
"""Every other state is that of a job that has ended."""
_OURS = ("--job-name", "--output", "--error", "--signal", "--requeue", "--no-requeue", "--wrap", "-J", "-o", "-e")


class SlurmProvider:
    shares_files: ClassVar[bool] = True
    is_here: ClassVar[bool] = False

    def __init__(
        self,
        run: ProviderRun,
        partition: str = "",
        account: str = "",
        sbatch: Sequence[str] = (),
        setup: str = "",
        polyrl: str = "",
        notice_s: float = 60.0,
    ) -> None:
        """`sbatch` are further options, like "--gres=gpu:1"; `setup` are shell lines before the worker, like a `module
        load`; `polyrl` is how PolyRL is called on a node, by default as here."""
        self._run, self._setup = run, setup
        self._polyrl = shlex.split(polyrl) if polyrl else [sys.executable, "-m", "polyrl"]
        self._options = [
            *(["--partition", partition] if partition else ()),
            *(["--account", account] if account else ()),
        ]
        self._options += list(sbatch)
        self._notice_s = notice_s
        for option in sbatch:
            if option.partition("=")[0] in _OURS or not option.startswith("-"):
                raise ConfigError(
                    f"fleet.provider_args.sbatch: got {option!r}; expected options like --gres=gpu:1, without those of "
                    "name, output, signal and requeue"
                )
        if not 0 <= notice_s <= 3600:
            raise ConfigError(f"fleet.provider_args.notice_s: got {notice_s:g}, expected seconds from 0 to 3600")

    def check(self) -> None:
        missing = [one for one in ("sbatch", "squeue", "scancel") if shutil.which(one) is None]
        if missing:
            raise UserError(f'fleet.provider = "slurm": there is no {missing[0]} here; expected Slurm\'s commands')

    async def held(self) -> Mapping[str, HeldWorker]:
        found: dict[str, HeldWorker] = {}
        for name, job, state, reason in await self._jobs():
            one = HeldWorker(name, _STATES.get(state, "ended"), f"job {job}", f"{state}: {reason}")
            if name not in found or found[name].state == "ended":
                found[name] = one
        return found

    async def start(self, order: WorkerOrder) -> None:
        held = (await self.held()).get(order.name)
        if held is not None and held.state != "ended":
            return
        options = ["--job-name", f"{self._prefix}{order.name}", "--output", str(order.log_file.absolute())]
        options += ["--open-mode", "append", "--requeue", "--parsable", "--kill-on-invalid-dep=yes"]
        if self._notice_s:
            options += ["--signal", f"B:TERM@{max(1, round(self._notice_s))}"]
        script = self._script([*self._polyrl, *order.arguments])
        await call(["sbatch", *options, *self._options], timeout_s=_TIMEOUT_S, stdin=script.encode())

    async def stop(self, name: str) -> None:
        """Slurm sends SIGTERM to the worker, and kills what is left after its KillWait."""
        jobs = [job for one, job, state, _ in await self._jobs() if one == name and state in _STATES]
        for job in jobs:
            code, _, said = await call_for_code(["scancel", job], timeout_s=_TIMEOUT_S)
            if code and "Invalid job id" not in said:
                await call(["scancel", job], timeout_s=_TIMEOUT_S)

    async def close(self) -> None:
        """Do nothing: nothing is held open."""

    @property
    def _prefix(self) -> str:
        return f"polyrl-{self._run.id}-"

    def _script(self, command: Sequence[str]) -> str:
        """Return the batch script. Its worker, which takes the shell's place, gets signals meant for the batch
        script."""
        return f"#!/bin/sh\n{self._setup}\nexec {shlex.join(command)}\n"

    async def _jobs(self) -> list[tuple[str, str, str, str]]:
        """Return name, job, state and reason of every job of this run that Slurm still knows, newest last."""
        ours = ["--user", str(os.getuid()), "--states", "all"]
        told = await call(["squeue", "--noheader", *ours, "--format", "%i|%T|%j|%r"], timeout_s=_TIMEOUT_S)
        jobs: list[tuple[str, str, str, str]] = []
        for line in told.splitlines():
            cells = line.strip().split("|", 3)
            if len(cells) == 4 and re.fullmatch(r"\d+(_\d+)?", cells[0]) and cells[2].startswith(self._prefix):
                jobs.append((cells[2].removeprefix(self._prefix), cells[0], cells[1], cells[3]))
        return sorted(jobs, key=lambda job: int(job[1].partition("_")[0]))
