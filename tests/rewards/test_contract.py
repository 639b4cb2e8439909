"""What a reward may be and return, with real processes: functions, classes, outcomes, CPU time."""

import asyncio
import time
from pathlib import Path

import pytest
from tests.rewards.test_pool import given, score, with_pool

from polyrl.config.rewards import WeightedReward
from polyrl.errors import ConfigError
from polyrl.rewards import weighing
from polyrl.rewards.line import Surroundings
from polyrl.rewards.lookup import check_functions
from polyrl.rewards.pool import RewardPool
from polyrl.rewards.reward import Reward, RewardFailed, RewardTimedOut, RewardUnavailable
from polyrl.rewards.weighing import weigh
from polyrl.wire.reward_frames import RewardSeat


@pytest.fixture(autouse=True)
def _modules_of_a_person(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.mark.parametrize("name", ["Counted", "CountedAsync"])
def test_a_class_is_made_and_started_once_a_process_and_closed_at_the_end(name: str, tmp_path: Path):
    notes = tmp_path / "notes"

    async def body(pool: RewardPool) -> list[float]:
        asked = (pool.score(f"own_rewards:{name}", given(), {"notes": str(notes), "bonus": 0.5}) for _ in range(3))
        return sorted(one.score for one in await asyncio.gather(*asked))

    assert with_pool(body) == [1.5, 2.5, 3.5]
    assert notes.read_text().split() == ["made", "started", "closed"]


def test_other_arguments_are_another_object(tmp_path: Path):
    async def body(pool: RewardPool) -> list[float]:
        arguments = [{"notes": str(tmp_path / one)} for one in ("a", "a", "b")]
        return [(await pool.score("own_rewards:Counted", given(), one)).score for one in arguments]

    assert with_pool(body) == [1.0, 2.0, 1.0]


def test_a_start_that_fails_is_a_failure_of_the_answer_and_the_next_answer_is_scored():
    async def body(pool: RewardPool) -> float:
        with pytest.raises(RewardFailed, match="OSError: no such service"):
            await score(pool, "CannotStart")
        return await score(pool, "length")

    assert with_pool(body) == 3.0


def test_a_class_without_call_or_with_other_arguments_is_refused_before_the_run():
    with pytest.raises(ConfigError, match=r"data\.reward: NotCallable has no method __call__"):
        check_functions({"data.reward": WeightedReward(function="own_rewards:NotCallable")})
    counted = WeightedReward(function="own_rewards:Counted", args={"notes": "n", "bonsu": 1.0})
    with pytest.raises(ConfigError, match=r"rewards\.functions\.0\.args\.bonsu"):
        check_functions({"rewards.functions.0.function": counted})
    check_functions({"data.reward": WeightedReward(function="own_rewards:WithoutStart")})


def test_a_reward_brings_its_outcome_its_cpu_time_and_whether_it_is_right():
    found = with_pool(lambda pool: pool.score("own_rewards:WithoutStart", given()))
    assert found == Reward(0.5, {"style": 1.0}, "crashed", 2.5, False)


def test_the_cpu_time_of_a_plain_function_is_measured_and_waiting_is_none():
    async def body(pool: RewardPool) -> tuple[float | None, float | None]:
        burned = await pool.score("own_rewards:burns", given())
        return burned.cpu_s, (await pool.score("own_rewards:length", given())).cpu_s

    burned, none = with_pool(body)
    assert burned is not None and none is not None and 0.09 < burned < 0.5 and none < 0.05


@pytest.mark.parametrize(
    ("name", "reason"), [("infrastructure", "infrastructure_failed"), ("unavailable", "the judge said 503")]
)
def test_an_infrastructure_failure_is_told_apart_from_a_failure_that_is_final(name: str, reason: str):
    async def body(pool: RewardPool) -> None:
        with pytest.raises(RewardUnavailable, match=f"own_rewards:{name}: .*{reason}"):
            await weighing.score(pool, [WeightedReward(function=f"own_rewards:{name}")], given())

    with_pool(body)


def test_an_unknown_outcome_is_a_failure():
    async def body(pool: RewardPool) -> None:
        with pytest.raises(RewardFailed, match="returned an outcome of 'maybe', expected one of scored, timed_out"):
            await score(pool, "odd_outcome")

    with_pool(body)


def test_a_loop_ends_at_its_limit_of_cpu_time_and_is_a_wrong_answer_and_the_next_one_is_scored():
    async def body(pool: RewardPool) -> tuple[Reward, float, float]:
        function = WeightedReward(function="own_rewards:loops")
        await pool.score("own_rewards:loops", given())  # the process is warm
        began = time.monotonic()
        found = await weighing.score(pool, [function], given("loop")._replace(limit_s=0.3))
        return found, time.monotonic() - began, await score(pool, "length")

    found, took_s, after = with_pool(body)
    assert found == Reward(0.0, {}, "timed_out", 0.3, False) and after == 3.0
    assert took_s < 10.0  # the pool's own limit is 20 s


def test_the_recipe_says_what_an_answer_is_worth_at_which_its_function_takes_too_long():
    async def body(pool: RewardPool) -> Reward:
        with pytest.raises(RewardTimedOut):
            await weighing.score(pool, [WeightedReward(function="own_rewards:sleeps")], given())
        return await weighing.score(pool, [WeightedReward(function="own_rewards:sleeps", timeout_score=-1.0)], given())

    assert with_pool(body, timeout_s=0.3) == Reward(-1.0, {}, "timed_out", None, None)


def test_the_function_that_took_longest_says_the_cpu_time_and_whether_the_answer_is_right():
    functions = [WeightedReward(name=name, function=f"mine:{name}") for name in ("tests", "style")]
    found = weigh(functions, [Reward(1.0, {}, "scored", 3.0), Reward(0.1, {}, "scored", 0.01)], is_only=False)
    assert (found.cpu_s, found.correct) == (3.0, True)
    found = weigh(functions, [Reward(0.4, {}, "timed_out", 3.0), Reward(1.0)], is_only=False)
    assert (found.outcome, found.correct) == ("timed_out", False)
    assert weigh(functions, [Reward(1.0), Reward(1.0)], is_only=False).correct is None  # nobody measured anything


@pytest.mark.parametrize("is_right", [True, False])
@pytest.mark.parametrize("tests_first", [True, False])
def test_a_function_that_says_whether_the_answer_is_right_is_believed_over_a_score(is_right: bool, tests_first: bool):
    """Both of its scores and both of the other's would tell the opposite. The CPU time is the longest: it is what the
    limit of all functions is learned from."""
    tests, style = WeightedReward(function="code"), WeightedReward(function="mine:style", weight=0.1)
    said, other = (
        Reward(0.0 if is_right else 1.0, cpu_s=0.004, correct=is_right),
        Reward(float(not is_right), cpu_s=0.02),
    )
    order = slice(None, None, 1 if tests_first else -1)
    found = weigh([tests, style][order], [said, other][order], is_only=False)
    assert (found.correct, found.cpu_s) == (is_right, 0.02)
    assert weigh([tests, style], [said._replace(cpu_s=None), other], is_only=False).correct is is_right
    assert weigh([tests, style], [said, said._replace(correct=not is_right, cpu_s=9.0)], is_only=False).correct is (
        not is_right
    )


def test_a_process_that_is_not_ready_in_time_is_no_answer_that_took_too_long():
    async def body(pool: RewardPool) -> None:
        slow = WeightedReward(function="own_rewards:NeverReady", timeout_score=-1.0)
        with pytest.raises(RewardFailed, match=r"NeverReady: its process was not ready within 0\.5 s") as caught:
            await weighing.score(pool, [slow], given())
        assert not isinstance(caught.value, RewardTimedOut)

    with_pool(body, surroundings=Surroundings(start_s=0.5))


def test_the_look_at_a_module_before_the_run_has_the_recipes_time_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(3600)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r'data\.reward: "slow_to_import:one": cannot be imported within 0\.5 s'):
        check_functions({"data.reward": WeightedReward(function="slow_to_import:one")}, Surroundings(start_s=0.5))


