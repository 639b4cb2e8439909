"""Every scenario that ships with the package plays, keeps the laws, and gives the same run wherever it is played."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import polyrl
from polyrl.sim.library import list_scenarios, load_scenario
from polyrl.sim.result import summarize, to_json
from polyrl.sim.simulation import Simulation

PROMISED = {
    "agent-tools-8b",
    "all-together",
    "colocated-8b",
    "elastic-14b",
    "elastic-8b",
    "ramp",
    "spot-trace",
    "synchronous-14b-16k",
    "synchronous-7b-8k",
    "tail-14b-16k",
    "tail-7b-8k",
    "three-of-six",
    "zero-workers",
}
SOURCE = str(Path(polyrl.__file__).parents[1])
DIGEST = (
    f"import sys; sys.path.insert(0, {SOURCE!r})\n"
    "from polyrl.sim.library import load_scenario\n"
    "from polyrl.sim.simulation import Simulation\n"
    "scenario = load_scenario('elastic-8b', ['run.steps=2', 'rounds.tail_batching=race'])\n"
    "sim = Simulation(scenario, 5); sim.run(); print(sim.digest.hex())\n"
)


def played(name, *overrides, seed=0):
    scenario = load_scenario(name, list(overrides))
    sim = Simulation(scenario, seed)
    sim.run()
    return sim


def test_the_promised_scenarios_ship_and_say_what_they_are_about():
    found = dict(list_scenarios())
    assert set(found) >= PROMISED
    assert all(found.values())


@pytest.mark.parametrize("name", sorted(PROMISED))
def test_a_shipped_scenario_plays_and_keeps_the_laws(name):
    sim = played(name, "run.steps=2", "faults.kill_step=1")
    assert sim.law_violations == []
    assert sim.scenario.name == name
    result = json.loads(to_json(summarize(sim, 1.0)))
    assert result["steps"] == 2
    assert result["throughput_tok_s"] > 0
    assert result["tokens"]["generated"] >= result["tokens"]["trained"] > 0
    assert result["cost"]["usd"] > 0


@pytest.mark.parametrize("workers", [0, 1])
def test_elastic_8b_takes_any_number_of_workers(workers):
    sim = played("elastic-8b", f"fleet.workers={workers}", "run.steps=1")
    assert sim.law_violations == []
    assert summarize(sim, 1.0).workers.joins == workers


def test_the_same_scenario_and_seed_give_the_same_journal_in_every_process():
    def digest(hash_seed):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", DIGEST]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=True)
        return ended.stdout.strip()

    here = played("elastic-8b", "run.steps=2", "rounds.tail_batching=race", seed=5).digest.hex()
    again = played("elastic-8b", "run.steps=2", "rounds.tail_batching=race", seed=5).digest.hex()
    assert here == again == digest("1") == digest("4242")
