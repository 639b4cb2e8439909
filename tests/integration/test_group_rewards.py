"""Rewards of whole groups at the trainer's seat, with a manager on a real port: when they run, and what they may do."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.integration.live import CONFIG, honest_worker, manager, play_round, run, trainer

from polyrl.client import Group, GroupRewardOf, RewardResult, Sample
from polyrl.errors import NoReward, PolyrlError
from polyrl.scheduling.core.parameters import DomainData, SchedulerConfig
from polyrl.telemetry.account import read_account

FOUR_GROUPS = replace(CONFIG, domains=(DomainData(name="d", prompts_per_step=4, num_prompts=50),))
NUM_SAMPLES = CONFIG.rounds.samples_per_prompt


async def own(sample: Sample) -> RewardResult:
    return RewardResult(10.0, parts={"own": 10.0})


async def rank(group: Group) -> list[RewardResult | None]:
    return [RewardResult(float(at), parts={"rank": at}) for at in range(len(group.samples))]


async def played(run_dir: Path, group_reward: GroupRewardOf, config: SchedulerConfig = CONFIG) -> list[Group]:
    """The groups of one step that was played to its end."""
    async with (
        manager(run_dir) as live,
        honest_worker(live),
        trainer(live, config, reward=own, group_reward=group_reward) as fleet,
    ):
        await fleet.publish(0)
        return await play_round(fleet, 0)


async def add_up(run_dir: Path) -> None:
    groups = await played(run_dir, rank)
    assert len(groups) == 2
    for group in groups:
        assert [one.reward for one in group.samples] == [10.0 + at for at in range(NUM_SAMPLES)]
        assert [one.parts for one in group.samples] == [{"own": 10.0, "rank": at} for at in range(NUM_SAMPLES)]


def test_the_rewards_of_a_group_are_added_to_those_of_its_samples(tmp_path: Path):
    run(add_up(tmp_path))


async def all_at_once(run_dir: Path) -> None:
    under_way, all_there = set[int](), asyncio.Event()

    async def slow(group: Group) -> list[RewardResult | None]:
        """Ends only when every group of the round is with it."""
        under_way.add(group.id)
        if len(under_way) == 4:
            all_there.set()
        await all_there.wait()
        return await rank(group)

    groups = await played(run_dir, slow, FOUR_GROUPS)
    assert {group.id for group in groups} == under_way


def test_a_slow_judge_has_all_groups_of_a_round_at_once_and_the_round_waits_for_it(tmp_path: Path):
    run(all_at_once(tmp_path))


async def one_at_a_time(run_dir: Path) -> None:
    under_way, most = set[int](), 0

    async def counting(group: Group) -> list[RewardResult | None]:
        nonlocal most
        under_way.add(group.id)
        most = max(most, len(under_way))
        await asyncio.sleep(0.2)
        under_way.remove(group.id)
        return await rank(group)

    groups = await played(run_dir, counting, replace(FOUR_GROUPS, rewards=replace(CONFIG.rewards, slots=1)))
    assert (len(groups), most) == (4, 1)


def test_no_more_groups_are_under_way_than_there_are_slots(tmp_path: Path):
    run(one_at_a_time(tmp_path))


async def none_for_the_first(run_dir: Path) -> None:
    asked: list[int] = []

    async def picky(group: Group) -> list[RewardResult | None]:
        asked.append(group.id)
        if group.id == asked[0]:
            raise NoReward("returned 3 rewards, expected 4")
        return await rank(group)

    groups = await played(run_dir, picky)
    files = [one for one in (run_dir / "journal").rglob("*") if one.is_file()]
    assert any(b"no reward: returned 3 rewards, expected 4" in one.read_bytes() for one in files)
    assert len(groups) == 2 and asked[0] not in {group.id for group in groups}
    assert asked.count(asked[0]) == 1, "another attempt would end the same"


def test_a_group_without_a_reward_is_rejected_with_the_reason_and_replaced(tmp_path: Path, caplog):
    run(none_for_the_first(tmp_path))
    (line,) = [one.getMessage() for one in caplog.records if "is rejected" in one.getMessage()]
    assert line.endswith("which is rejected: returned 3 rewards, expected 4")


async def away_at_first(run_dir: Path) -> None:
    asked: Counter[int] = Counter()

    async def away(group: Group) -> list[RewardResult | None]:
        asked[group.id] += 1
        if asked[group.id] == 1:
            raise PolyrlError("the judge said 503")
        found = await rank(group)
        return [None, *found[1:]] if asked[group.id] == 2 else found

    groups = await played(run_dir, away)
    assert [len(group.samples) for group in groups] == [NUM_SAMPLES] * 2
    assert set(asked.values()) == {3}


def test_a_judge_that_is_away_is_asked_again(tmp_path: Path):
    run(away_at_first(tmp_path))


async def away_for_good(run_dir: Path, num_away: int) -> tuple[list[Group], Counter[int]]:
    asked: Counter[int] = Counter()

    async def away(group: Group) -> list[RewardResult | None]:
        asked[group.id] += 1
        found = await rank(group)
        is_first = group.id == next(iter(asked))
        return [None] * num_away + found[num_away:] if is_first else found

    return await played(run_dir, away), asked


def test_samples_whose_infrastructure_failed_leave_their_group_and_are_no_zeros(tmp_path: Path):
    groups, asked = run(away_for_good(tmp_path, 2))
    ledger = read_account(tmp_path).ledger
    assert ledger.samples_discarded == {"reward_failed": 2} and ledger.prompts_dropped == {}
    assert ledger.samples_trained == 2 * NUM_SAMPLES - 2
    first = next(iter(asked))
    found = {group.id: [one.reward for one in group.samples] for group in groups}
    assert found[first] == [12.0, 13.0] and asked[first] == 3
    assert sorted(map(len, found.values())) == [2, NUM_SAMPLES]


def test_a_group_with_too_few_samples_left_is_replaced(tmp_path: Path):
    groups, asked = run(away_for_good(tmp_path, 3))
    assert next(iter(asked)) not in {group.id for group in groups}
    assert [len(group.samples) for group in groups] == [NUM_SAMPLES] * 2
    ledger = read_account(tmp_path, verify=True).ledger
    assert ledger.samples_discarded == {"reward_failed": NUM_SAMPLES} and ledger.prompts_dropped == {"reward_failed": 1}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_none_is_no_reward(tmp_path: Path, value: float):
    async def scenario() -> None:
        asked: list[int] = []

        async def odd(group: Group) -> list[RewardResult | None]:
            asked.append(group.id)
            found = await rank(group)
            return [RewardResult(value), *found[1:]] if group.id == asked[0] else found

        groups = await played(tmp_path, odd)
        assert len(groups) == 2 and asked[0] not in {group.id for group in groups}

    run(scenario())


async def handed_out_again(run_dir: Path) -> None:
    asked: Counter[int] = Counter()

    async def counting(group: Group) -> list[RewardResult | None]:
        asked[group.id] += 1
        return await rank(group)

    async with manager(run_dir) as live, honest_worker(live):
        async with trainer(live, reward=own, group_reward=counting) as first:
            await first.publish(0)
            lost = await anext(aiter(first.round(0)))  # and never taken
        async with trainer(live, reward=own, group_reward=counting) as second:
            groups = await play_round(second, 0)
    again = next(group for group in groups if group.id == lost.id)
    assert [one.reward for one in again.samples] == [one.reward for one in lost.samples]
    assert asked[lost.id] == 2 and len(groups) == 2


def test_a_group_that_is_handed_out_again_is_scored_again(tmp_path: Path):
    run(handed_out_again(tmp_path))


async def ends_meanwhile(run_dir: Path) -> None:
    async def endless(group: Group) -> list[RewardResult | None]:
        await asyncio.Event().wait()
        raise AssertionError

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(played(run_dir, endless), 2.0)
    left = [task.get_name() for task in asyncio.all_tasks() if "_judge_group" in repr(task)]
    assert left == []


def test_a_trainer_that_ends_leaves_no_judge_behind(tmp_path: Path):
    run(ends_meanwhile(tmp_path))
