"""The words of the sandbox: a program, its cases, its limits, and the verdict.

Rules kept here: `infrastructure_failed` says nothing about the program; every other outcome does. Expected values are
compared on this side of the sandbox and are never sent into it.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from polyrl.config.rewards import wall_limit_s
from polyrl.scheduling.core.bounds import Positive

Outcome = Literal["passed", "failed", "timed_out", "crashed", "refused", "infrastructure_failed"]
"""`failed`: a wrong result. `crashed`: an exception, a signal, a memory or process limit. `refused`: not run at all."""

_MB = 1 << 20


class SandboxLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The most that one run of a program may use."""

    cpu_s: Positive = 10.0
    """CPU time of a case, of all processes of the program together."""
    wall_s: Positive | None = None
    """Time on the clock, for programs that wait; none: 2 s more than twice the CPU time."""
    memory_mb: Annotated[int, Meta(ge=32, le=1 << 20)] = 1024
    """Memory of all processes of the program together."""
    disk_mb: Annotated[int, Meta(ge=1, le=1 << 16)] = 64
    """Files that the program writes; they lie in memory."""
    processes: Annotated[int, Meta(ge=1, le=4096)] = 64
    """Processes and threads."""
    open_files: Annotated[int, Meta(ge=16, le=65536)] = 256
    output_kb: Annotated[int, Meta(ge=1, le=1 << 16)] = 1024
    """Bytes that a run may print to standard output, and as many to standard error."""
    source_kb: Annotated[int, Meta(ge=1, le=1 << 16)] = 256
    """A longer program is refused."""

    @property
    def wall_limit_s(self) -> float:
        return wall_limit_s(self.cpu_s) if self.wall_s is None else self.wall_s


class InputCase(Struct, frozen=True, kw_only=True, tag="input"):
    """Standard input, and the standard output that is expected."""

    input: str = ""
    output: str
    compare: Literal["lines", "words", "exact"] = "lines"
    """`lines`: spaces at the end of lines, and empty lines at the end, do not matter. `words`: no space matters, and
    numbers are compared as numbers."""


class CallCase(Struct, frozen=True, kw_only=True, tag="call"):
    """A function call, and the value or the exception that is expected. Values are those of JSON."""

    function: str
    """`name`, or `Class.method`, for which the class is called without arguments."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    value: Any = None
    raises: str = ""
    """The name of the exception's class, or of one that it derives from; empty: none is expected."""


class PytestCase(Struct, frozen=True, kw_only=True, tag="pytest"):
    """A pytest file that imports the program as the module `solution`.

    The tests run in another process than the program, which is asked for every call: it cannot change their results.
    """

    source: str


Case = InputCase | CallCase | PytestCase


class Program(Struct, frozen=True, kw_only=True):
    """A program that a model wrote, and the cases that it has to pass, in this order. The first failure ends them."""

    source: str
    cases: tuple[Case, ...]
    language: str = "python"
    cpu_s: Positive | None = None
    """The CPU time of each case; none: that of the sandbox's limits, which is also the most."""
    within_s: Positive | None = None
    """The time on the clock for all cases together; none: that of each alone."""


class CaseVerdict(Struct, frozen=True):
    outcome: Outcome
    cpu_s: float
    wall_s: float
    detail: str = ""
    """One line for a person; it may quote the program, and is safe in a terminal."""


class Verdict(Struct, frozen=True):
    """The result of a program: that of its first case that did not pass."""

    outcome: Outcome
    cases: tuple[CaseVerdict, ...]
    """The cases that ran."""
    num_cases: int
    detail: str = ""

    @property
    def cpu_s(self) -> float:
        return sum(one.cpu_s for one in self.cases)

    @property
    def num_passed(self) -> int:
        return sum(one.outcome == "passed" for one in self.cases)
