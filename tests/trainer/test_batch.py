"""What an algorithm does with ends and rewards, and how samples become packs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrl.config.recipe import AlgorithmConfig
from polyrl.trainer.batch import TrainSample, is_masked, is_zero_variance, overlong_penalty, shaped_reward
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
