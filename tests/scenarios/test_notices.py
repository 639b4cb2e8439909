"""A notice never costs more than no notice, however long it is and however often machines go."""

from statistics import fmean

import pytest

from polyrl.sim.library import load_scenario
from polyrl.sim.result import summarize
from polyrl.sim.simulation import Simulation

SEEDS = (0, 1)
NOISE = 0.97
"""Single small runs differ by up to 3% when anything in them changes; whole ones (128 prompts a step) by 0.3%."""
SMALL = (
    "run.steps=12",
    "run.warmup_steps=1",
    "run.max_new_tokens=6144",
    "domains.0.prompts_per_step=24",
    "fleet.start_s=30",
)


def churn(every_s: float) -> str:
    """Two of four machines are taken every so often, and two others granted at once."""
    moments = [every_s * number for number in range(1, int(6000 / every_s))]
    levels = (f"{{at_s={at}, workers=2}}, {{at_s={at + 1}, workers=4}}" for at in moments)
    return f"supply.events=[{', '.join(levels)}]"


def played(every_s: float, notice_s: float, seed: int) -> Simulation:
    sim = Simulation(load_scenario("elastic-8b", [*SMALL, churn(every_s), f"supply.notice_s={notice_s}"]), seed)
    sim.run()
    assert sim.law_violations == []
    return sim


@pytest.mark.parametrize("every_s", [150.0, 450.0])
def test_a_notice_never_costs_more_than_no_notice(every_s):
    def speed(notice_s: float) -> float:
        return fmean(summarize(played(every_s, notice_s, seed), 1.0).throughput_tok_s for seed in SEEDS)

    without = speed(0.0)
    for notice_s in (10.0, 120.0, 400.0):
        assert speed(notice_s) > NOISE * without, f"{notice_s} s of notice"


def test_a_machine_that_is_taken_with_notice_loses_no_sample():
    sim = played(150.0, 30.0, 0)
    assert "lost" not in sim.scheduler.ledger.moves
    assert "lost" in played(150.0, 0.0, 0).scheduler.ledger.moves
