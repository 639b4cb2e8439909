"""The code reward with learned limits: as polyrl.rewards.code, and it keeps to the CPU time that the run has learned.

    rewards = { adaptive = true, functions = [{ function = "polyrl.rewards.timed_code:TimedCode" }] }

Rules kept here: the limit is that of each case, and so is the CPU time that is reported: the longest case's. A program
that loops or crashes is a wrong answer. A sandbox that fails is tried again.
"""

import asyncio
from typing import Literal

from polyrl.errors import UserError
from polyrl.rewards.reward import Reward, RewardFailed, RewardInput, RewardUnavailable
from polyrl.rewards.sandbox.program import Program, SandboxLimits
from polyrl.rewards.sandbox.sandbox import Sandbox
from polyrl.rewards.sandbox.scoring import find_code, read_cases


class TimedCode:
    """`cpu_s` is the most CPU time of a case, which also holds where nothing is learned; the rest is as in code.py."""

    def __init__(
        self,
        *,
        tests: str = "tests",
        language: str = "python",
        partial: bool = False,
        cpu_s: float = 30.0,
        memory_mb: int = 512,
        sandboxes: int = 0,
    ) -> None:
        self._tests, self._language, self._partial = tests, language, partial
        self._limits, self._size = SandboxLimits(cpu_s=cpu_s, memory_mb=memory_mb), sandboxes or None
        self._sandbox: Sandbox | None = None

    async def start(self) -> None:
        try:
            self._sandbox = await asyncio.to_thread(Sandbox.make, self._limits, size=self._size)
            await self._sandbox.start()
        except UserError as error:
            raise RewardFailed(str(error)) from error

    async def __call__(self, given: RewardInput) -> Reward:
        assert self._sandbox is not None
        cases = read_cases(given, self._tests)
        limit_s = min(given.limit_s, self._limits.cpu_s) if given.limit_s else None
        program = Program(source=find_code(given.answer), cases=cases, language=self._language, cpu_s=limit_s)
        try:
            verdict = await self._sandbox.run(program)
        except UserError as error:
            raise RewardFailed(str(error)) from error
        if verdict.outcome == "infrastructure_failed":
            raise RewardUnavailable(f"the sandbox failed: {verdict.detail}")
        share, passed = verdict.num_passed / len(cases), verdict.outcome == "passed"
        outcome: Literal["scored", "timed_out", "crashed"] = "scored"
        if verdict.outcome in ("timed_out", "crashed"):
            outcome = verdict.outcome
        longest_s = max((one.cpu_s for one in verdict.cases), default=0.0)
        return Reward(share if self._partial else float(passed), {"cases": share}, outcome, longest_s, passed)

    async def close(self) -> None:
        if self._sandbox is not None:
            await self._sandbox.close()
