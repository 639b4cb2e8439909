"""A scenario at a scaled clock: rules, engines and what is measured are the scenario's, divided and multiplied back."""

import pytest

from polyrl.errors import UserError
from polyrl.reproduce.emulation.scale import (
    LEAST_HEARTBEAT_TIMEOUT_S,
    Scale,
    as_patient,
    check_that_it_can_be_emulated,
    engine_config,
    scaled_config,
)
from polyrl.sim.library import load_scenario

SCALE = Scale(10.0, 14)


def test_what_a_rule_waits_for_takes_a_tenth_and_dollars_are_the_scenarios():
    scenario = load_scenario("elastic-8b")
    config = scaled_config(scenario, 0, SCALE)
    assert config.seeding.initial_s == scenario.seeding.initial_s / 10
    assert config.seeding.gain == scenario.seeding.gain
    assert config.routing.balance_interval_s == scenario.routing.balance_interval_s / 10
    assert config.trainer_usd_per_hour == pytest.approx(10 * 83.79)
    assert config.max_new_tokens == 1024


def test_a_peer_that_may_be_dead_is_waited_for_as_a_busy_machine_needs_and_a_simulation_can_do_the_same():
    scenario = load_scenario("three-of-six")
    rules = scaled_config(scenario, 0, SCALE).fleet_rules
    assert rules.heartbeat_timeout_s == LEAST_HEARTBEAT_TIMEOUT_S
    assert rules.pull_timeout_s == scenario.fleet_rules.pull_timeout_s
    patient = load_scenario("three-of-six", list(as_patient(SCALE))).fleet_rules
    assert patient.heartbeat_timeout_s / SCALE.speedup == rules.heartbeat_timeout_s


@pytest.mark.parametrize("local", [True, False])
def test_a_full_batch_takes_as_long_for_its_answers_as_the_scenarios_engine(local):
    engine = load_scenario("elastic-8b").engine
    config = engine_config(load_scenario("elastic-8b"), SCALE, local=local)
    batch, context = 200, 200 * 3000
    whole_s = engine.step_fixed_s + batch * engine.step_sample_s + context * engine.step_context_s
    alone_s = 1.0 / config.tokens_per_s
    scaled_s = alone_s + (batch - 1) * config.step_per_sample_s + context / 14 * config.step_per_context_token_s
    assert scaled_s == pytest.approx(14 * whole_s)
    assert config.speedup == 10.0


@pytest.mark.parametrize(
    ("name", "overrides", "why"),
    [
        ("tail-7b-8k", [], "parallelism.enabled"),
        ("agent-tools-8b", [], "environments"),
        ("spot-calm", [], "fleet.held_by_advice"),
        ("elastic-8b", ["faults.partitions_per_hour=1"], "faults.partitions_per_hour"),
    ],
)
def test_what_cannot_be_emulated_is_refused_with_its_key(name, overrides, why):
    with pytest.raises(UserError, match=f"{name} cannot be emulated: {why}"):
        check_that_it_can_be_emulated(load_scenario(name, overrides))
