"""The seeding window: unbounded without workers, learned with them, remembered by their number."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrl.scheduling.rules.seeding import SeedingConfig, SeedingState, StepTimes, learn, start, window

LEARNED = SeedingConfig()


def times(wait_train_s: float, wait_remote_s: float, *, mean_workers: float = 2.0, workers_now: int = 2) -> StepTimes:
    return StepTimes(
        wait_train_s=wait_train_s,
        wait_remote_s=wait_remote_s,
        remote_s=300.0,
        train_s=181.0,
        mean_workers=mean_workers,
        workers_now=workers_now,
        num_reserved=4,
    )


def fluid_step(seed_s: float, num_workers: int, *, alone_s: float = 277.0, train_s: float = 181.0, r: float = 0.2):
    """Generation as a fluid: the trainer alone takes `alone_s`, a worker is r times as fast as it."""
    fleet = num_workers * r
    seeded_s = min(seed_s, alone_s / (1 + fleet))
    generated_s = (alone_s - seeded_s) / fleet
    trained_s = seeded_s + train_s
    return times(
        max(0.0, generated_s - trained_s),
        max(0.0, trained_s - generated_s),
        mean_workers=num_workers,
        workers_now=num_workers,
    )


def balanced_s(num_workers: int, *, alone_s: float = 277.0, train_s: float = 181.0, r: float = 0.2) -> float:
    return (alone_s - num_workers * r * train_s) / (1 + num_workers * r)


def run(config: SeedingConfig, state: SeedingState, num_workers: int, num_steps: int) -> None:
    for _ in range(num_steps):
        learn(config, state, fluid_step(state.t_seed_s, num_workers))


@pytest.mark.parametrize("mode", ["learned", "fixed", "whole_round", "off"])
def test_without_workers_the_trainer_generates_the_whole_round_in_every_mode(mode):
    assert window(SeedingConfig(mode=mode), SeedingState(10.0), 0).seconds == math.inf


def test_each_mode_has_its_window():
    state = SeedingState(42.0)
    assert window(SeedingConfig(mode="learned"), state, 3).seconds == 42.0
    assert window(SeedingConfig(mode="fixed", fixed_s=17.0), state, 3).seconds == 17.0
    assert window(SeedingConfig(mode="whole_round"), state, 3).seconds == math.inf
    assert window(SeedingConfig(mode="off"), state, 3).seconds == 0.0
    assert "not yet settled for 3 workers" in window(LEARNED, state, 3).why


def test_the_window_moves_by_a_third_of_the_difference_of_the_waits():
    state = start(LEARNED)
    learn(LEARNED, state, times(45.0, 15.0))
    assert state.t_seed_s == pytest.approx(70.0)
    assert state.memory == {2: state.t_seed_s}


def test_the_window_never_falls_below_zero():
    state = SeedingState(5.0)
    learn(LEARNED, state, times(0.0, 100.0))
    assert state.t_seed_s == 0.0


def test_one_step_corrects_by_no_more_than_the_limit():
    state = start(LEARNED)
    learn(LEARNED, state, times(9_000.0, 0.0))
    assert state.t_seed_s == 180.0


def test_a_correction_that_turns_back_is_at_most_half_as_big():
    state = SeedingState(100.0)
    learn(LEARNED, state, times(60.0, 0.0))
    learn(LEARNED, state, times(0.0, 60.0))
    assert state.t_seed_s == pytest.approx(110.0)
    learn(LEARNED, state, times(0.0, 60.0))
    assert state.t_seed_s == pytest.approx(90.0)


@pytest.mark.parametrize("mode", ["fixed", "whole_round", "off"])
def test_only_the_learned_mode_learns(mode):
    state = SeedingState(60.0)
    assert mode in learn(SeedingConfig(mode=mode), state, times(30.0, 0.0))
    assert state == SeedingState(60.0)


def test_nothing_is_learned_from_a_step_that_ends_without_workers():
    state = SeedingState(60.0, memory={1: 200.0})
    assert "no workers" in learn(LEARNED, state, times(500.0, 0.0, mean_workers=0.4, workers_now=0))
    assert state == SeedingState(60.0, memory={1: 200.0})


def test_a_fleet_that_changed_is_not_remembered_but_recalled():
    state = SeedingState(60.0, memory={4: 73.0})
    learn(LEARNED, state, times(30.0, 0.0, mean_workers=2.5, workers_now=3))
    assert (state.t_seed_s, state.memory) == (70.0, {4: 73.0})
    why = learn(LEARNED, state, times(30.0, 0.0, mean_workers=3.2, workers_now=4))
    assert (state.t_seed_s, state.memory) == (73.0, {4: 73.0})
    assert "remembered" in why


def test_what_is_not_to_be_remembered_is_learned_anew():
    state = SeedingState(60.0, memory={4: 73.0})
    learn(SeedingConfig(remember=False), state, times(30.0, 0.0, mean_workers=3.2, workers_now=4))
    assert state.t_seed_s == 70.0


def test_a_worker_away_for_a_moment_does_not_change_the_fleet():
    state = start(LEARNED)
    learn(LEARNED, state, times(30.0, 0.0, mean_workers=1.96, workers_now=2))
    assert state.memory == {2: 70.0}


@pytest.mark.parametrize(("num_workers", "expected_s"), [(1, 200.7), (2, 146.1), (3, 105.3), (4, 73.4)])
def test_from_a_minute_the_window_converges_to_where_nobody_waits(num_workers, expected_s):
    """The authors found 190, 160, 105 and 70 s by hand."""
    state = start(LEARNED)
    run(LEARNED, state, num_workers, 30)
    assert state.t_seed_s == pytest.approx(balanced_s(num_workers), abs=1.0)
    assert state.t_seed_s == pytest.approx(expected_s, abs=1.0)


@given(num_workers=st.integers(1, 4), initial_s=st.floats(0, 600))
def test_the_window_converges_from_anywhere(num_workers, initial_s):
    state = SeedingState(initial_s)
    run(LEARNED, state, num_workers, 40)
    assert state.t_seed_s == pytest.approx(balanced_s(num_workers), abs=2.0)


def test_undamped_the_window_of_one_worker_swings_for_ever():
    config = SeedingConfig(damped=False)
    state = start(config)
    run(config, state, 1, 100)
    swings = []
    for _ in range(4):
        swings.append(round(state.t_seed_s))
        run(config, state, 1, 1)
    assert sorted(dict.fromkeys(swings)) == [180, 221]


def test_a_fleet_size_that_returns_has_its_window_back_at_once():
    state = start(LEARNED)
    run(LEARNED, state, 4, 30)
    learn(LEARNED, state, times(120.0, 0.0, mean_workers=3.0, workers_now=2))
    run(LEARNED, state, 2, 30)
    assert window(LEARNED, state, 2).seconds == pytest.approx(balanced_s(2), abs=1.0)
    learn(LEARNED, state, times(0.0, 90.0, mean_workers=3.1, workers_now=4))
    assert window(LEARNED, state, 4).seconds == pytest.approx(balanced_s(4), abs=1.0)


@given(steps=st.lists(st.tuples(st.floats(0, 500), st.floats(0, 500), st.integers(0, 4), st.booleans()), max_size=30))
def test_a_state_saved_and_loaded_goes_on_like_the_one_that_was_not(steps):
    state = start(LEARNED)
    for wait_train_s, wait_remote_s, workers, same in steps:
        loaded = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=SeedingState)
        step = times(wait_train_s, wait_remote_s, mean_workers=workers if same else workers + 0.5, workers_now=workers)
        assert learn(LEARNED, state, step) == learn(LEARNED, loaded, step)
        assert loaded == state
        assert state.t_seed_s >= 0.0
