"""Workers in two regions behind narrow links, simulated: a version crosses each link once, and is there sooner."""

from polyrl.sim.library import load_scenario
from polyrl.sim.result import Result, summarize
from polyrl.sim.simulation import Simulation

STEPS = 4
FAR = (
    f"run.steps={STEPS}",
    "run.warmup_steps=1",
    "run.max_new_tokens=2048",
    "domains.0.prompts_per_step=24",
    "fleet.workers=6",
    'fleet.regions=["eu", "us"]',
    "network.weights_gb=16",
    "network.region_gbps=40",
    "supply.events=[]",
)


def played(*more: str) -> Result:
    sim = Simulation(load_scenario("elastic-8b", [*FAR, *more]), 0)
    sim.run()
    assert sim.law_violations == []
    return summarize(sim, 1.0)


def test_a_version_crosses_the_link_of_each_region_once():
    once, each = played(), played("weight_delivery.relay=false")
    num_versions = STEPS  # the last one is asked of nobody
    assert once.gb_between_regions == 16 * 2 * num_versions
    assert each.gb_between_regions is not None and each.gb_between_regions == 16 * 6 * num_versions
    assert once.throughput_tok_s > each.throughput_tok_s
