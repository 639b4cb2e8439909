"""Sums, with a tool that adds: a taskset for `verifiers` (v1) that needs no download."""

# pyright: reportMissingImports=false
import random
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf


class SumsConfig(vf.TasksetConfig):
    size: int = 200
    largest: int = 19


class SumData(vf.TaskData):
    answer: str


class AddToolset(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    TOOL_PREFIX = "calc"

    @vf.tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def exact(self, trace: Any) -> float:
        return float((trace.last_reply or "").strip() == self.data.answer)


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> Iterator[SumTask]:
        for number in range(self.config.size):
            draws = random.Random(number)
            first, second = (draws.randint(1, self.config.largest) for _ in range(2))
            data = SumData(name=f"sum-{number}", prompt=f"What is {first} + {second}?", answer=str(first + second))
            yield SumTask(data, self.config.task)

    @classmethod
    def toolsets(cls, config: SumsConfig) -> list[AddToolset]:
        return [AddToolset(vf.SharedToolsetConfig())]


__all__ = ["AddToolset", "SumsTaskset"]

if __name__ == "__main__":
    AddToolset.run()
