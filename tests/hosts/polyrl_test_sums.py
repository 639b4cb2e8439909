"""A taskset of `verifiers` for the tests: sums, with a calculator as a tool."""

# pyright: reportMissingImports=false
import verifiers.v1 as vf


class SumsConfig(vf.TasksetConfig):
    with_tools: bool = True


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
    async def exact(self, trace) -> float:
        return float((trace.last_reply or "").strip() == self.data.answer)


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        for first in range(3, 7):
            data = SumData(name=f"sum-{first}", prompt=f"What is {first} + 2?", answer=str(first + 2))
            yield SumTask(data, self.config.task)

    @classmethod
    def toolsets(cls, config: SumsConfig):
        return [AddToolset(vf.SharedToolsetConfig())] if config.with_tools else []


__all__ = ["AddToolset", "SumsTaskset"]

if __name__ == "__main__":
    AddToolset.run()
