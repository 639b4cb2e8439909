"""The code reward: programs in answers, tests in rows, and no reward where nobody is to blame but us."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from polyrl.config.rewards import WeightedReward
from polyrl.errors import ConfigError
from polyrl.rewards import weighing
from polyrl.rewards.lookup import check_functions, check_sent
from polyrl.rewards.pool import RewardPool
from polyrl.rewards.reward import Reward, RewardFailed, RewardInput, RewardUnavailable, needs_answer
from polyrl.rewards.sandbox.program import CallCase, CaseVerdict, InputCase, PytestCase, Verdict
from polyrl.rewards.sandbox.scoring import find_code, read_cases, to_reward

pytestmark = pytest.mark.timeout(300)
CODE = "code"


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


@pytest.mark.parametrize("letter", ["a", " ", "`", "+"])
def test_a_last_line_without_end_takes_no_time(letter: str):
    began = time.process_time()
    find_code("```" + letter * 131_072)
    find_code(letter * 131_072 + "```")
    assert time.process_time() - began < 1.0


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


def test_tests_may_lie_within_another_column():
    cases = read_cases(given("", extra={"cases": [{"output": "5"}]}), "extra.cases")
    assert cases == (InputCase(output="5"),)


def test_a_row_without_tests_and_without_an_answer_has_no_reward():
    with pytest.raises(RewardFailed, match="neither tests nor an answer"):
        read_cases(given("", " "), "tests")


def test_a_sandbox_that_failed_is_no_zero_and_another_attempt_may_score():
    with pytest.raises(RewardUnavailable, match="the sandbox failed: no room"):
        to_reward(Verdict("infrastructure_failed", (), 2, "no room"), partial=False)


def test_the_cpu_time_of_an_answer_is_that_of_its_longest_case():
    cases = (CaseVerdict("passed", 0.2, 1.0), CaseVerdict("passed", 0.5, 1.0), CaseVerdict("failed", 0.1, 1.0))
    reward = to_reward(Verdict("failed", cases, 4), partial=True)
    assert (reward.score, reward.cpu_s, reward.correct, reward.outcome) == (0.5, 0.5, False, "scored")


@pytest.mark.parametrize(
    "tests",
    [
        [], "nonsense", [{"input": 3, "output": "x"}], [3], 7, [{"pytest": 3}], [{}], "[" * 5000,
        [{"function": "f", "args": [1], "vlaue": 2}],
    ],
    ids=range(9),
)  # fmt: skip
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
    assert [one.outcome for one in found] == ["scored", "scored", "timed_out", "scored", "scored", "scored"]


@pytest.mark.usefixtures("bubblewrap")
def test_a_program_that_waits_behind_loops_is_scored_and_so_are_they():
    """The loops take longer together than one answer may take."""

    async def body() -> list[float]:
        pool = RewardPool(1, 3.0, together=16)
        try:
            answers = ["while True: pass"] * 9 + ["print(5)"]
            asked = [pool.score(CODE, given(one, "5"), {"cpu_s": 0.5, "sandboxes": 1}) for one in answers]
            return [one.score for one in await asyncio.gather(*asked)]
        finally:
            await pool.close()

    assert asyncio.run(body()) == [0.0] * 9 + [1.0]


LAST_IS_WRONG = "import time\ntime.sleep(1)\nfound = input()\nprint(found if found != '7' else 'wrong')"


@pytest.mark.usefixtures("bubblewrap")
@pytest.mark.parametrize("answer", [LAST_IS_WRONG, "while True: pass", "import time\ntime.sleep(60)"])
def test_a_program_that_needs_all_the_time_of_its_answer_is_wrong_and_not_without_a_reward(answer: str):
    """No case reaches a limit of its own: 5 s of CPU time, 12 s of wall time."""
    tests = [{"input": str(one), "output": str(one)} for one in range(8)]

    async def body() -> tuple[list[Reward], float, bool]:
        pool = RewardPool(1, 4.0)
        try:
            await pool.score(CODE, given("print(5)", "5"))
            began, pids = time.monotonic(), pool.pids
            plain = await weighing.score(pool, [WeightedReward(function=CODE)], given(answer, tests=tests))
            took_s = time.monotonic() - began
            by_rule = WeightedReward(function=CODE, args={"partial": True}, timeout_score=-0.5)
            scored = await weighing.score(pool, [by_rule], given(answer, tests=tests))
            return [plain, scored], took_s, pids == pool.pids
        finally:
            await pool.close()

    found, took_s, is_same_process = asyncio.run(body())
    assert [(one.score, one.outcome, one.correct) for one in found] == [
        (0.0, "timed_out", False),
        (-0.5, "timed_out", False),
    ]
    assert found[0].parts["timed_out"] == 1.0 and (found[0].parts["cases"] > 0) == (answer == LAST_IS_WRONG)
    assert took_s < 4.0 and is_same_process


@pytest.mark.usefixtures("bubblewrap")
def test_a_recipe_may_name_it_and_its_arguments_are_checked():
    check_functions({"rewards.functions.0": WeightedReward(function=CODE, args={"cpu_s": 2.0})})


def test_no_sandbox_shouts_before_the_run_starts(capsys: pytest.CaptureFixture[str]):
    check_functions({"a": WeightedReward(function="polyrl.rewards.unsafe_no_sandbox:UnsafeCode", args={"cpu_s": 2.0})})
    assert "WITHOUT A SANDBOX" in capsys.readouterr().err


@pytest.mark.usefixtures("bubblewrap")
@pytest.mark.parametrize(
    "wrong",
    [{"cpu_s": 0}, {"language": "pyhton"}, {"memory_mb": 1}, {"sandboxes": -1}, {"template": "print()"}, {"test": "x"}],
)
def test_wrong_arguments_are_refused_before_a_run(wrong: dict[str, Any]):
    with pytest.raises(ConfigError, match=rf"rewards\.functions\.0\.args\.{next(iter(wrong))}"):
        check_functions({"rewards.functions.0.function": WeightedReward(function=CODE, args=wrong)})


def test_without_bubblewrap_a_recipe_that_names_it_is_refused_with_what_to_install(tmp_path: Path):
    body = "from polyrl.rewards.reward import find_reward; find_reward('code', 'data.reward')"
    ran = subprocess.run(
        [sys.executable, "-c", body], env={**os.environ, "PATH": str(tmp_path)}, capture_output=True, check=False
    )
    assert "ConfigError: data.reward" in ran.stderr.decode() and "apt-get install bubblewrap" in ran.stderr.decode()


def test_rows_need_tests_or_an_answer_for_it_and_an_answer_for_the_others():
    code, own = WeightedReward(function=CODE, args={"tests": "cases"}), WeightedReward(function="a:b")
    assert needs_answer([code]) == needs_answer([own, code]) == "cases"
    assert needs_answer([code, WeightedReward(function="math")]) is True
    assert needs_answer([own]) is False


@pytest.mark.usefixtures("bubblewrap")
def test_sandboxes_end_with_the_process_that_opened_them():
    """The pool kills its processes without asking them."""

    async def body() -> list[psutil.Process]:
        pool = RewardPool(1, 60.0)
        try:
            await pool.score(CODE, given("print(5)", "5"), {"sandboxes": 2})
            return psutil.Process(pool.pids[0]).children(recursive=True)
        finally:
            await pool.close()

    inside = asyncio.run(body())
    assert len(inside) == 6, "bubblewrap, its process 1 and the zygote, twice"
    _, alive = psutil.wait_procs(inside, timeout=5.0)
    assert not [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


def test_where_reward_workers_alone_score_their_machine_has_what_functions_need(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delitem(sys.modules, "polyrl.rewards.code", raising=False)
    key = "rewards.functions.0.function"
    for function, args in (
        ("code", {"cpu_s": 2.0}),
        ("reward_model", {"path": "/nowhere/model"}),
        ("not_here:graded", {"any": 1}),
    ):
        check_sent({key: WeightedReward(function=function, args=args)})
    with pytest.raises(ConfigError, match=r"^rewards\.functions\.0\.args\.cpu: unknown key"):
        check_sent({key: WeightedReward(function="code", args={"cpu": 2.0})})
    with pytest.raises(ConfigError, match=r'^rewards\.functions\.0\.function: unknown name "cod"'):
        check_sent({key: WeightedReward(function="cod")})
