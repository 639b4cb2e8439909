"""Code of a person's own that never returns, in real runs: Ctrl+C ends each within two seconds, whatever hangs."""

import os
import signal
import time
from collections.abc import Callable
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
import re
import time
from pathlib import Path

def score(given):
    return float(given.num_tokens % 2)

def hang(*given, **more):
    Path("hangs").touch()
    time.sleep(3600)

def keeps_the_interpreter(*given, **more):
    Path("hangs").touch()
    re.match("(a+)+$", "a" * 60 + "b")

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
    code, said = interrupted(bare_desk, HANGS[what], os.kill)
    assert code == 130, said


@pytest.mark.timeout(200)
def test_so_does_that_of_a_terminal_where_code_keeps_the_interpreter_to_itself(bare_desk: Path):
    """No handler of Python's runs then, in no thread."""
    code, said = interrupted(bare_desk, "algorithm.loss=mine:keeps_the_interpreter", os.killpg)
    assert code == -signal.SIGKILL, said


def interrupted(desk: Path, setting: str, send: Callable[[int, int], None]) -> tuple[int, str]:
    """Interrupt a run while a person's own code hangs. Returns its exit code, and what it said."""
    (desk / "mine.py").write_text(MINE)
    (desk / "recipe.toml").write_text(RECIPE)
    training = polyrl("train", "recipe.toml", setting, together=True)
    until = time.monotonic() + 100
    try:
        while not (desk / "hangs").exists() and training.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        assert (desk / "hangs").exists(), training.communicate()[0] if training.poll() is not None else "no hang"
        time.sleep(0.5)
        began = time.monotonic()
        send(training.pid, signal.SIGINT)
        said, _ = training.communicate(timeout=20)
        took = time.monotonic() - began
    finally:
        if training.poll() is None:
            training.kill()
            training.wait()
    assert took < 5.0, said  # two seconds, and what a busy machine adds
    assert "go on with `polyrl train --resume" in said and "Traceback" not in said
    while processes_in(desk) and time.monotonic() < until:
        time.sleep(0.1)
    assert processes_in(desk) == []
    return training.returncode, said
