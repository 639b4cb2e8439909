"""Limits of environments' turns, learned from those that ended; and who hangs, the episode or its host."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrl.scheduling.core.parameters import EnvironmentRules
from polyrl.scheduling.rules import play_limits
from polyrl.scheduling.rules.play_limits import MAX_TASKS, MIN_ENDED, PlayTimes, episode_bounds, turn_bounds, who_hangs

RULES = EnvironmentRules(turn_timeout_s=600.0, least_turn_timeout_s=2.0)
TURNS, EPISODES = turn_bounds(RULES), episode_bounds(RULES)
NO_PROBE = 0.5
LATER = 1e6


def learned(*seconds: float, task: int = 0) -> PlayTimes:
    times = PlayTimes()
    for one in seconds:
        times.observe(task, one, 0.0)
    return times


def test_until_enough_turns_have_ended_the_limit_is_the_set_one():
    limit = learned(*[1.0] * (MIN_ENDED - 1)).limit(TURNS, 0, LATER, NO_PROBE)
    assert (limit.timeout_s, limit.why) == (600.0, "fewer than 64 turns have ended")


def test_the_limit_is_five_times_what_999_of_1000_turns_take():
    limit = learned(*[1.0] * 2998, *[100.0] * 2, task=3).limit(TURNS, 4, LATER, NO_PROBE)
    assert limit.timeout_s == pytest.approx(5.0, rel=0.1)
    assert "999 of 1000 turns" in limit.why


def test_nothing_is_believed_before_a_slow_turn_could_have_ended():
    times = learned(*[1.0] * 1000)
    limit = times.limit(TURNS, 0, 598.0, NO_PROBE)
    assert (limit.timeout_s, limit.why) == (600.0, "slow turns may not have ended yet")
    assert times.limit(TURNS, 0, 599.0, NO_PROBE).timeout_s < 10.0


def test_a_task_with_a_slow_turn_keeps_the_time_that_it_needs_and_others_do_not():
    times = learned(*[1.0] * 5000)
    times.observe(7, 40.0, 0.0)
    assert times.limit(TURNS, 7, LATER, NO_PROBE).timeout_s == pytest.approx(200.0)
    assert times.limit(TURNS, 8, LATER, NO_PROBE).timeout_s < 10.0


@pytest.mark.parametrize(("seconds", "timeout_s"), [(0.01, 2.0), (500.0, 600.0)])
def test_a_learned_limit_stays_within_the_set_ones(seconds, timeout_s):
    assert learned(*[seconds] * 100).limit(TURNS, 0, LATER, NO_PROBE).timeout_s == timeout_s


def test_the_least_limit_gives_way_to_the_most():
    rules = msgspec.structs.replace(RULES, turn_timeout_s=1.0)
    assert learned(*[0.01] * 100).limit(turn_bounds(rules), 0, LATER, NO_PROBE).timeout_s == 1.0


def test_one_turn_in_fifty_and_a_new_host_get_the_set_limit_and_so_do_all_where_nothing_is_to_be_learned():
    times = learned(*[0.1] * 100)
    assert times.limit(TURNS, 0, LATER, 0.019).timeout_s == 600.0
    assert times.limit(TURNS, 0, LATER, 0.02).timeout_s == 2.0
    assert times.limit(TURNS, 0, LATER, NO_PROBE, has_moved=False).timeout_s == 600.0
    rules = msgspec.structs.replace(RULES, learn_turn_timeouts=False)
    assert times.limit(turn_bounds(rules), 0, LATER, NO_PROBE).timeout_s == 600.0


def test_the_limit_of_an_episode_is_learned_by_the_same_rule_up_to_its_own_bound():
    times = learned(*[50.0] * 5000)
    limit = times.limit(EPISODES, 0, LATER, NO_PROBE)
    assert limit.timeout_s == pytest.approx(250.0, rel=0.1)
    assert limit.learned and "999 of 1000 episodes" in limit.why
    early = times.limit(EPISODES, 0, 3549.0, NO_PROBE)
    assert (early.timeout_s, early.why, early.learned) == (3600.0, "slow episodes may not have ended yet", False)
    assert times.limit(EPISODES, 0, 3550.0, NO_PROBE).learned
    assert learned(*[0.1] * 100).limit(EPISODES, 0, LATER, NO_PROBE).timeout_s == RULES.least_turn_timeout_s
    off = episode_bounds(msgspec.structs.replace(RULES, learn_episode_timeouts=False))
    assert times.limit(off, 0, LATER, NO_PROBE).why == "environments.learn_episode_timeouts is off"


def test_tasks_beyond_the_bound_are_forgotten_oldest_first(monkeypatch: pytest.MonkeyPatch):
    assert MAX_TASKS >= 1024
    monkeypatch.setattr(play_limits, "MAX_TASKS", 3)
    times = learned(*[0.1] * 100)
    for task in (1, 2, 3, 1, 4):
        times.observe(task, 50.0 + task if task != 1 else 60.0 + len(times.slowest), 0.0)
    assert list(times.slowest) == [3, 1, 4]


@given(st.lists(st.floats(0, 1e4), min_size=MIN_ENDED, max_size=200), st.floats(0, 1, exclude_max=True))
def test_a_limit_is_never_below_what_most_turns_take_nor_outside_its_bounds(seconds, draw):
    times = learned(*seconds)
    limit = times.limit(TURNS, 0, LATER, draw).timeout_s
    assert RULES.least_turn_timeout_s <= limit <= RULES.turn_timeout_s
    fitting = sum(one <= limit for one in seconds)
    assert fitting >= 0.98 * sum(one <= RULES.turn_timeout_s for one in seconds)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(times), type=PlayTimes)
    assert again.limit(TURNS, 0, LATER, draw) == times.limit(TURNS, 0, LATER, draw)


@pytest.mark.parametrize(
    ("began_at", "moved_at", "others_since", "is_alone", "culprit"),
    [
        (90.0, 80.0, [80.0], False, "host"),
        (90.0, 90.0, [90.0], False, "host"),
        (90.0, 95.0, [95.0], False, "host"),
        (90.0, 95.1, [90.0], False, "episode"),  # another one of its host has moved meanwhile
        (90.0, 95.1, [], True, "episode"),
        (90.0, 80.0, [], True, "host"),  # nobody can tell
        (90.0, 80.0, [], False, "unclear"),  # the others wait for the policy
        (90.0, 80.0, [96.0, 99.0], False, "unclear"),  # they have only just got the move
        (90.0, 80.0, [96.0, 95.0], False, "host"),
        (80.0, 80.0, [], False, "episode"),  # it was watched for long enough
    ],
)
def test_a_host_hangs_if_nothing_moves_in_it_and_no_other_episode_says_otherwise(
    began_at, moved_at, others_since, is_alone, culprit
):
    assert who_hangs(100.0, 10.0, began_at, moved_at, others_since, is_alone=is_alone) == culprit
