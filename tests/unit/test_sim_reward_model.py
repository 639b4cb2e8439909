"""Scoring takes the time that the domain says and ends as it says."""

from math import inf, isinf
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrl.scheduling.rules.lengths import interpolate
from polyrl.sim.reward_model import ModelledRewards
from polyrl.sim.scenario import RewardSection, SimDomainSection

SANDBOX = [(0.0, 0.1), (0.93, 1.05), (1.0, 25.0)]


def model(**settings) -> ModelledRewards:
    reward = RewardSection(**{"duration_quantiles": SANDBOX, **settings})
    domain = SimDomainSection(name="code", prompts_per_step=1, length_quantiles=[(0, 1), (1, 2)], reward=reward)
    return ModelledRewards([domain], seed=3)


def test_durations_and_answers_have_the_given_shares():
    natural = [model(endless_share=0.05, correct_share=0.4).natural(0, prompt, 0, 0) for prompt in range(10_000)]
    ending = [(seconds, correct) for seconds, correct in natural if not isinf(seconds)]
    assert len(ending) / len(natural) == pytest.approx(0.95, abs=0.01)
    assert fmean(correct for _, correct in ending) == pytest.approx(0.4, abs=0.02)
    assert fmean(seconds < 1.05 for seconds, _ in ending) == pytest.approx(0.93, abs=0.01)
    assert not any(correct for seconds, correct in natural if isinf(seconds))


@given(prompt=st.integers(0, 10**6), index=st.integers(0, 9), limit_s=st.floats(0.01, 60))
def test_an_attempt_never_takes_longer_than_its_limit_and_another_attempt_tells_the_same(prompt, index, limit_s):
    rewards = model(endless_share=0.2)
    natural_s, correct = rewards.natural(0, prompt, 0, index)
    ending, seconds, scored_correct = rewards.outcome(0, prompt, 0, index, 0, limit_s)
    assert seconds == min(natural_s, limit_s)
    assert (ending, scored_correct) == (("timed_out", False) if natural_s > limit_s else ("scored", correct))
    assert rewards.outcome(0, prompt, 0, index, 1, limit_s) == (ending, seconds, scored_correct)


def test_failures_of_the_sandbox_are_drawn_for_each_attempt_and_end_within_the_limit():
    rewards = model(failure_share=0.3, endless_share=0.5)
    outcomes = [rewards.outcome(0, 11, 0, 0, attempt, 30.0) for attempt in range(3000)]
    failed = [outcome for outcome in outcomes if outcome[0] == "infrastructure_failed"]
    assert len(failed) / len(outcomes) == pytest.approx(0.3, abs=0.03)
    assert all(0.0 < seconds < 30.0 and not correct for _, seconds, correct in failed)
    assert len({outcome for outcome in outcomes if outcome[0] != "infrastructure_failed"}) == 1


def test_without_a_limit_an_endless_run_does_not_end():
    assert model(endless_share=1.0).outcome(0, 1, 0, 0, 0, inf) == ("timed_out", inf, False)


@pytest.mark.parametrize(("probability", "value"), [(0.0, 1.0), (0.1, 1.0), (0.5, 2.0), (0.9, 3.0), (1.0, 3.0)])
def test_quantiles_are_linear_between_points_and_flat_outside(probability, value):
    assert interpolate([(0.1, 1.0), (0.9, 3.0)], probability) == pytest.approx(value)
