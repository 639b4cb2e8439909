"""The sandbox: programs in, verdicts out.

    async with Sandbox.open(SandboxLimits(cpu_s=2.0)) as sandbox:
        verdict = await sandbox.run(Program(source=answer, cases=(InputCase(input="2 3", output="5"),)))

    with BlockingSandbox(SandboxLimits()) as sandbox:       # from a plain function
        verdict = sandbox.run(program)

Rules kept here: without bubblewrap nothing runs, and the error says what to install. A run that broke its zygote is
tried once more in a fresh one; if it breaks that too while a trivial program passes, the program is at fault.
"""

import asyncio
import importlib.util
import logging
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from polyrl.errors import UserError
from polyrl.rewards.sandbox import bubblewrap, cgroups, jobs
from polyrl.rewards.sandbox import inside as inside_package
from polyrl.rewards.sandbox.clock import ProgramClock
from polyrl.rewards.sandbox.languages import Language, check_installed, find_language
from polyrl.rewards.sandbox.pool import ZygotePool
from polyrl.rewards.sandbox.program import Case, CaseVerdict, InputCase, Program, PytestCase, SandboxLimits, Verdict
from polyrl.rewards.sandbox.seccomp import filter_for
from polyrl.rewards.sandbox.slot import RunResult, SandboxJob, Slot, SlotBroke

MISSING = "programs are run in a sandbox, and bwrap is missing: apt-get install bubblewrap"
_UNSAFE = (
    "unsafe_no_sandbox: programs that a model wrote run WITHOUT A SANDBOX, with your files, your network and your "
    "rights. Use it on a machine that holds nothing, or install bubblewrap."
)
_ATTEMPTS = 2
_PYTEST = ("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments", "exceptiongroup", "tomli")
_CANARY = Program(source="print(1)", cases=(InputCase(output="1"),))
_LATE = RunResult("late", 0, 0.0, 0.0, 0.0, b"", b"", b"")
"""The run of a case for which no time is left."""
_log = logging.getLogger("polyrl.sandbox")


class Starved(Exception):
    """The program's time is over, and the machine has hardly let it run. The message is one line."""


class Sandbox:
    """Runs programs, at most `size` at a time."""

    def __init__(self, limits: SandboxLimits, pool: ZygotePool, folders: tuple[str, ...]) -> None:
        self.limits, self.pool = limits, pool
        self._folders = folders

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        limits: SandboxLimits | None = None,
        *,
        size: int | None = None,
        folders: tuple[str, ...] = (),
        unsafe_no_sandbox: bool = False,
        bwrap: str | None = None,
    ) -> "AsyncIterator[Sandbox]":
        """Start the zygotes, and end them at the end. Raises UserError if this machine has no sandbox.

        `size`: programs at a time; none: one a core. `folders`: further ones that programs may read.
        """
        sandbox = cls.make(limits, size=size, folders=folders, unsafe_no_sandbox=unsafe_no_sandbox, bwrap=bwrap)
        try:
            await sandbox.start()
            yield sandbox
        finally:
            await sandbox.close()

    @classmethod
    def make(
        cls,
        limits: SandboxLimits | None = None,
        *,
        size: int | None = None,
        folders: tuple[str, ...] = (),
        unsafe_no_sandbox: bool = False,
        bwrap: str | None = None,
    ) -> "Sandbox":
        """Make a sandbox that is not started yet; `open` is the usual way. Raises UserError."""
        limits = SandboxLimits() if limits is None else limits
        whole = tuple(os.path.realpath(one) for one in folders)
        if unsafe_no_sandbox:
            shout()
            make = lambda: Slot(None, _unsafe_settings(limits), b"", None)  # noqa: E731
        else:
            layout = look(whole, bwrap)
            settings = bubblewrap.settings_of(layout, limits, filter_for(is_program=True))
            own = filter_for(is_program=False)
            cgroups.remove_left_behind()
            make = lambda: Slot(layout, settings, own, cgroups.make(limits.processes + 16))  # noqa: E731
        return cls(limits, ZygotePool(_size(size), make), whole)

    async def start(self) -> None:
        try:
            await self.pool.open()
        except SlotBroke as error:
            raise UserError(f"the sandbox cannot be started: {error}") from error

    async def close(self) -> None:
        await self.pool.close()

    async def run(self, program: Program) -> Verdict:
        """Run a program's cases until one does not pass. Raises UserError: no compiler, or a large case."""
        num, language = len(program.cases), find_language(program.language)
        refused = jobs.refusal(program, language, self.limits)
        if language is None or refused:
            return Verdict("refused", (), num, refused)
        check_installed(language)
        if any(isinstance(one, PytestCase) for one in program.cases) and importlib.util.find_spec("pytest") is None:
            raise UserError("pytest is missing, which the cases need: pip install pytest")
        clock = ProgramClock(program.within_s, asyncio.get_running_loop().time)
        try:
            binary, failed = await self._compile(program, language, clock)
            found = [] if failed is None else [failed]
            if failed is None:
                found = await self._run_cases(program, language, binary, clock)
        except Starved as error:
            return Verdict("infrastructure_failed", (), num, str(error))
        except SlotBroke as error:
            outcome = await self._blame()
            return Verdict(outcome, (), num, str(error))
        last = found[-1]
        return Verdict(last.outcome, tuple(found), num, last.detail)

    async def _compile(
        self, program: Program, language: Language, clock: ProgramClock
    ) -> tuple[bytes, CaseVerdict | None]:
        if not language.compile:
            return b"", None
        job = jobs.compile_job(program, language, self.limits)
        result = await self._run_job(job, clock)
        return result.value, jobs.judge_compiling(job, result)

    async def _run_cases(
        self, program: Program, language: Language, binary: bytes, clock: ProgramClock
    ) -> list[CaseVerdict]:
        found: list[CaseVerdict] = []
        for case in program.cases:
            found.append(await self._run_case(program, case, language, binary, clock))
            if found[-1].outcome != "passed":
                break
        return found

    async def _run_case(
        self, program: Program, case: Case, language: Language, binary: bytes, clock: ProgramClock
    ) -> CaseVerdict:
        job = jobs.run_job(program, case, language, self.limits, binary, self._folders)
        return jobs.judge(case, job, await self._run_job(job, clock))

    async def _run_job(self, job: SandboxJob, clock: ProgramClock) -> RunResult:
        """Run a job within its program's time, once more if it broke its zygote. Raises SlotBroke; Starved."""
        result = await self._try_job(job, clock)
        clock.count(result)
        if result.reason == "late" and clock.is_starved:
            raise Starved(f"the program has hardly run in {clock.passed_s:.3g} s; the machine is busy")
        return result

    async def _try_job(self, job: SandboxJob, clock: ProgramClock) -> RunResult:
        broke: SlotBroke | None = None
        for _ in range(_ATTEMPTS):
            if clock.left_s <= 0:
                break
            began_s = clock.passed_s
            try:
                async with self.pool.slot(clock.left_s) as slot:
                    return await slot.run(jobs.within(job, clock.left_s))
            except SlotBroke as error:
                broke = error
                clock.leave_out(clock.passed_s - began_s)
            except TimeoutError:  # all zygotes were away for so long
                break
        if broke is not None:
            raise broke
        return _LATE

    async def _blame(self) -> Literal["crashed", "infrastructure_failed"]:
        """Return whose fault it is that zygotes break: the program's, if a trivial one passes."""
        language = find_language(_CANARY.language)
        assert language is not None
        try:
            clock = ProgramClock(None, asyncio.get_running_loop().time)
            verdict = await self._run_case(_CANARY, _CANARY.cases[0], language, b"", clock)
        except (SlotBroke, Starved):
            return "infrastructure_failed"
        return "crashed" if verdict.outcome == "passed" else "infrastructure_failed"


