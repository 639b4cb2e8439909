"""The rewards that ship with the package."""

import asyncio

import psutil
import pytest

from polyrl.errors import ConfigError
from polyrl.rewards import arithmetic, math_answers
from polyrl.rewards.pool import RewardPool
from polyrl.rewards.reward import Reward, RewardFailed, RewardInput, RewardTimedOut, check_reward


def given(answer: str, expected: str) -> RewardInput:
    return RewardInput("", answer, expected, {}, "stop", 1)


@pytest.mark.parametrize(
    ("answer", "reward"), [("8+2=10", 1.0), ("10", 1.0), ("10=11", 0.0), ("8+2=1", 0.0), ("", 0.0), ("10=", 0.0)]
)
def test_arithmetic_looks_at_the_number_after_the_last_equals_sign(answer: str, reward: float):
    assert arithmetic.score(given(answer, "10")) == reward


@pytest.mark.parametrize(
    ("answer", "expected", "reward"),
    [
        (r"Hence $\boxed{42}$.", "42", 1.0),
        ("The answer is 42.", "42", 1.0),
        (r"So \boxed{\frac12}", "0.5", 1.0),
        ("0.5", r"\frac{1}{2}", 1.0),
        (r"\boxed{\frac{2}{4}}", r"$\frac{1}{2}$", 1.0),
        (r"\boxed{(1, 2]}", "(1,2]", 1.0),
        ("43", "42", 0.0),
        ("I do not know", "3", 0.0),
        ("", "3", 0.0),
        (r"\boxed{\frac{", "3", 0.0),
    ],
)
def test_math_compares_what_the_answers_mean(answer: str, expected: str, reward: float):
    assert math_answers.score(given(answer, expected)) == reward


def test_math_fails_where_the_data_has_no_answer_to_compare_with():
    with pytest.raises(RewardFailed, match="cannot be read as mathematics"):
        math_answers.score(given("3", " "))


HOSTILE = {
    "a tower of powers": r"\boxed{9^{9^{9^9}}}",
    "a large power": r"$9^{9^{9}}$",
    "a factorial": r"\boxed{1000000!}",
    "a power of ten digits": r"\boxed{2^{10000000000}}",
    "nested parentheses": r"\boxed{" + "(" * 3000 + "1" + ")" * 3000 + "}",
    "a long product": r"\boxed{" + "".join(f"(x+{number})" for number in range(200)) + "}",
    "a power of a sum": r"\boxed{(x+y+z+w)^{300}}",
    "many numbers": "1 2 3 " * 30_000,
}


@pytest.mark.parametrize("answer", HOSTILE.values(), ids=HOSTILE)
def test_an_answer_that_takes_math_too_long_has_no_reward_and_its_process_lives(answer: str):
    """The next answer is compared by the same process, without importing anything anew."""

    async def body() -> tuple[bool, list[int], list[int], float]:
        pool = RewardPool(1, 60.0)
        try:
            await pool.score("math", given("42", "42"))
            before = pool.pids
            (hard,) = await asyncio.gather(
                pool.score("math", given(answer, "42"), {"limit_s": 0.5}), return_exceptions=True
            )
            after = await pool.score("math", given("42", "42"))
            return isinstance(hard, RewardTimedOut) or hard == Reward(0.0), before, pool.pids, after.score
        finally:
            await pool.close()

    is_none_or_wrong, before, after, score = asyncio.run(body())
    assert is_none_or_wrong and before == after and score == 1.0


TOWER = r"\boxed{9^{9^{9^{9}}}}"


def test_math_keeps_to_a_learned_limit_and_its_process_goes_on():
    """9^9^9^9 once took `math`'s own 5 s, or was ended with its process by the wall time behind the learned limit."""

    async def body() -> tuple[list[Reward], float, bool]:
        pool = RewardPool(1, 60.0)
        try:
            first = await pool.score("math", given("42", "42")._replace(limit_s=0.3))  # the import takes longer
            process = psutil.Process(pool.pids[0])
            before_s = sum(process.cpu_times()[:2])
            looped = await pool.score("math", given(TOWER, "42")._replace(limit_s=0.5))
            took_s = sum(process.cpu_times()[:2]) - before_s
            with pytest.raises(RewardTimedOut, match=r"compared in 0\.3 s of CPU time") as caught:
                await pool.score("math", given(TOWER, "42")._replace(limit_s=0.5), {"limit_s": 0.3})
            assert not caught.value.cpu_s, "its own limit is no learned one"
            after = await pool.score("math", given("42", "42")._replace(limit_s=0.5))
            return [first, looped, after], took_s, pool.pids == [process.pid]
        finally:
            await pool.close()

    (first, looped, after), took_s, is_same_process = asyncio.run(body())
    assert looped == Reward(0.0, {}, "timed_out", 0.5, False)
    assert (first.score, after.score) == (1.0, 1.0)
    assert 0.4 < took_s < 0.5 + 0.5 and is_same_process


@pytest.mark.parametrize("limit_s", [0, -1, float("inf"), "5"])
def test_a_limit_of_math_that_is_none_is_refused_before_the_run(limit_s: object):
    with pytest.raises(ConfigError, match=r"rewards\.functions\.0\.args\.limit_s: got "):
        check_reward(math_answers.score, {"limit_s": limit_s}, "rewards.functions.0.function")
