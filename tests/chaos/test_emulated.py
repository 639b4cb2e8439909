"""Scenarios with a real manager, real worker processes and emulated engines, at a clock ten times as fast.

Nothing of emulation was fitted to a scenario: its engines are the simulator's model of an engine, and all else takes
the time that real processes and loopback take. `-s` prints the step times beside the simulated ones.
"""

import pytest

from polyrl.reproduce import measures
from polyrl.reproduce.emulation.play import SPEEDUP, emulate, scale_of
from polyrl.reproduce.emulation.scale import as_patient
from polyrl.reproduce.playing import Variant, simulate
from polyrl.sim.library import load_scenario

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

NO_PLANNER = "parallelism.enabled=false"
SCENARIOS = {
    "synchronous, no worker": Variant("colocated-8b", ("run.steps=1", "run.warmup_steps=0")),
    "tail batching, rewards, hand-back": Variant("tail-7b-8k", ("run.steps=3", NO_PLANNER)),
    "two workers": Variant(
        "elastic-8b", ("run.steps=2", "run.warmup_steps=0", "fleet.workers=2", "seeding.initial_s=130")
    ),
    "six workers, three of them killed": Variant(
        "three-of-six", ("run.steps=1", "run.warmup_steps=0", "faults.kill_step=0", "seeding.initial_s=60")
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_emulated_and_simulated_step_times_agree_within_a_tenth(name, capsys):
    case = SCENARIOS[name]
    scale = scale_of(load_scenario(case.scenario, list(case.overrides)), SPEEDUP)
    emulated = emulate(case, 0)
    simulated = simulate(Variant(case.scenario, (*case.overrides, *as_patient(scale))), 0)
    seconds = [(one.step_s, other.step_s) for one, other in zip(emulated.steps, simulated.steps, strict=True)]
    ratio = measures.step_s(emulated.steps) / measures.step_s(simulated.steps)
    with capsys.disabled():
        print(f"\n{name}: {', '.join(f'{ours:.0f} s ({wanted:.0f})' for ours, wanted in seconds)}: {ratio:.3f}")
    assert ratio == pytest.approx(1.0, abs=0.1)