class BlockingSandbox:
    """A sandbox for code without an event loop: one program at a time, from one thread."""

    def __init__(self, limits: SandboxLimits | None = None, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self._sandbox = Sandbox.make(limits, **{"size": 1, **options})
        self._runner.run(self._sandbox.start())

    def __enter__(self) -> "BlockingSandbox":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, program: Program) -> Verdict:
        return self._runner.run(self._sandbox.run(program))

    def close(self) -> None:
        self._runner.run(self._sandbox.close())
        self._runner.close()


def shout() -> None:
    """Say, in the log and in the terminal, that programs run without a sandbox."""
    _log.warning(_UNSAFE)
    print(f"WARNING: {_UNSAFE}", file=sys.stderr)


def look(folders: tuple[str, ...] = (), bwrap: str | None = None) -> bubblewrap.MachineLayout:
    """Look at this machine. Raises UserError where bubblewrap is missing."""
    found = shutil.which("bwrap" if bwrap is None else bwrap)
    if found is None:
        raise UserError(MISSING)
    links, present = bubblewrap.look_at_system()
    return bubblewrap.MachineLayout(
        bwrap=found,
        python=os.path.realpath(sys.executable),
        prefix=os.path.realpath(sys.base_prefix),
        inside=str(Path(inside_package.__file__ or "").resolve().parent),
        uid=os.getuid(),
        gid=os.getgid(),
        links=links,
        present=present,
        packages=_find_pytest(),
        folders=folders,
    )


def _find_pytest() -> tuple[str, ...]:
    """Return where pytest and the packages that it needs are; empty: it is not installed."""
    if importlib.util.find_spec("pytest") is None:
        return ()
    found = [importlib.util.find_spec(one) for one in _PYTEST]
    origins = [Path(one.origin) for one in found if one is not None and one.origin is not None]
    return tuple(os.path.realpath(one.parent if one.name == "__init__.py" else one) for one in origins)


def _size(size: int | None) -> int:
    return len(os.sched_getaffinity(0)) if size is None else size


def _unsafe_settings(limits: SandboxLimits) -> dict[str, Any]:
    return {
        "is_unsafe": True,
        "home": "",
        "disk_bytes": limits.disk_mb << 20,
        "open_files": limits.open_files,
        "processes": limits.processes,
    }
