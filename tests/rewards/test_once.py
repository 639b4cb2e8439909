"""The same answer is scored once; rows that keep failing are quarantined."""

import asyncio
import logging

import pytest
from tests.rewards.test_pool import given

from polyrl.rewards.once import ScoredOnce
from polyrl.rewards.reward import Reward, RewardFailed
from polyrl.rewards.watching import RewardWatch


class Counting:
    """A function that counts its calls."""

    def __init__(self, reward: Reward | None = None) -> None:
        self.num, self.reward = 0, reward

    async def __call__(self) -> Reward:
        self.num += 1
        await asyncio.sleep(0.01)
        if self.reward is None:
            raise RewardFailed("no")
        return self.reward


def test_the_same_answer_is_scored_once_also_while_the_first_is_under_way():
    async def body() -> None:
        once, make = ScoredOnce(), Counting(Reward(1.0))
        found = await asyncio.gather(*(once.score("m:f", {}, given("a"), make) for _ in range(4)))
        assert found == [Reward(1.0)] * 4 and make.num == 1
        assert await once.score("m:f", {}, given("a")._replace(limit_s=2.0), make) == Reward(1.0)
        assert (make.num, once.num_saved) == (1, 4)
        await once.score("m:f", {"most": 1}, given("a"), make)
        await once.score("m:g", {}, given("a"), make)
        await once.score("m:f", {}, given("b"), make)
        await once.score("m:f", {}, given("a", tests=[1]), make)
        assert make.num == 5
        for tests in ([1 << 80], [1 << 80], [1 << 81]):
            await once.score("m:f", {}, given("a", tests=tests), make)
        assert make.num == 7

    asyncio.run(body())


@pytest.mark.parametrize("reward", [None, Reward(0.0, {}, "timed_out")])
def test_failures_and_time_limits_are_not_kept(reward: Reward | None):
    async def body() -> None:
        once, make = ScoredOnce(), Counting(reward)
        for _ in range(2):
            await asyncio.gather(once.score("m:f", {}, given(), make), return_exceptions=True)
        assert make.num == 2

    asyncio.run(body())


def test_an_answer_that_is_no_longer_wanted_does_not_take_the_score_from_the_others():
    async def body() -> None:
        once, make = ScoredOnce(), Counting(Reward(1.0))
        first = asyncio.create_task(once.score("m:f", {}, given(), make))
        second = asyncio.create_task(once.score("m:f", {}, given(), make))
        await asyncio.sleep(0)
        first.cancel()
        assert await second == Reward(1.0) and make.num == 1

    asyncio.run(body())


def test_memory_is_bounded_and_what_was_used_last_is_kept():
    async def body() -> None:
        once, make = ScoredOnce(max_kept=2), Counting(Reward(1.0))
        for answer in ("a", "b", "a", "c", "a"):
            await once.score("m:f", {}, given(answer), make)
        assert make.num == 3
        await once.score("m:f", {}, given("b"), make)
        assert make.num == 4

    asyncio.run(body())


def test_a_row_that_keeps_failing_while_others_are_scored_is_quarantined_and_named_once(
    caplog: pytest.LogCaptureFixture,
):
    watch = RewardWatch(row_failures=3)
    with caplog.at_level(logging.WARNING, "polyrl.rewards"):
        for _ in range(5):
            watch.failed(0, "bad", "prompt 7 of code", "the row's tests: is empty")
            watch.scored(0, "good", given(), Reward(1.0))
    assert watch.quarantined == {"bad": "the row's tests: is empty"}
    assert [one.getMessage() for one in caplog.records] == [
        "prompt 7 of code is quarantined: its reward failed 3 times; the last: the row's tests: is empty"
    ]
    assert watch.take_metrics()["reward/quarantined_rows"] == 1


def test_a_judge_that_is_away_quarantines_nothing_and_a_score_clears_a_row():
    watch = RewardWatch(row_failures=2)
    for row in ("a", "b") * 50:
        watch.failed(0, row, row, "503")
    assert not watch.quarantined
    watch.scored(0, "a", given(), Reward(1.0))
    watch.failed(0, "a", "a", "503")
    assert not watch.quarantined
    watch.failed(0, "b", "b", "503")
    assert list(watch.quarantined) == ["b"]


def test_metrics_are_those_since_the_last_call():
    watch = RewardWatch(row_failures=2)
    watch.scored(0, "a", given()._replace(limit_s=2.0), Reward(0.0, {}, "timed_out"))
    watch.scored(0, "a", given()._replace(limit_s=4.0), Reward(1.0))
    found = watch.take_metrics()
    assert (found["reward/timed_out"], found["reward/crashed"], found["reward/limit_s/mean"]) == (0.5, 0.0, 3.0)
    assert "reward/timed_out" not in watch.take_metrics()
