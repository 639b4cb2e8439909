"""The data order is a permutation that needs no memory; random numbers are functions of integers."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrl.scheduling.rules.order import mix64, position_to_prompt, unit

integers = st.integers(min_value=-(2**63), max_value=2**64 - 1)


def epoch_order(num_prompts: int, seed: int = 0, epoch: int = 0) -> list[int]:
    return [position_to_prompt(p, num_prompts=num_prompts, seed=seed, epoch=epoch) for p in range(num_prompts)]


@given(num_prompts=st.integers(1, 400), seed=integers, epoch=st.integers(0, 1000))
def test_every_prompt_comes_exactly_once_an_epoch(num_prompts, seed, epoch):
    assert sorted(epoch_order(num_prompts, seed, epoch)) == list(range(num_prompts))


@given(num_prompts=st.integers(1, 2**40), share=st.floats(0, 1, exclude_max=True))
def test_any_position_of_a_huge_data_set_is_answered_alone(num_prompts, share):
    position = min(num_prompts - 1, int(share * num_prompts))
    assert 0 <= position_to_prompt(position, num_prompts=num_prompts, seed=7, epoch=3) < num_prompts


def test_epochs_and_seeds_have_different_orders():
    orders = [tuple(epoch_order(100, seed, epoch)) for seed in range(10) for epoch in range(10)]
    assert len(dict.fromkeys(orders)) == 100


def test_an_order_keeps_almost_nothing_in_place():
    order = epoch_order(10_000, seed=1)
    num_fixed = sum(position == prompt for position, prompt in enumerate(order))
    num_neighbours = sum(abs(a - b) == 1 for a, b in pairwise(order))
    assert num_fixed <= 8  # a random permutation has 1, and 2 neighbours
    assert num_neighbours <= 10


def test_the_first_half_of_an_epoch_is_a_fair_half_of_the_data():
    first = epoch_order(10_000, seed=2)[:5_000]
    assert abs(sum(prompt < 5_000 for prompt in first) - 2_500) < 150  # six standard deviations of 25
    assert abs(sum(prompt % 2 for prompt in first) - 2_500) < 150


@pytest.mark.parametrize("num_prompts", [2, 3, 5, 16])
def test_each_prompt_of_a_tiny_data_set_comes_first_for_its_share_of_seeds(num_prompts):
    num_seeds = 4_000
    first = Counter(epoch_order(num_prompts, seed)[0] for seed in range(num_seeds))
    for prompt in range(num_prompts):
        assert abs(first[prompt] / num_seeds - 1 / num_prompts) < 0.03


@pytest.mark.parametrize("position", [-1, 10])
def test_a_position_outside_the_epoch_is_refused(position):
    with pytest.raises(ValueError, match="10 prompts"):
        position_to_prompt(position, num_prompts=10, seed=0, epoch=0)


def test_orders_and_hashes_never_change_between_releases():
    assert epoch_order(10, seed=42) == GOLDEN_SMALL_ORDER
    assert epoch_order(100, seed=42)[:10] == GOLDEN_ORDER_START
    assert (mix64(), mix64(0), mix64(0, 0), mix64(1, 2, 3), mix64(-1)) == GOLDEN_HASHES


GOLDEN_SMALL_ORDER = [3, 8, 7, 4, 2, 5, 6, 1, 0, 9]
GOLDEN_ORDER_START = [16, 28, 5, 57, 29, 58, 42, 34, 94, 92]
GOLDEN_HASHES = (0, 16294208416658607535, 12035550249420947055, 16914669369030367833, 15999695513772384452)


@given(a=integers, b=integers)
def test_the_hash_fits_64_bits_and_the_order_of_its_arguments_counts(a, b):
    assert 0 <= mix64(a, b) < 2**64
    if (a - b) % 2**64:
        assert mix64(a, b) != mix64(b, a)


@given(numbers=st.lists(integers, max_size=5))
def test_a_unit_is_at_least_zero_and_below_one(numbers):
    assert 0.0 <= unit(*numbers) < 1.0


def test_units_of_consecutive_integers_are_spread_evenly():
    tenths = Counter(int(unit(5, i) * 10) for i in range(20_000))
    assert all(abs(tenths[t] - 2_000) < 220 for t in range(10))  # five standard deviations of 42
