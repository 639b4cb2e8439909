"""Rewards of whole groups in real processes: what a function is told, may return, and gets wrong."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.rewards.test_pool import with_pool

from polyrl.config import build
from polyrl.config.rewards import RewardsSection, WeightedReward
from polyrl.errors import ConfigError, UserError
from polyrl.rewards import weighing
from polyrl.rewards.failures import HOPELESS, RewardFailures
from polyrl.rewards.groups import AnswerFacts, RewardGroup, make_group, take_apart
from polyrl.rewards.line import RewardCall
from polyrl.rewards.lookup import check_functions
from polyrl.rewards.messages import Failed, GroupScored, RewardScored
from polyrl.rewards.once import ScoredOnce
from polyrl.rewards.pool import RewardPool
from polyrl.rewards.reward import Reward, RewardFailed, RewardInput, RewardTimedOut, RewardUnavailable

SHARED = RewardInput("1+1=", "", "2", {"number": 7.0}, "", 0)


@pytest.fixture(autouse=True)
def _modules_of_a_person(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def group(*answers: str) -> RewardGroup:
    return make_group(SHARED, [AnswerFacts(one, "stop", len(one) + 1) for one in answers or ("a", "bb", "ccc")])


def named(which: str, **settings: Any) -> WeightedReward:
    return WeightedReward(function=f"own_group_rewards:{which}", whole_group=True, **settings)


def score(name: str, given: RewardGroup | None = None, *, timeout_s: float = 20.0, **settings: Any) -> Any:
    async def body(pool: RewardPool) -> list[Reward | None]:
        return await weighing.score_group(pool, [named(name, **settings)], given or group())

    return with_pool(body, timeout_s=timeout_s)


def test_a_function_gets_all_answers_of_a_prompt_and_returns_a_reward_for_each():
    assert [one.score for one in score("rank")] == [1.0, 0.5, 0.0]
    first, second = score("told", make_group(SHARED, [AnswerFacts("a", "stop", 2), AnswerFacts("bb", "length", 9)]))
    assert first == Reward(7.0, {"length": 1.0, "tokens": 2.0, "cut": 0.0})
    assert second == Reward(7.0, {"length": 2.0, "tokens": 9.0, "cut": 1.0})


def test_an_async_function_may_return_rewards_with_parts_and_outcomes():
    assert score("waits") == [Reward(float(at), {"at": float(at)}, "crashed") for at in range(3)]


def test_async_functions_of_several_groups_share_a_process():
    async def body(pool: RewardPool) -> set[float]:
        await pool.score_group("own_group_rewards:own_process", group())
        found = await asyncio.gather(*(pool.score_group("own_group_rewards:own_process", group()) for _ in range(4)))
        return {one.score for each in found for one in each if one is not None}

    assert len(with_pool(body)) == 1


def test_a_class_is_started_once_and_closed_and_gets_its_arguments(tmp_path: Path):
    notes = tmp_path / "notes"

    async def body(pool: RewardPool) -> list[list[float]]:
        judge = named("Judge", args={"notes": str(notes), "bonus": 10.0}, weight=2.0)
        found = [await weighing.score_group(pool, [judge], given) for given in (group("a", "bb"), group("c", "d"))]
        return [[one.score for one in each if one is not None] for each in found]

    assert with_pool(body) == [[22.0, 24.0], [22.0, 22.0]]
    assert notes.read_text().split() == ["started", "asked", "asked", "closed"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("one_too_few", "returned 2 rewards, expected 3, one for each answer"),
        ("one_is_none", "answer 1 of the group: returned nan, expected a finite number"),
        ("a_number", "returned 1.0, expected a list of 3 rewards, one for each answer"),
        ("a_reward", "returned Reward(score=1.0.*, expected a list of 3 rewards"),
        ("raises", "KeyError: 'no such thing' (.*own_group_rewards.py"),
    ],
)
def test_a_fault_is_a_failure_of_the_whole_group_and_the_next_group_is_scored(name: str, reason: str):
    async def body(pool: RewardPool) -> list[Reward | None]:
        with pytest.raises(RewardFailed, match=f"own_group_rewards:{name}: {reason.replace('(', '.')}"):
            await weighing.score_group(pool, [named(name)], group())
        return await pool.score_group("own_group_rewards:rank", group())

    assert [one and one.score for one in with_pool(body)] == [1.0, 0.5, 0.0]


def test_a_function_that_takes_too_long_fails_its_group_unless_the_recipe_has_a_score_for_it():
    with pytest.raises(RewardTimedOut, match=r"took longer than 0\.5 s"):
        score("sleeps", timeout_s=0.5)
    assert score("sleeps", timeout_s=0.5, timeout_score=-1.0) == [Reward(-1.0, {}, "timed_out")] * 3


@pytest.mark.parametrize(("name", "reason"), [("away", "the judge said 503"), ("away_for_all", "for every answer")])
def test_a_judge_that_is_away_is_no_failure_of_the_group(name: str, reason: str):
    with pytest.raises(RewardUnavailable, match=reason):
        score(name)


def test_an_answer_whose_infrastructure_failed_has_no_reward_and_the_others_keep_theirs():
    assert score("away_for_the_second") == [Reward(0.0), None, Reward(2.0)]


def test_large_groups_with_many_parts_are_told_in_one_reply():
    found = score("many_parts", group(*("x" * number for number in range(200))))
    assert len(found) == 200 and all(one.score == 32.0 for one in found)


def test_the_same_group_is_scored_once_and_another_order_is_another_group(tmp_path: Path):
    notes = tmp_path / "notes"

    async def body(pool: RewardPool) -> int:
        once, judge = ScoredOnce(), named("Judge", args={"notes": str(notes)})
        for answers in (("a", "bb"), ("a", "bb"), ("bb", "a")):
            await weighing.score_group(pool, [judge], group(*answers), once)
        return once.num_saved

    assert with_pool(body) == 2, "the two answers of the second group"
    assert notes.read_text().split().count("asked") == 2


@pytest.mark.parametrize("name", ["away_for_the_second", "sleeps"])
def test_a_group_that_has_not_all_of_its_rewards_is_scored_again(name: str):
    async def body(pool: RewardPool) -> int:
        once = ScoredOnce()
        for _ in range(2):
            await weighing.score_group(pool, [named(name, timeout_score=0.0)], group(), once)
        return once.num_saved

    assert with_pool(body, timeout_s=0.5) == 0


def test_single_and_group_functions_add_up_and_every_score_has_its_name():
    functions = [
        WeightedReward(name="length", function="own_rewards:length"),
        named("rank", weight=0.5),
        named("told", name="facts", weight=0.0),
    ]

    async def body(pool: RewardPool) -> tuple[Reward, Reward | None]:
        given = group()
        return await weighing.score(pool, functions, given.answers[1]), (
            await weighing.score_group(pool, functions, given)
        )[1]

    own, added = with_pool(body)
    assert own == Reward(2.0, {"length": 2.0}, "scored", own.cpu_s, own.correct)
    facts = {"facts": 7.0, "facts/length": 2.0, "facts/tokens": 3.0, "facts/cut": 0.0}
    assert added == Reward(0.25, {"rank": 0.5, **facts})


def test_where_all_functions_are_of_groups_an_answer_alone_is_worth_nothing_and_no_process_is_started():
    async def body(pool: RewardPool) -> tuple[Reward, list[int]]:
        return await weighing.score(pool, [named("rank")], group().answers[0]), pool.pids

    assert with_pool(body) == (Reward(), [])


def test_what_answers_share_travels_once():
    given = group("a", "bb")
    shared, facts = take_apart(given)
    assert facts == [AnswerFacts("a", "stop", 2), AnswerFacts("bb", "stop", 3)] and shared.row is given.row
    assert facts is not None and make_group(shared, facts) == given
    assert take_apart(given.answers[0]) == (given.answers[0], None)


def test_a_reply_for_another_number_of_answers_than_were_asked_is_none():
    one, many = (RewardCall("f", {}, given, 1.0) for given in (SHARED, group()))
    scored = RewardScored(b"", 1.0, {})
    assert one.is_answered_by(scored) and not one.is_answered_by(GroupScored(b"", [scored]))
    assert many.is_answered_by(GroupScored(b"", [scored, None, scored])) and not many.is_answered_by(scored)
    assert not many.is_answered_by(GroupScored(b"", [scored]))
    assert one.is_answered_by(Failed(b"", "why")) and many.is_answered_by(Failed(b"", "why"))


def test_a_function_that_takes_something_else_than_the_recipe_says_is_refused_before_the_run():
    with pytest.raises(
        ConfigError, match=r"^rewards\.functions\.0\.function: rank takes a RewardGroup; expected whole"
    ):
        check_functions({"rewards.functions.0.function": WeightedReward(function="own_group_rewards:rank")})
    with pytest.raises(ConfigError, match=r"^data\.reward: Judge takes a RewardGroup"):
        check_functions({"data.reward": WeightedReward(function="own_group_rewards:Judge", args={"notes": "n"})})
    with pytest.raises(ConfigError, match=r"^rewards\.functions\.1\.whole_group: one_answer takes a RewardInput, exp"):
        check_functions({"rewards.functions.1.function": named("one_answer")})
    check_functions({"rewards.functions.0.function": named("rank"), "rewards.functions.1.function": named("waits")})


def test_rewards_of_ours_score_one_answer():
    with pytest.raises(ConfigError, match=r"functions\.0\.whole_group: math scores one answer, expected a function of"):
        build({"functions": [{"function": "math", "whole_group": True}]}, RewardsSection)


def test_a_group_function_that_always_fails_is_given_up_although_single_functions_score():
    async def body() -> str:
        failures = RewardFailures({(0, False): "mine:one", (0, True): "mine:rank"})
        failures.scored((0, False))
        failures.failed((0, True), "no idea", HOPELESS)
        with pytest.raises(UserError) as told:
            await asyncio.wait_for(failures.until_hopeless(), 1.0)
        assert failures.why_none_scored() == str(told.value) and failures.total == HOPELESS
        return str(told.value)

    assert asyncio.run(body()) == "the reward mine:rank failed for all of 32 answers: no idea"
