"""The autoscaler on the spot markets that ship: more tokens a dollar than a fixed fleet, and than all that there is."""

import pytest

from polyrl.sim.library import load_scenario
from polyrl.sim.simulation import Simulation

STEPS = 30
NOT_SCALED = ("fleet.held_by_advice=false", "scaling.enabled=false")


def tokens_per_usd(name: str, *overrides: str) -> float:
    sim = Simulation(load_scenario(name, [f"run.steps={STEPS}", *overrides]))
    sim.run()
    assert sim.law_violations == []
    return sim.tokens_at_step[-1] / sim.lines[-1].usd


@pytest.mark.chaos
@pytest.mark.parametrize("market", ["spot-calm", "spot-busy", "spot-scarce"])
def test_the_autoscaler_beats_the_fixed_fleet_it_starts_with_and_a_greedy_one(market: str):
    scaled = tokens_per_usd(market)
    assert scaled > tokens_per_usd(market, *NOT_SCALED, "fleet.hold_at_most=4"), "fleet.workers of the scenario, always"
    assert scaled > tokens_per_usd(market, *NOT_SCALED, "fleet.hold_at_most=99"), "all that is offered"


def test_a_budget_an_hour_holds_at_every_step():
    sim = Simulation(load_scenario("spot-calm", ["run.steps=10", "scaling.max_usd_per_hour=12"]))
    sim.run()
    hourly = [
        (later.usd - earlier.usd) / (later.trained_at - earlier.trained_at) * 3600.0 - 83.79
        for earlier, later in zip(sim.lines[3:], sim.lines[4:], strict=False)
    ]
    assert max(hourly) <= 12.0 + 1e-6
