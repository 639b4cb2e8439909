"""From a program and a case to a job, and from a run's result to a verdict. Pure.

Rules kept here: a job holds no expected value. A failure of the sandbox itself is an exception in slot.py, and never a
verdict on the program.
"""

import os
import signal
from typing import Any, assert_never

import msgspec
from msgspec import Struct

from polyrl.config.rewards import wall_limit_s
from polyrl.errors import UserError, plain, shorten
from polyrl.not_data import NOT_DATA
from polyrl.rewards.sandbox.bubblewrap import PACKAGES
from polyrl.rewards.sandbox.comparing import is_raised, read_value, same_output, same_value
from polyrl.rewards.sandbox.inside import values
from polyrl.rewards.sandbox.inside.frames import MAX_JOB_BYTES
from polyrl.rewards.sandbox.inside.watching import Bounds
from polyrl.rewards.sandbox.languages import BINARY, Language, compiler, start
from polyrl.rewards.sandbox.program import (
    CallCase,
    Case,
    CaseVerdict,
    InputCase,
    Outcome,
    Program,
    PytestCase,
    SandboxLimits,
)
from polyrl.rewards.sandbox.slot import RunResult, SandboxJob

TESTS_FILE = "test_solution.py"
_MAX_BINARY_BYTES = 32 << 20
_MAX_CASE_BYTES = MAX_JOB_BYTES - _MAX_BINARY_BYTES - (2 << 20)
_WORDS_OF_A_VALUE = 4
"""A tuple takes more to describe than the list that is expected."""
_BUSY = 3.0
"""How many times its wall limit a program may take while it waits for a core, which is not its fault."""
_COMPILE_S, _COMPILE_MEMORY = 10.0, 1 << 30
_RAISED = 1
"""The exit code of a program that ended with an exception."""


def compile_job(program: Program, language: Language, limits: SandboxLimits) -> SandboxJob:
    header = {
        "mode": "compile",
        "argv": compiler(language),
        "files": [language.file],
        "collect": BINARY,
        "memory_bytes": _COMPILE_MEMORY,
        "limits_address_space": True,
    }
    job = _job(header, [b"", program.source.encode(errors="replace")], limits, _COMPILE_S, wall_limit_s(_COMPILE_S))
    return job._replace(value_bytes=_MAX_BINARY_BYTES)


def run_job(
    program: Program, case: Case, language: Language, limits: SandboxLimits, binary: bytes, folders: tuple[str, ...]
) -> SandboxJob:
    source = program.source.encode(errors="replace")
    files, pieces = [BINARY if binary else language.file], [binary or source]
    header: dict[str, Any] = {"folders": list(folders), "limits_address_space": language.limits_address_space}
    given, tests = b"", None
    match case:
        case InputCase():
            given = case.input.encode()
            argv = start(language)
            header |= {"mode": "exec" if argv else "script", "argv": argv}
        case CallCase():
            given = values.to_bytes({"args": values.encode(case.args), "kwargs": values.encode(case.kwargs)})
            header |= {"mode": "call", "function": case.function}
        case PytestCase():
            header |= {"mode": "tests", "packages": PACKAGES}
            tests = ({"files": [TESTS_FILE]}, [case.source.encode()])
        case _:
            assert_never(case)
    _check_size(given if tests is None else tests[1][0])
    header |= {"files": files, "memory_bytes": limits.memory_mb << 20}
    cpu_s = limits.cpu_s if program.cpu_s is None else min(program.cpu_s, limits.cpu_s)
    wall_s = limits.wall_limit_s if program.cpu_s is None else min(wall_limit_s(cpu_s), limits.wall_limit_s)
    job = _job(header, [given, *pieces], limits, cpu_s, wall_s)
    output_bytes, value_bytes = _expected_bytes(case)
    return job._replace(
        tests=tests, output_bytes=job.output_bytes + output_bytes, value_bytes=job.value_bytes + value_bytes
    )


def _check_size(said: bytes) -> None:
    """Raise UserError for a case that is too large to be sent, whatever the program is: that is no fault of its own."""
    if len(said) > _MAX_CASE_BYTES:
        raise UserError(f"a case of {len(said):,} bytes, expected at most {_MAX_CASE_BYTES:,}")


def _expected_bytes(case: Case) -> tuple[int, int]:
    """Return about how many bytes of output, and of a value, are expected: a right program may write them."""
    match case:
        case InputCase():
            return len(case.output.encode()), 0
        case CallCase():
            return 0, _WORDS_OF_A_VALUE * len(values.to_bytes(values.encode(case.value)))
        case PytestCase():
            return 0, 0
        case _:
            assert_never(case)


def _job(header: dict[str, Any], pieces: list[bytes], limits: SandboxLimits, cpu_s: float, wall_s: float) -> SandboxJob:
    bounds = Bounds(cpu_s, wall_s, _BUSY * wall_s, header["memory_bytes"])
    most = limits.output_kb << 10
    return SandboxJob({**header, "cpu_s": cpu_s}, pieces, bounds, most, most)


def within(job: SandboxJob, left_s: float) -> SandboxJob:
    """Return a job that ends when its program's time does."""
    return job._replace(bounds=job.bounds._replace(longest_s=min(job.bounds.longest_s, left_s)))


