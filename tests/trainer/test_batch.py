"""What an algorithm does with ends and rewards, and how samples become packs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.trainer.episodes import Played, group_of

from polyrl.config.recipe import AlgorithmConfig
from polyrl.trainer.batch import (
    TrainSample,
    check_samples,
    decode_groups,
    encode_groups,
    first_sequences,
    is_masked,
    is_zero_variance,
    number_episodes,
    overlong_penalty,
    shaped_reward,
    without,
)
from polyrl.trainer.packing import make_packs, plan_packs


def sample(num_prompt: int, num_answer: int, **more) -> TrainSample:
    prompt = np.arange(100, 100 + num_prompt, dtype=np.int32)
    answer = np.arange(500, 500 + num_answer, dtype=np.int32)
    return TrainSample(prompt, answer, np.zeros(num_answer, np.float32), more.pop("reward", 1.0), **more)


def test_a_group_with_equal_rewards_has_zero_variance():
    assert is_zero_variance([0.3])
    assert is_zero_variance([1.0] * 8)
    assert not is_zero_variance([1.0] * 7 + [0.0])


def test_the_soft_penalty_rises_in_a_straight_line_before_the_cap():
    assert [overlong_penalty(num, 100, 20) for num in (0, 80, 85, 90, 100, 120)] == [0.0, 0.0, 0.25, 0.5, 1.0, 1.0]
    config = AlgorithmConfig(overlong="penalty", overlong_buffer_tokens=20, overlong_penalty=0.5)
    assert shaped_reward(1.0, 90, config, 100) == 0.75
    assert shaped_reward(1.0, 90, AlgorithmConfig(), 100) == 1.0


def test_only_answers_that_were_cut_off_are_masked():
    config = AlgorithmConfig(overlong="mask")
    assert is_masked(sample(3, 5, finish="length"), config)
    assert not is_masked(sample(3, 5, finish="stop"), config)
    assert not is_masked(sample(3, 5, finish="length"), AlgorithmConfig())


@given(st.lists(st.integers(1, 300), max_size=60), st.integers(1, 400))
def test_packs_hold_every_sample_once_and_none_too_many_tokens(lengths, max_tokens):
    packs = plan_packs(lengths, max_tokens)
    assert sorted(number for pack in packs for number in pack) == list(range(len(lengths)))
    for pack in packs:
        assert len(pack) == 1 or sum(lengths[one] for one in pack) <= max_tokens
    if lengths and max(lengths) <= max_tokens:
        assert len(packs) <= 2 * sum(lengths) / max_tokens + 1, "first fit leaves at most one pack half empty"


def test_a_pack_predicts_the_answers_and_nothing_else():
    samples = [sample(3, 2), sample(1, 4)]
    (pack,) = make_packs(samples, 100)
    assert pack.samples == (0, 1)
    assert pack.tokens.tolist() == [100, 101, 102, 500, 100, 500, 501, 502]
    assert pack.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]
    assert pack.predicting.tolist() == [2, 3, 4, 5, 6, 7]
    assert pack.targets.tolist() == [500, 501, 500, 501, 502, 503]
    assert pack.sample.tolist() == [0, 0, 1, 1, 1, 1]
    assert pack.lengths == (4, 4)


@pytest.mark.parametrize("max_tokens", [1, 10, 1000])
def test_a_sample_longer_than_a_pack_gets_its_own(max_tokens):
    packs = make_packs([sample(3, 9), sample(3, 9), sample(3, 9)], max_tokens)
    assert len(packs) == (1 if max_tokens == 1000 else 3)


# Episodes of several sequences

TURNS = Played([([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6]), ([1, 9], [7, 8])], 1.0)
"""Two sequences: two turns, then a compacted history."""
ONE_TURN = Played([([1, 2], [5])], 0.0)


def test_a_pack_predicts_drawn_tokens_and_nothing_that_was_given():
    (pack,) = make_packs(group_of([TURNS, ONE_TURN]), 100)
    assert pack.samples == (0, 1, 2)
    assert pack.tokens.tolist() == [1, 2, 3, 4, 5, 1, 9, 7, 1, 2]
    assert pack.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1]
    assert pack.predicting.tolist() == [1, 2, 4, 6, 7, 9]
    assert pack.targets.tolist() == [3, 4, 6, 7, 8, 5]
    assert pack.sample.tolist() == [0, 0, 0, 1, 1, 2]
    assert pack.num_drawn_tokens.tolist() == [3, 2, 1]


def test_episodes_are_numbered_and_counted_once():
    groups = [group_of([ONE_TURN, TURNS]), [], group_of([TURNS, TURNS]), [sample(1, 3), sample(1, 2)]]
    assert number_episodes(groups, 5) == [[5, 6, 6], [], [7, 7, 8, 8], [9, 10]]
    assert [num for _, num in first_sequences(groups)] == [1, 5, 5, 5, 3, 2]
    assert [len(one.prompt) for one, _ in first_sequences(groups)] == [2, 2, 2, 2, 1, 1]


def test_an_episode_is_left_out_with_all_of_its_sequences():
    groups = [group_of([ONE_TURN, TURNS]), group_of([TURNS])]
    assert [[one.num_drawn for one in group] for group in without(groups, {6}, 5)] == [[1], [3, 2]]
    assert without(groups, {0, 1, 2}) == []


def test_masks_and_penalties_go_by_the_whole_episode():
    config = AlgorithmConfig(overlong="mask")
    assert all(is_masked(one, config) for one in group_of([TURNS._replace(finish="length")]))


def test_what_an_episode_has_survives_the_log():
    group = group_of([TURNS, ONE_TURN])
    (found,) = decode_groups(encode_groups([group]))
    check_samples([found])
    for one, its in zip(found, group, strict=True):
        for name in one._fields:
            mine, theirs = getattr(one, name), getattr(its, name)
            assert np.array_equal(mine, theirs) if isinstance(theirs, np.ndarray) else mine == theirs, name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drawn": np.array([0, 1], np.int32)}, "3 log-probabilities"),
        ({"drawn": np.array([0, 2, 1], np.int32)}, "do not rise"),
        ({"drawn": np.array([1, 1, 3], np.int32)}, "do not rise"),
        ({"drawn": np.array([-1, 1, 3], np.int32)}, "do not rise"),
        ({"drawn": np.array([0, 1, 2], np.int32)}, "do not rise to the last of its 4"),
        ({"reward": 0.5}, "several rewards"),
        ({"finish": "length"}, "several ends"),
        ({"order": None}, "does not have each drawn token once"),
        ({"order": np.array([0, 1], np.int32)}, "does not have each drawn token once"),
        ({"order": np.array([0, 1, 3], np.int32)}, "does not have each drawn token once"),
    ],
)
def test_an_episode_that_does_not_add_up_is_refused(change, message):
    first, second = group_of([TURNS])
    check_samples([[first, second]])
    with pytest.raises(ValueError, match=message):
        check_samples([[first._replace(**change), second]])
