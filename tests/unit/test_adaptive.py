"""Factors from the lengths seen: within the bounds, larger for heavier tails, the same every time."""

import math
from statistics import NormalDist
from typing import Literal

import pytest

from polyrl.scheduling.core.parameters import RoundsConfig
from polyrl.scheduling.rules.adaptive import GRID, Correlation, choose_factors
from polyrl.scheduling.rules.lengths import LengthModel
from polyrl.scheduling.rules.order import unit

CAP = 16_384
Mode = Literal["race", "prompts", "designated", "predicted"]
NORMAL = NormalDist()


def draws(sigma: float, num: int = 4000, *, median: float = 800.0) -> list[int]:
    """Log-normal lengths."""
    zs = (NORMAL.inv_cdf(max(1e-9, unit(11, i))) for i in range(num))
    return [min(CAP, max(1, round(median * math.exp(sigma * z)))) for z in zs]


def seen(sigma: float) -> LengthModel:
    model = LengthModel()
    for num_tokens in draws(sigma):
        model.observe(num_tokens, finished=num_tokens < CAP)
    return model


def choose(
    sigma: float, *, mode: Mode = "race", max_waste: float = 0.4, max_bias: float = 0.35, correlation: float = 0.2
):
    config = RoundsConfig(tail_batching=mode, adaptive=True, max_waste=max_waste, max_bias=max_bias)
    return choose_factors(config, seen(sigma), correlation, CAP, 128)


def test_nothing_is_chosen_while_too_little_was_seen():
    config = RoundsConfig(tail_batching="race", adaptive=True)
    assert choose_factors(config, LengthModel(), 0.2, CAP, 128) is None


def test_nothing_is_chosen_from_heavy_tails_that_costs_more_than_allowed():
    for max_waste in (0.05, 0.15, 0.25, 0.4):
        for max_bias in (0.05, 0.15, 0.35):
            outlook = choose(1.2, max_waste=max_waste, max_bias=max_bias)
            assert outlook is not None
            assert outlook.waste <= max_waste
            assert outlook.bias <= max_bias


def test_without_a_budget_for_waste_nothing_is_over_provisioned():
    outlook = choose(1.0, max_waste=0.0)
    assert outlook is not None
    assert (outlook.prompts, outlook.samples, outlook.waste) == (1.0, 1.0, 0.0)


def test_the_heavier_the_tail_the_more_is_gained_and_alike_answers_gain_less_than_a_bin():
    gains = []
    for sigma in (0.0, 0.4, 0.8):
        plain, chosen = choose(sigma, max_waste=0.0), choose(sigma)
        assert plain is not None and chosen is not None
        gains.append(plain.tokens_per_round / chosen.tokens_per_round)
    assert gains == sorted(gains)
    assert gains[0] < 1.09
    assert gains[2] > 2.0


def test_a_looser_bound_never_makes_rounds_slower():
    times = [choose(1.0, max_waste=waste) for waste in (0.05, 0.1, 0.2, 0.3, 0.5)]
    tokens = [one.tokens_per_round for one in times if one is not None]
    assert len(tokens) == 5
    assert tokens == sorted(tokens, reverse=True)


def test_samples_do_not_race_where_the_mode_has_no_extra_samples():
    outlook = choose(1.2, mode="prompts")
    assert outlook is not None
    assert outlook.samples == 1.0
    assert outlook.prompts in GRID


def test_the_same_lengths_choose_the_same_factors():
    assert choose(0.9) == choose(0.9)


def test_the_correlation_within_prompts_is_found_again():
    correlation = Correlation()
    assert correlation.value() == 0.2
    for prompt in range(2000):
        common = NORMAL.inv_cdf(max(1e-9, unit(3, prompt)))
        zs = [
            math.sqrt(0.5) * common + math.sqrt(0.5) * NORMAL.inv_cdf(max(1e-9, unit(4, prompt, i))) for i in range(8)
        ]
        correlation.observe([round(5000 * math.exp(0.8 * z)) for z in zs])
    assert correlation.value() == pytest.approx(0.5, abs=0.06)


def test_single_samples_tell_nothing_of_correlation():
    correlation = Correlation()
    for _ in range(100):
        correlation.observe([5])
    assert correlation.value() == 0.2


@pytest.mark.parametrize("mode", ["designated", "predicted"])
def test_factors_are_not_chosen_for_modes_that_the_token_model_does_not_play(mode):
    with pytest.raises(ValueError, match="adaptive: factors are chosen for race and prompts only"):
        RoundsConfig(tail_batching=mode, adaptive=True)
