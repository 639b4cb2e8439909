"""A notice never costs more than no notice, however long it is and however often machines go."""

from statistics import fmean, stdev

import pytest

from polyrl.sim.library import load_scenario
from polyrl.sim.result import summarize
from polyrl.sim.simulation import Simulation

SEEDS = range(8)
NOISE = 0.985
"""Small runs of one seed differ by 1.7% (standard deviation) whenever anything in them changes, in either direction:
with 10 s of notice, eight seeds trained 0.97 to 1.03 of the tokens a second without, 1.000 in the mean. The bound is
three standard errors of that mean. Draining at the notice lost 7 to 10%."""
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


def speed(every_s: float, notice_s: float, seed: int) -> float:
    return summarize(played(every_s, notice_s, seed), 1.0).throughput_tok_s


def test_a_notice_costs_no_more_than_no_notice():
    ratio = fmean(speed(150.0, 10.0, seed) / speed(150.0, 0.0, seed) for seed in SEEDS)
    assert ratio > NOISE


@pytest.mark.long
@pytest.mark.parametrize("every_s", [100.0, 150.0, 300.0, 450.0])
def test_no_notice_of_a_grid_costs_more_than_none(every_s):
    """The rows of docs/results/notices.md; `-s` prints them."""
    without = [speed(every_s, 0.0, seed) for seed in range(12)]
    for notice_s in (2.0, 5.0, 10.0, 30.0, 120.0):
        ratios = [speed(every_s, notice_s, seed) / alone for seed, alone in enumerate(without)]
        mean, error = fmean(ratios), stdev(ratios) / len(ratios) ** 0.5
        print(f"every {every_s:.0f} s, notice {notice_s:.0f} s: {mean:.4f} +- {error:.4f}, least {min(ratios):.3f}")
        assert mean > NOISE


@pytest.mark.parametrize("every_s", [150.0, 450.0])
def test_a_longer_notice_than_is_needed_changes_nothing(every_s):
    """But the moment at which it is told: the trainer's devices are looked at with every event."""
    enough = speed(every_s, 10.0, 0)
    assert speed(every_s, 120.0, 0) == pytest.approx(enough, rel=0.002)
    assert speed(every_s, 400.0, 0) == pytest.approx(enough, rel=0.002)


def test_a_machine_that_is_taken_with_notice_loses_no_sample():
    sim = played(150.0, 30.0, 0)
    assert "lost" not in sim.scheduler.ledger.moves
    assert "lost" in played(150.0, 0.0, 0).scheduler.ledger.moves
