"""A scenario that plays in a tenth of a second and still has seeding, remote workers, moves and tail batching."""

import time
from pathlib import Path

from polyrl.sim.library import load_scenario
from polyrl.sim.result import Result, summarize
from polyrl.sim.simulation import Simulation

TINY = """\
extends = "elastic-8b"
name = "tiny"
about = "A run of seconds"

[run]
steps = 4
warmup_steps = 1
max_new_tokens = 1024

[engine]
step_fixed_s = 0.05

[fleet]
workers = 2
start_s = 5.0

[network]
weights_gb = 0.5

[rounds]
samples_per_prompt = 4

[seeding]
initial_s = 5.0

[[domains]]
name = "math"
prompts_per_step = 8
length_quantiles = [[0.0, 50], [0.5, 200], [1.0, 1024]]
"""


def write_tiny(folder: Path, more: str = "") -> Path:
    path = folder / "tiny.toml"
    path.write_text(TINY + more)
    return path


def play_tiny(folder: Path, *overrides: str, seed: int = 0) -> tuple[Simulation, Result]:
    scenario = load_scenario(str(write_tiny(folder)), list(overrides))
    sim = Simulation(scenario, seed)
    started = time.perf_counter()
    sim.run()
    return sim, summarize(sim, time.perf_counter() - started)
