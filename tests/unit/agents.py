"""A scenario with an environment that plays in about a second, and one in which everything goes wrong."""

from pathlib import Path

from polyrl.sim.library import load_scenario
from polyrl.sim.result import Result, summarize
from polyrl.sim.simulation import Simulation

AGENTS = """\
extends = "agent-tools-8b"
name = "agents"
about = "Episodes of seconds"

[run]
steps = 3
warmup_steps = 1
max_new_tokens = 1500

[fleet]
workers = 2
start_s = 5.0

[network]
weights_gb = 0.5

[rounds]
samples_per_prompt = 4

[hosts]
processes = 2
slots = 16
price_usd_per_hour = 1.0
restart_s = 10.0

[domains.tools]
prompts_per_step = 8
length_quantiles = [[0.0, 100], [0.5, 400], [1.0, 1500]]
"""

TROUBLE = (
    "rounds.tail_batching=race",
    "faults.deaths_per_hour=40.0",
    "faults.restart_s=15.0",
    "faults.late_s=0.3",
    "faults.repeat_share=0.05",
    "hosts.mean_life_s=60.0",
    "environments.turn_timeout_s=15.0",
    "environments.max_attempts=2",
    "domains.tools.environment.failure_share=0.1",
    "domains.tools.environment.replay_share=0.8",
    "domains.tools.reward.endless_share=0.05",
)
"""Workers and hosts that die, environments that fail, hang and do not repeat themselves."""


def write_agents(folder: Path) -> Path:
    path = folder / "agents.toml"
    path.write_text(AGENTS)
    return path


def play_agents(folder: Path, *overrides: str, seed: int = 0) -> tuple[Simulation, Result]:
    sim = Simulation(load_scenario(str(write_agents(folder)), list(overrides)), seed)
    sim.run()
    return sim, summarize(sim, 1.0)
