"""How many workers are worth holding."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrl.scheduling.rules.scaling import (
    Advice,
    ScalingConfig,
    ScalingState,
    advise,
    useful_workers,
)
from polyrl.scheduling.rules.seeding import StepTimes

CONFIG = ScalingConfig(min_workers=1, max_workers=8)


def times(*, remote_s: float = 250.0, train_s: float = 181.0, mean_workers: float = 4.0) -> StepTimes:
    return StepTimes(
        wait_train_s=0.0,
        wait_remote_s=0.0,
        remote_s=remote_s,
        train_s=train_s,
        mean_workers=mean_workers,
        workers_now=round(mean_workers),
        num_reserved=4,
    )


def asking_for(num_workers: int) -> StepTimes:
    return times(remote_s=100.0 * num_workers, train_s=100.0, mean_workers=1.0)


def advice_after(state: ScalingState, *wanted: int) -> list[int | None]:
    given_advice = [advise(state, CONFIG, asking_for(n), 0.0, 4) for n in wanted]
    return [None if advice is None else advice.num_workers for advice in given_advice]


def test_the_useful_number_generates_a_step_in_the_time_it_trains():
    assert useful_workers(times(), 70.0) == pytest.approx((250 * 4 + 70 * 4) / 181)


def test_a_step_that_did_not_train_is_no_measure():
    assert useful_workers(times(train_s=0.0), 70.0) == 0.0
    assert advise(ScalingState(), CONFIG, times(train_s=0.0), 70.0, 4) is None


def test_a_round_that_is_written_before_a_worker_could_begin_is_worth_no_worker():
    alone = times(remote_s=0.0, train_s=0.003, mean_workers=0.0)
    assert useful_workers(alone, 0.2 / 4) == pytest.approx(0.2 / 0.5)
    state = ScalingState()
    config = ScalingConfig()
    assert [advise(state, config, alone, 0.2 / 4, 0) for _ in range(3)] == [None] * 3
    state.last_advice = 4
    given_advice = [advise(state, config, alone, 0.2 / 4, 4) for _ in range(2)]
    assert given_advice[1] is not None
    assert (given_advice[1].num_workers, "needs to begin; it trains 0.00 s" in given_advice[1].why) == (0, True)


def test_an_unbounded_window_counts_as_the_whole_round():
    assert useful_workers(times(), math.inf) == pytest.approx(250 * 8 / 181)
    assert useful_workers(times(remote_s=0.0, mean_workers=0.0), math.inf) == 0.0


def test_advice_waits_for_a_second_step_that_agrees():
    assert advice_after(ScalingState(), 6, 6, 6, 6) == [None, 6, None, None]


def test_a_single_odd_step_advises_nothing():
    assert advice_after(ScalingState(), 4, 6, 4, 6, 4) == [None] * 5


def test_steps_that_disagree_on_the_side_advise_nothing():
    assert advice_after(ScalingState(), 6, 3, 6, 3) == [None] * 4


def test_the_latest_of_two_numbers_on_one_side_is_advised():
    assert advice_after(ScalingState(), 6, 7, 7, 3, 2) == [None, 7, None, None, 2]


def test_advice_stays_within_bounds():
    assert advice_after(ScalingState(), 30, 30, 30) == [None, 8, None]
    state = ScalingState()
    small = times(remote_s=1.0, train_s=100.0, mean_workers=1.0)
    assert [advise(state, CONFIG, small, 0.0, 4) for _ in range(2)][1] == Advice(1, why=WHY_ONE)


WHY_ONE = "0.0 workers generate a step's samples in the 100 s it trains (1 to 8 allowed, 4 now, 4 before)"


def test_bounds_that_cross_are_refused():
    with pytest.raises(ValueError, match="min_workers 5"):
        ScalingConfig(min_workers=5, max_workers=4)


@given(wanted=st.lists(st.integers(1, 8), max_size=30))
def test_a_state_saved_and_loaded_goes_on_like_the_one_that_was_not(wanted):
    state = ScalingState()
    for n in wanted:
        loaded = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=ScalingState)
        assert advice_after(state, n) == advice_after(loaded, n)
        assert loaded == state
