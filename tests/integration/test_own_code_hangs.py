"""Code of a person's own that never returns, in real runs: Ctrl+C ends each within two seconds, whatever hangs."""

import os
import signal
import time
from pathlib import Path

import pytest
from tests.integration.desks import bare_desk, model, polyrl, processes_in

__all__ = ["bare_desk", "model"]  # fixtures
RECIPE = """
name = "tiny"
model.path = "model"
train.steps = 50
rollout.max_new_tokens = 16
data = { source = "rows.jsonl", prompts_per_step = 3, reward = "mine:score" }
validation.at_start = false
rounds.samples_per_prompt = 4
manager.port = 0
seeding = { initial_s = 0.2, max_step_s = 1.0 }
"""
MINE = """
import time
from pathlib import Path

def score(given):
    return float(given.num_tokens % 2)

def hang(*given, **more):
    Path("hangs").touch()
    time.sleep(3600)

class Tracker:
    def __init__(self, run_dir, first_step):
        pass
    log = close = hang

class SlowTracker(Tracker):
    __init__ = hang
"""
HANGS = {
    "a loss": "algorithm.loss=mine:hang",
    "an advantage": "algorithm.advantage=mine:hang",
    "a tracker": 'track.trackers=[{tracker="mine:Tracker"}]',
    "a tracker that never begins": 'track.trackers=[{tracker="mine:SlowTracker"}]',
}
TWINS = ("an advantage", "a tracker")
"""Those that hang at the place of another one."""


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "what", [pytest.param(one, marks=[pytest.mark.chaos] if one in TWINS else []) for one in HANGS]
)
def test_ctrl_c_ends_a_run_within_two_seconds(bare_desk: Path, what: str):
    (bare_desk / "mine.py").write_text(MINE)
    (bare_desk / "recipe.toml").write_text(RECIPE)
    training = polyrl("train", "recipe.toml", HANGS[what], together=True)
    until = time.monotonic() + 100
    try:
        while not (bare_desk / "hangs").exists() and training.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        assert (bare_desk / "hangs").exists(), training.communicate()[0] if training.poll() is not None else "no hang"
        time.sleep(0.5)
        began = time.monotonic()
        os.kill(training.pid, signal.SIGINT)
        said, _ = training.communicate(timeout=20)
        took = time.monotonic() - began
    finally:
        if training.poll() is None:
            training.kill()
            training.wait()
    assert training.returncode == 130, said
    assert took < 5.0, said  # two seconds, and what a busy machine adds
    assert "go on with `polyrl train --resume" in said and "Traceback" not in said
    while processes_in(bare_desk) and time.monotonic() < until:
        time.sleep(0.1)
    assert processes_in(bare_desk) == []
