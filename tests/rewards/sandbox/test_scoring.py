"""The code reward: programs in answers, tests in rows, and no reward where nobody is to blame but us."""

import asyncio
from typing import Any

import pytest

from polyrl.config.rewards import WeightedReward
from polyrl.rewards.lookup import check_functions
from polyrl.rewards.pool import RewardPool
from polyrl.rewards.reward import Reward, RewardFailed, RewardInput
from polyrl.rewards.sandbox.program import CallCase, InputCase, PytestCase
from polyrl.rewards.sandbox.scoring import find_code, read_cases

pytestmark = pytest.mark.timeout(300)
CODE = "polyrl.rewards.code:score"


def given(answer: str, expected: str = "", **row: Any) -> RewardInput:
    return RewardInput("", answer, expected, row, "stop", 1)


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("print(1)", "print(1)"),
        ("Here:\n```python\nprint(1)\n```\nDone.", "print(1)\n"),
        ("```\na\n```\nbetter:\n```py\nb\n```", "b\n"),
        ("<think>```python\nwrong\n```</think>\n```python\nright\n```", "right\n"),
        ("<think>no fence</think>right", "right"),
        ("```python\ncut off", "cut off"),
        ("```c++\nint main() {}\n```", "int main() {}\n"),
        ("``` python title='x'\nprint(2)\n```", "print(2)\n"),
    ],
)
def test_the_program_is_the_last_fenced_block_after_the_thoughts(answer: str, code: str):
    assert find_code(answer) == code


def test_fences_without_end_take_no_time():
    assert find_code("```\n" * 50_001 + "x" * 100_000) == "x" * 100_000


def test_cases_come_as_a_list_or_as_json():
    cases = [{"input": "1", "output": "2"}, {"function": "f", "args": [1], "value": 2}, {"pytest": "def test(): pass"}]
    wanted = (
        InputCase(input="1", output="2"),
        CallCase(function="f", args=[1], value=2),
        PytestCase(source="def test(): pass"),
    )
    assert read_cases(given("", tests=cases), "tests") == wanted
    text = '[{"input": "1", "output": "2"}]'
    assert read_cases(given("", tests=text), "tests") == wanted[:1]
    assert read_cases(given("", "5"), "tests") == (InputCase(output="5"),)


@pytest.mark.parametrize("tests", [[], "nonsense", [{"input": 3, "output": "x"}], [3], 7, [{"pytest": 3}], [{}]])
def test_tests_that_cannot_be_read_are_the_fault_of_the_data(tests: Any):
    with pytest.raises(RewardFailed, match="the row's tests"):
        read_cases(given("", tests=tests), "tests")


@pytest.mark.usefixtures("bubblewrap")
def test_answers_are_scored_in_processes_of_the_pool():
    tests = [{"input": "2 3", "output": "5"}, {"input": "1 1", "output": "2"}]
    answers = {
        "```python\nprint(sum(map(int, input().split())))\n```": 1.0,
        "print(5)": 0.0,
        "while True: pass": 0.0,
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)": 0.0,
    }

    async def body() -> list[Reward]:
        pool = RewardPool(1, 60.0)
        try:
            asked = [pool.score(CODE, given(one, tests=tests), {"cpu_s": 0.5, "sandboxes": 2}) for one in answers]
            found = await asyncio.gather(*asked)
            part = await pool.score(CODE, given("print(5)", tests=tests), {"partial": True})
            whole = await pool.score(CODE, given("2 + 3", "5"), {"template": "print({code})"})
            return [*found, part, whole]
        finally:
            await pool.close()

    found = asyncio.run(body())
    assert [one.score for one in found] == [*answers.values(), 0.5, 1.0]
    assert found[2].parts["timed_out"] == 1.0


@pytest.mark.usefixtures("bubblewrap")
def test_a_recipe_may_name_it_and_its_arguments_are_checked():
    check_functions({"rewards.functions.0": WeightedReward(function=CODE, args={"cpu_s": 2.0})})
    check_functions({"a": WeightedReward(function="polyrl.rewards.unsafe_no_sandbox:score", args={"cpu_s": 2.0})})