def test_a_reward_worker_has_the_recipes_time_to_start_before_it_is_sent_away():
    async def body(pool: RewardPool) -> None:
        pool.remote.connected(lambda _: None)
        pool.remote.hear_fleet((RewardSeat("far", "life", 1, 1, draining=False),))
        asked = asyncio.create_task(pool.score("own_rewards:NeverReady", given()))
        while not pool.state().running:
            await asyncio.sleep(0.01)
        now = asyncio.get_running_loop().time()
        pool.remote.look(now + 600.0)
        assert pool.remote.num_workers == 1, "it may still load a model: twice 300 s to start and 20 s to score"
        pool.remote.look(now + 700.0)
        assert pool.remote.num_workers == 0
        asked.cancel()

    with_pool(body, processes=0, surroundings=Surroundings(start_s=300.0))


@pytest.mark.parametrize(("rule", "score"), [(None, 0.25), (-0.5, -0.5)])
def test_a_program_that_loops_is_scored_by_the_recipes_rule(rule: float | None, score: float):
    async def body(pool: RewardPool) -> Reward:
        return await weighing.score(
            pool, [WeightedReward(function="own_rewards:finds_a_loop", timeout_score=rule)], given()
        )

    assert with_pool(body) == Reward(score, {"cases": 0.5}, "timed_out", 1.0, False)