def refusal(program: Program, language: Language | None, limits: SandboxLimits) -> str:
    """Return why a program is not run at all; empty: it is."""
    if language is None:
        return f"unknown language {shorten(plain(program.language))}"
    if len(program.source) > limits.source_kb << 10:
        return f"a source of {len(program.source):,} characters, expected at most {limits.source_kb << 10:,}"
    if not language.has_calls and not all(isinstance(one, InputCase) for one in program.cases):
        return f"{program.language} has input cases alone"
    return "" if program.cases else "no cases"


def judge(case: Case, job: SandboxJob, result: RunResult) -> CaseVerdict:
    """Decide what a run means for its case."""
    outcome, detail = _ended_badly(job, result)
    if isinstance(case, CallCase) and case.raises and outcome == "crashed" and _exit_code(result) == _RAISED:
        outcome = None
    if outcome is None:
        outcome, detail = _compare(case, result)
    return CaseVerdict(outcome, result.cpu_s, result.wall_s, shorten(plain(detail)))


def judge_compiling(job: SandboxJob, result: RunResult) -> CaseVerdict | None:
    """Return the verdict of a program that cannot be compiled; None: it can."""
    outcome, detail = _ended_badly(job, result)
    if outcome is None and result.value:
        return None
    detail = f"does not compile: {_first_error(result.errors) or detail}"
    return CaseVerdict(outcome or "crashed", result.cpu_s, result.wall_s, shorten(plain(detail)))


def _ended_badly(job: SandboxJob, result: RunResult) -> tuple[Outcome | None, str]:
    bounds = job.bounds
    match result.reason:
        case "cpu":
            return "timed_out", f"more than {bounds.cpu_s:g} s of CPU time"
        case "wall":
            return "timed_out", f"more than {bounds.wall_s:g} s"
        case "late":
            return "timed_out", "its time on the clock was over"
        case "memory":
            return "crashed", f"more than {int(bounds.memory_bytes) >> 20} MB of memory"
        case "processes":
            return "crashed", "too many processes"
        case "output":
            return "failed", f"printed more than {job.output_bytes >> 10} KB"
        case _:
            pass
    code = _exit_code(result)
    if code == -signal.SIGXCPU or (code == -signal.SIGKILL and result.cpu_s > bounds.cpu_s):
        return "timed_out", f"more than {bounds.cpu_s:g} s of CPU time"
    if code < 0:
        return "crashed", f"signal {-code}"
    return ("crashed", f"exit code {code}: {_last_error(result.errors)}") if code else (None, "")


def _exit_code(result: RunResult) -> int:
    return os.waitstatus_to_exitcode(result.status) if result.reason == "ended" else 0


def _compare(case: Case, result: RunResult) -> tuple[Outcome, str]:
    match case:
        case InputCase():
            if same_output(result.output, case.output, case.compare):
                return "passed", ""
            return "failed", f"printed {_quote(result.output.decode(errors='replace'))}, expected {_quote(case.output)}"
        case CallCase():
            return _compare_call(case, result.value)
        case PytestCase():
            return _read_report(result.value)
        case _:
            assert_never(case)


class _Report(Struct, frozen=True):
    passed: int
    failed: str
    code: int


def _read_report(said: bytes) -> tuple[Outcome, str]:
    """Read how tests went. They ran in a process without a line of the program's code."""
    try:
        report = msgspec.json.decode(said, type=_Report)
    except NOT_DATA:
        return "failed", "the tests did not come to their end"
    if report.code == 0 and report.passed and not report.failed:
        return "passed", ""
    return "failed", report.failed or ("no test ran" if not report.passed else f"pytest ended with {report.code}")


def _compare_call(case: CallCase, said: bytes) -> tuple[Outcome, str]:
    try:
        told = values.from_bytes(said)
        if isinstance(told, dict) and isinstance(told.get("raised"), list):
            if is_raised(case.raises, told["raised"]):
                return "passed", ""
            return "failed", f"raised {_quote(str(told['raised'][:1]))}, expected {case.raises or 'a value'}"
        if not isinstance(told, dict) or "value" not in told:
            raise values.NotPlain("no value")
        found = read_value(told["value"])
        if case.raises:
            return "failed", f"returned {_quote(repr(found))}, expected {case.raises}"
        if same_value(case.value, found):
            return "passed", ""
        return "failed", f"returned {_quote(repr(found))}, expected {_quote(repr(case.value))}"
    except (values.NotPlain, ValueError, RecursionError):
        return "failed", f"{case.function} returned no value"


def _quote(text: str) -> str:
    return f"{text[:60]!r}{'...' if len(text) > 60 else ''}"


def _last_error(errors: bytes) -> str:
    """Return the last line that names an error, or else the last one. Node ends with its version."""
    lines = errors[-2000:].decode(errors="replace").strip().split("\n")
    return next((one for one in reversed(lines) if "Error" in one and not one[0].isspace()), lines[-1])


def _first_error(errors: bytes) -> str:
    lines = errors[:100_000].decode(errors="replace").splitlines()
    return next((one for one in lines if "error" in one.lower()), lines[0] if lines else "")
