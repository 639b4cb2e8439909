"""Time limits of test cases, learned from correct runs."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrl.scheduling.rules.reward_budgets import RewardBudgets, RewardConfig

NO_PROBE = 0.5
runs = st.lists(st.tuples(st.integers(0, 9), st.floats(0, 60), st.booleans()), max_size=60)


def learned(*seconds: float, correct: bool = True) -> RewardBudgets:
    budgets = RewardBudgets()
    for cpu_s in seconds:
        budgets.observe(1, cpu_s, correct=correct)
    return budgets


def test_a_case_without_a_correct_run_gets_the_longest_limit():
    limit = RewardBudgets().limit(1, NO_PROBE)
    assert limit.timeout_s == 30.0
    assert "no correct run" in limit.why


@pytest.mark.parametrize(("longest_s", "timeout_s"), [(0.4, 2.0), (1.0, 2.0), (4.0, 6.0), (19.0, 28.5), (25.0, 30.0)])
def test_the_limit_is_half_as_long_again_as_the_longest_correct_run(longest_s, timeout_s):
    assert learned(0.1, longest_s, 0.2).limit(1, NO_PROBE).timeout_s == timeout_s


def test_a_wrong_run_buys_no_time():
    budgets = learned(1.0)
    budgets.observe(1, 29.0, correct=False)
    assert budgets.limit(1, NO_PROBE).timeout_s == 2.0
    assert learned(29.0, correct=False).anchors == {}


def test_one_run_in_fifty_is_a_probe():
    budgets = learned(1.0)
    assert budgets.limit(1, 0.0199).timeout_s == 30.0
    assert budgets.limit(1, 0.02).timeout_s == 2.0
    assert "probe" in budgets.limit(1, 0.0).why


def test_a_slower_correct_run_found_by_a_probe_raises_the_limit():
    budgets = learned(1.0)
    budgets.observe(1, 8.0, correct=True)
    assert budgets.limit(1, NO_PROBE).timeout_s == 12.0


def test_without_adaptive_limits_every_case_gets_the_longest():
    budgets = RewardBudgets(config=RewardConfig(adaptive=False))
    budgets.observe(1, 1.0, correct=True)
    assert budgets.limit(1, NO_PROBE).timeout_s == 30.0


@given(history=runs, case=st.integers(0, 9), draw=st.floats(0, 1, exclude_max=True))
def test_every_limit_lies_within_its_bounds_and_admits_every_known_correct_run(history, case, draw):
    budgets = RewardBudgets()
    for other, cpu_s, correct in history:
        budgets.observe(other, cpu_s, correct=correct)
    timeout_s = budgets.limit(case, draw).timeout_s
    assert 2.0 <= timeout_s <= 30.0
    assert all(cpu_s <= timeout_s for other, cpu_s, correct in history if other == case and correct and cpu_s <= 30.0)


def test_cases_are_ordered_by_what_their_runs_took_right_or_wrong():
    budgets = RewardBudgets()
    budgets.observe(1, 0.5, correct=True)
    budgets.observe(2, 30.0, correct=False)
    assert sorted([2, 1, 3], key=budgets.expected_s) == [1, 3, 2]  # 3 is not met yet: the mean of all


def test_the_expected_time_follows_the_runs():
    budgets = learned(*[10.0] + [1.0] * 20)
    assert 1.0 < budgets.expected_s(1) < 1.2
    assert RewardBudgets().expected_s(1) == 2.0


def test_the_cases_met_longest_ago_are_forgotten_first():
    budgets = RewardBudgets(config=RewardConfig(max_cases=32))
    for case in range(33):
        budgets.observe(case, 1.0, correct=True)
    assert list(budgets.anchors) == list(range(3, 33))  # one too many, and a sixteenth of 32
    assert list(budgets.expected) == list(range(3, 33))


@given(max_cases=st.integers(1, 40), cases=st.lists(st.integers(0, 2**64 - 1), max_size=200))
def test_memory_is_bounded_and_the_newest_case_is_known(max_cases, cases):
    budgets = RewardBudgets(config=RewardConfig(max_cases=max_cases))
    for case in cases:
        known = case in budgets.anchors
        budgets.observe(case, 1.0, correct=True)
        assert len(budgets.anchors) <= max_cases
        assert len(budgets.expected) <= max_cases
        assert known or list(budgets.anchors)[-1] == case


@pytest.mark.parametrize("cpu_s", [-1.0, math.nan, math.inf])
def test_a_time_that_is_none_is_refused(cpu_s):
    with pytest.raises(ValueError, match="case 1"):
        RewardBudgets().observe(1, cpu_s, correct=True)


def test_an_infrastructure_failure_is_tried_three_times_and_then_drops_the_sample():
    budgets = RewardBudgets()
    assert [budgets.retry(n).again for n in (1, 2, 3)] == [True, True, False]
    assert "dropped" in budgets.retry(3).why


@given(before=runs, after=runs)
def test_a_state_saved_and_loaded_goes_on_like_the_one_that_was_not(before, after):
    budgets = RewardBudgets(config=RewardConfig(max_cases=4))
    for case, cpu_s, correct in before:
        budgets.observe(case, cpu_s, correct=correct)
    loaded = msgspec.msgpack.decode(msgspec.msgpack.encode(budgets), type=RewardBudgets)
    for case, cpu_s, correct in after:
        assert loaded.limit(case, NO_PROBE) == budgets.limit(case, NO_PROBE)
        assert loaded.expected_s(case) == budgets.expected_s(case)
        budgets.observe(case, cpu_s, correct=correct)
        loaded.observe(case, cpu_s, correct=correct)
    assert loaded == budgets
    assert list(loaded.anchors) == list(budgets.anchors)
