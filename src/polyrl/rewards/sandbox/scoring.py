"""Score an answer by its program: find it, read the row's tests, run them, and turn the verdict into a reward.

Rules kept here: a program that is wrong, slow, crashes or attacks has the reward 0. If the sandbox itself fails there
is no reward; nor is there for a row whose tests cannot be read. The sandbox is shared by all answers of this process.
"""

import asyncio
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from polyrl.errors import UserError
from polyrl.rewards.reward import Reward, RewardFailed, RewardInput
from polyrl.rewards.sandbox.program import CallCase, Case, InputCase, Program, PytestCase, SandboxLimits
from polyrl.rewards.sandbox.sandbox import Sandbox

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+#.-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.MULTILINE | re.DOTALL)
_THINKING_ENDS = "</think>"
_opened: dict[tuple[Any, ...], "asyncio.Future[Sandbox]"] = {}


async def score_program(
    given: RewardInput,
    *,
    tests: str = "tests",
    language: str = "python",
    template: str = "",
    partial: bool = False,
    cpu_s: float = 5.0,
    memory_mb: int = 512,
    sandboxes: int = 0,
    unsafe_no_sandbox: bool = False,
) -> Reward:
    """Run the answer's program against the row's tests.

    `template`: text around the program, which stands for `{code}`. `partial`: the share of cases that passed before the
    first failure, instead of all or nothing. `sandboxes`: programs at a time in a process of the pool; 0: one a core.
    """
    cases = read_cases(given, tests)
    limits = SandboxLimits(cpu_s=cpu_s, memory_mb=memory_mb)
    sandbox = await _open(limits, sandboxes, unsafe_no_sandbox)
    code = find_code(given.answer)
    source = template.replace("{code}", code) if template else code
    try:
        verdict = await sandbox.run(Program(source=source, cases=cases, language=language))
    except UserError as error:
        raise RewardFailed(str(error)) from error
    if verdict.outcome == "infrastructure_failed":
        raise RewardFailed(f"the sandbox failed: {verdict.detail}")
    share = verdict.num_passed / len(cases)
    named = ("timed_out", "crashed", "refused")
    parts = {"cases": share, **{one: float(verdict.outcome == one) for one in named}}
    return Reward(share if partial else float(verdict.outcome == "passed"), parts)


def find_code(answer: str) -> str:
    """Return the last fenced block after the answer's thoughts, or all of it if nothing is fenced."""
    said = answer.rpartition(_THINKING_ENDS)[2]
    blocks = _FENCE.findall(said)
    return blocks[-1][1] if blocks else said


def read_cases(given: RewardInput, column: str) -> tuple[Case, ...]:
    """Return the row's cases. Raises RewardFailed if they cannot be read: that is a fault of the data."""
    said = given.row.get(column)
    if said is None:
        return (InputCase(output=given.expected),)
    try:
        listed = msgspec.json.decode(said) if isinstance(said, str | bytes) else said
        cases = tuple(_read_case(one) for one in listed)
    except (msgspec.DecodeError, msgspec.ValidationError, TypeError, ValueError) as error:
        raise RewardFailed(f"the row's {column}: {error}") from error
    if not cases:
        raise RewardFailed(f"the row's {column}: is empty, expected at least one case")
    return cases


def _read_case(said: Any) -> Case:
    if not isinstance(said, Mapping):
        raise ValueError(f"a {type(said).__name__}, expected an object with input, function or pytest")
    if "pytest" in said:
        return msgspec.convert({"source": said["pytest"]}, _Pytest).case
    kind = CallCase if "function" in said else InputCase
    tag = kind.__struct_config__.tag
    return msgspec.convert({"type": tag, **said}, kind)


class _Pytest(msgspec.Struct, frozen=True):
    source: str

    @property
    def case(self) -> PytestCase:
        return PytestCase(source=self.source)


async def _open(limits: SandboxLimits, size: int, unsafe: bool) -> Sandbox:
    """Return the sandbox of these limits, which the first answer opens."""
    key = (limits, size, unsafe)
    if key not in _opened:
        _opened[key] = asyncio.get_running_loop().create_future()
        try:
            sandbox = Sandbox.make(limits, size=size or None, unsafe_no_sandbox=unsafe)
            await sandbox.start()
        except BaseException as error:
            waiting = _opened.pop(key)
            waiting.set_exception(error)
            waiting.exception()
            if isinstance(error, UserError):
                raise RewardFailed(str(error)) from error
            raise
        _opened[key].set_result(sandbox)
    try:
        return await asyncio.shield(_opened[key])
    except UserError as error:
        raise RewardFailed(str(error)) from error
