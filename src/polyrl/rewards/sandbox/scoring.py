"""Score answers by their programs: find one, read the row's tests, run them, and turn the verdict into a reward.

Rules kept here: a program that is wrong, slow, crashes or attacks has the reward 0. All its cases together end before
the function's own limit, at which there would be no reward. If the sandbox itself fails, or the machine hardly lets the
program run, there is no reward now, and another attempt may have one. A row whose tests cannot be read has none. All
answers of a process share one sandbox, which is opened before the first answer's time begins.
"""

import asyncio
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from polyrl.data.prompts import MISSING, column
from polyrl.errors import UserError
from polyrl.rewards.facts import RunFacts
from polyrl.rewards.reward import Reward, RewardFailed, RewardInput, RewardUnavailable, ScoreOutcome
from polyrl.rewards.sandbox.program import CallCase, Case, InputCase, Program, PytestCase, SandboxLimits, Verdict
from polyrl.rewards.sandbox.sandbox import Sandbox
from polyrl.scheduling.core.bounds import Positive

_FENCE = re.compile(r"^[ \t]*+```[^\n]*+\n(.*?)(?:^[ \t]*+```|\Z)", re.MULTILINE | re.DOTALL)
"""Possessive, so that a long line without an end costs its length and not the square of it."""
_THINKING_ENDS = "</think>"


class ProgramReward:
    """A reward class (reward.py) that runs the answer's program against the row's tests."""

    is_unsafe: ClassVar[bool] = False
    """Whether programs run without a sandbox."""

    def __init__(
        self,
        *,
        tests: str = "tests",
        language: Literal["python", "c", "c++", "javascript"] = "python",
        template: Annotated[str, Meta(pattern=r"^$|\{code\}")] = "",
        partial: bool = False,
        cpu_s: Positive = 5.0,
        memory_mb: Annotated[int, Meta(ge=32, le=1 << 20)] = 512,
        sandboxes: Annotated[int, Meta(ge=0, le=4096)] = 0,
    ) -> None:
        """Keep the settings, which are checked before a run starts.

        `tests`: the column of a row's cases. `template`: text around the program, which stands for `{code}`. `partial`:
        the share of cases that passed before the first failure, instead of all or nothing. `cpu_s`: the most CPU time
        of a case; a learned limit may be less. `sandboxes`: programs at a time in a process of the pool; 0: one a core.
        """
        self._tests, self._language, self._template, self._partial = tests, language, template, partial
        self._limits = SandboxLimits(cpu_s=cpu_s, memory_mb=memory_mb)
        self._within_s = RunFacts.read().patience_s
        self._size = sandboxes or None
        self._sandbox: Sandbox | None = None
        self.places: asyncio.Semaphore | None = None
        """A program's time does not run while others have the sandbox: loops of others must not cost its reward."""

    async def start(self) -> None:
        """Open the sandbox. Raises RewardFailed where this machine has none."""
        try:
            self._sandbox = await asyncio.to_thread(
                Sandbox.make, self._limits, size=self._size, unsafe_no_sandbox=self.is_unsafe
            )
            await self._sandbox.start()
            self.places = asyncio.Semaphore(self._sandbox.pool.size)
        except UserError as error:
            raise RewardFailed(str(error)) from error

    async def __call__(self, given: RewardInput) -> Reward:
        """Run the answer's program. Raises RewardFailed; RewardUnavailable if the sandbox failed."""
        assert self._sandbox is not None
        cases, code = read_cases(given, self._tests), find_code(given.answer)
        source = self._template.replace("{code}", code) if self._template else code
        limit_s = min(given.limit_s, self._limits.cpu_s) if given.limit_s > 0 else None
        try:
            verdict = await self._sandbox.run(
                Program(source=source, cases=cases, language=self._language, cpu_s=limit_s, within_s=self._within_s)
            )
        except UserError as error:
            raise RewardFailed(str(error)) from error
        return to_reward(verdict, partial=self._partial)

    async def close(self) -> None:
        if self._sandbox is not None:
            await self._sandbox.close()


def to_reward(verdict: Verdict, *, partial: bool) -> Reward:
    """Turn a verdict into a reward, whose CPU time is that of the longest case. Raises RewardUnavailable."""
    if verdict.outcome == "infrastructure_failed":
        raise RewardUnavailable(f"the sandbox failed: {verdict.detail}")
    share, passed = verdict.num_passed / verdict.num_cases, verdict.outcome == "passed"
    parts = {"cases": share, **{one: float(verdict.outcome == one) for one in ("timed_out", "crashed", "refused")}}
    outcome: ScoreOutcome = verdict.outcome if verdict.outcome in ("timed_out", "crashed") else "scored"
    longest_s = max((one.cpu_s for one in verdict.cases), default=0.0)
    return Reward(share if partial else float(passed), parts, outcome, longest_s, passed)


def find_code(answer: str) -> str:
    """Return the last fenced block after the answer's thoughts, or all of it if nothing is fenced."""
    said = answer.rpartition(_THINKING_ENDS)[2]
    blocks = _FENCE.findall(said)
    return blocks[-1] if blocks else said


def read_cases(given: RewardInput, name: str) -> tuple[Case, ...]:
    """Return the cases in the row's column of that name; without one, the row's answer is what is to be printed.

    Raises RewardFailed if they cannot be read: that is a fault of the data.
    """
    said = column(given.row, name)
    if said is MISSING or said is None:
        if not given.expected.strip():
            raise RewardFailed(f"the row has neither {name} nor an answer")
        return (InputCase(output=given.expected),)
    try:
        listed = msgspec.json.decode(said) if isinstance(said, str | bytes) else said
        cases = tuple(_read_case(one) for one in listed)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise RewardFailed(f"the row's {name}: {error}") from error
    if not cases:
        raise RewardFailed(f"the row's {name}: is empty, expected at least one case")
    return cases


def _read_case(said: Any) -> Case:
    if not isinstance(said, Mapping):
        raise ValueError(f"a {type(said).__name__}, expected an object with input, function or pytest")
    if "pytest" in said:
        return msgspec.convert({"source": said["pytest"]}, _Pytest).case
    if "function" in said and not said.keys() & {"value", "raises"}:  # a misspelled one would have None expected
        raise ValueError(f"a call of {said['function']!r} without the `value` that it returns, or what it `raises`")
    kind = CallCase if "function" in said else InputCase
    tag = kind.__struct_config__.tag
    return msgspec.convert({"type": tag, **said}, kind)


class _Pytest(msgspec.Struct, frozen=True):
    source: str

    @property
    def case(self) -> PytestCase:
        return PytestCase(source=self.source)
