"""The guard of tail batching leaves a mode that trains answers that are too short; every prompt is still trained. A
step's line tells adaptive factors."""

from itertools import pairwise
from statistics import fmean

import pytest

from polyrl.scheduling.core.ledger import StepLine
from polyrl.sim.library import load_scenario
from polyrl.sim.simulation import Simulation
from polyrl.telemetry.metrics import factors_changed, from_step_line


def played(scenario: str, max_bias: float, num_steps: int = 20) -> Simulation:
    overrides = (f"run.steps={num_steps}", "parallelism.enabled=false", "rounds.bias_guard=true")
    sim = Simulation(load_scenario(scenario, [*overrides, f"rounds.max_bias={max_bias}"]), 0)
    sim.run()
    assert sim.law_violations == []
    return sim


def trained_mean(lines: list[StepLine]) -> float:
    return sum(one.tokens_trained for one in lines) / sum(one.num_samples for one in lines)


def test_a_race_that_trains_short_answers_is_left_for_prompts():
    lines = played("tail-14b-16k", 0.25).lines
    left = [(one.step, one.mode_left) for one in lines if one.mode_left]
    assert [step for step, _ in left] == [4] and "from race to prompts" in left[0][1]
    assert trained_mean(lines[:5]) < 0.9 * trained_mean(lines[5:])
    assert "long" in [one.kind for one in lines[5:]]


def test_with_a_low_bound_every_answer_is_trained_in_the_end():
    sim = played("tail-7b-8k", 0.05)
    lines = sim.lines
    assert [one.mode_left.split(":")[1].split(" to ")[1] for one in lines if one.mode_left] == ["prompts", "off"]
    last = [one for one in lines if one.step > max(line.step for line in lines if line.mode_left) + 2]
    assert not any(one.tokens_discarded for one in last)
    assert trained_mean(last) == pytest.approx(sim.natural_tokens / sim.num_natural, rel=0.08)


def test_a_bound_that_is_kept_changes_nothing():
    assert not any(one.mode_left for one in played("tail-7b-8k", 0.35, 10).lines)


def test_the_expected_mean_shows_a_bias_that_ended_answers_hide():
    sim = played("tail-7b-8k", 1.0, 10)
    natural, last = sim.natural_tokens / sim.num_natural, sim.lines[4:]
    assert 1.0 < fmean(one.expected_mean for one in last) / natural < 1.15
    assert fmean(one.generated_mean for one in last if one.kind == "short") < 0.6 * natural


def test_adaptive_factors_are_told_with_every_step_and_a_change_of_them_in_words():
    overrides = ("run.steps=8", "parallelism.enabled=false", "rounds.adaptive=true")
    sim = Simulation(load_scenario("tail-14b-16k", list(overrides)), 0)
    sim.run()
    shown = [from_step_line(line) for line in sim.lines]
    factors = [(one["rounds/prompt_factor"], one["rounds/sample_factor"]) for one in shown]
    assert factors[0] == (1.25, 1.25)
    changes = [factors_changed(line, before) for before, line in pairwise(sim.lines)]
    assert [bool(one) for one in changes] == [before != now for before, now in pairwise(factors)]
    [first, *_] = filter(None, changes)
    assert first.startswith("rounds.") and "from 1.25 to" in first and "within rounds.max_waste" in first
    plain = from_step_line(played("tail-7b-8k", 0.35, 1).lines[0])
    assert "rounds/prompt_factor" not in plain
