"""Agents with slow tools: engines stay busy while hundreds of episodes wait for theirs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import polyrl
from polyrl.sim.library import load_scenario
from polyrl.sim.result import summarize
from polyrl.sim.simulation import Simulation


def test_engines_stay_over_nine_tenths_busy_while_five_hundred_episodes_use_tools_of_one_to_twenty_seconds():
    scenario = load_scenario("agent-tools-8b", ["hosts.processes=32", "run.steps=6", "run.warmup_steps=1"])
    tools = scenario.domains[0].environment
    assert tools is not None
    assert (tools.tool_quantiles[0][1], tools.tool_quantiles[-1][1]) == (1.0, 20.0)
    sim = Simulation(scenario)
    sim.run()
    result, times = summarize(sim, 1.0), sim.episode_times
    assert result.episodes is not None and times is not None
    assert sim.law_violations == []
    assert result.episodes.most_hosted >= 500
    assert result.episodes.waiting_for_host == 0.0
    settled = times.within(1, 4)  # the last step has no round after it to fill the gaps
    assert settled.busy_s > 0.9 * settled.engine_s
    assert settled.playing_s > 0.25 * settled.generating_s, "a good part of the episodes is with tools"
    assert result.episodes.prefix_reuse is not None
    assert result.episodes.prefix_reuse > 0.5


SMALL = ["run.steps=1", "domains.tools.prompts_per_step=4", "hosts.mean_life_s=60.0"]
DIGEST = (
    f"import sys; sys.path.insert(0, {str(Path(polyrl.__file__).parents[1])!r})\n"
    "from polyrl.sim.library import load_scenario\n"
    "from polyrl.sim.simulation import Simulation\n"
    f"sim = Simulation(load_scenario('agent-tools-8b', {SMALL!r}), 5); sim.run(); print(sim.digest.hex())\n"
)


@pytest.mark.parametrize("hash_seed", ["1", "4242"])
def test_episodes_give_the_same_journal_in_every_process(hash_seed):
    sim = Simulation(load_scenario("agent-tools-8b", SMALL), 5)
    sim.run()
    ended = subprocess.run(
        [sys.executable, "-c", DIGEST],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert ended.stdout.strip() == sim.digest.hex()
