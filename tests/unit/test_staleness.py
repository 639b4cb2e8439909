"""Which version may write for which step: the two rules are two views of one. What overlapping rounds gain."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrl.ids import Step, Version
from polyrl.scheduling.rules.staleness import newest_step, oldest_version
from polyrl.sim.library import load_scenario
from polyrl.sim.result import measure_steps
from polyrl.sim.simulation import Simulation


def test_strictly_on_policy_a_step_is_written_by_its_own_version():
    assert oldest_version(Step(5), 0) == 5
    assert newest_step(Version(5), 0) == 5


def test_with_staleness_two_a_step_may_hold_tokens_two_versions_old():
    assert oldest_version(Step(5), 2) == 3
    assert newest_step(Version(3), 2) == 5


def test_the_first_steps_are_written_by_the_first_version():
    assert oldest_version(Step(1), 3) == 0


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 5))
def test_a_round_may_open_exactly_when_the_published_version_may_write_for_it(step, published, staleness):
    may_open = step <= newest_step(Version(published), staleness)
    assert may_open == (published >= oldest_version(Step(step), staleness))


@pytest.mark.parametrize("tail_batching", ["off", "race"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_overlapping_rounds_save_time_and_throw_nothing_away_for_age(tail_batching: str, num_workers: int):
    seconds: list[float] = []
    for max_staleness in (0, 1, 2):
        scenario = load_scenario(
            "elastic-8b",
            [
                f"run.max_staleness={max_staleness}", f"fleet.workers={num_workers}", "run.steps=10",
                "domains.0.prompts_per_step=16", "trainer.local_workers=1", f"rounds.tail_batching={tail_batching}",
            ],
        )  # fmt: skip
        sim = Simulation(scenario, 1)
        sim.run()
        seconds.append(sum(step.step_s for step in measure_steps(sim)))
        lost = {"race": {"speculation", "deferral"}, "off": set[str]()}[tail_batching]
        assert sim.law_violations == [] and len(sim.lines) == 10
        assert set(sim.scheduler.ledger.samples_discarded) == lost
    assert seconds[0] > max(seconds[1:])
