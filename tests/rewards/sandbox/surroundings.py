"""What the tests of the sandbox share: limits, honest programs, and running something in an open sandbox."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from polyrl.rewards.sandbox.program import InputCase, Program, SandboxLimits
from polyrl.rewards.sandbox.sandbox import Sandbox

LIMITS = SandboxLimits(cpu_s=1.0, wall_s=2.0, memory_mb=256, disk_mb=16, processes=32, open_files=64, output_kb=256)


def in_sandbox(body: Callable[[Sandbox], Awaitable[None]], limits: SandboxLimits = LIMITS, **options: Any) -> None:
    async def run() -> None:
        async with Sandbox.open(limits, **options) as sandbox:
            await body(sandbox)

    asyncio.run(run())


def honest(number: int) -> Program:
    """A program that is right for even numbers, and wrong for odd ones."""
    output = str(number * number + number % 2)
    return Program(source="n = int(input())\nprint(n * n)", cases=(InputCase(input=f"{number}\n", output=output),))
