"""Learned time limits in live runs: they are learned from correct answers, and a run that goes on still knows them."""

from pathlib import Path
from typing import cast

from tests.integration.desks import bare_desk, model, polyrl

from polyrl.telemetry.metrics import read_metrics

__all__ = ["bare_desk", "model"]  # fixtures
RECIPE = """
name = "tiny"
model.path = "model"
train.steps = 3
rollout.max_new_tokens = 8
data = { source = "rows.jsonl", prompts_per_step = 2, num_prompts = 2, reward = "mine:burns" }
validation.at_start = false
rounds = { samples_per_prompt = 4, tail_batching = "off" }
manager.port = 0
seeding = { initial_s = 0.2, max_step_s = 1.0 }
checkpoint.every_steps = 1
rewards = { adaptive = true, t_min_s = 3.0, t_max_s = 20.0 }
"""
MINE = """
from polyrl import Reward

def burns(given):
    assert given.limit_s in (3.0, 20.0), given.limit_s
    return Reward(given.num_tokens % 2, cpu_s=0.25, correct=True)
"""


def run_to(steps: int, *words: str) -> list[float]:
    """Train up to this step, and return the mean limit of each step's answers."""
    process = polyrl("train", *words)
    said, errors = process.communicate(timeout=200)
    assert process.returncode == 0, said + errors
    told = read_metrics(Path("runs/tiny/metrics.jsonl"))
    assert len(told) == steps
    return [cast("float", line["reward/limit_s/mean"]) for line in told]


def test_limits_are_learned_from_correct_answers_and_outlive_a_restart(bare_desk: Path):
    (bare_desk / "mine.py").write_text(MINE)
    Path("recipe.toml").write_text(RECIPE)
    limits = run_to(3, "recipe.toml")
    assert limits[0] > 3.0  # answers that came before the first of their row was scored had all of the time
    assert limits[-1] < 10.0  # 3 s, and 20 s for one answer in fifty
    resumed = run_to(4, "--resume", "runs/tiny", "train.steps=4")
    assert resumed[-1] < 10.0  # the first step of the new processes
