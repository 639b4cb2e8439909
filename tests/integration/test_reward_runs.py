"""Rewards in live runs: several with weights, those that block, what a person sees of them; and `polyrl samples`."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from tests.integration.desks import bare_desk, model, polyrl

from polyrl.cli.main import main
from polyrl.telemetry.metrics import read_metrics

__all__ = ["bare_desk", "model"]  # fixtures
RECIPE = """
name = "tiny"
model.path = "model"
train.steps = 2
rollout.max_new_tokens = 16
data = { source = "rows.jsonl", prompts_per_step = 3, PROMPTS }
validation.at_start = false
rounds.samples_per_prompt = 4
manager.port = 0
seeding = { initial_s = 0.2, max_step_s = 1.0 }
checkpoint.every_steps = 1
"""
SEVERAL = """
[[rewards.functions]]
name = "length"
function = "mine:length"

[[rewards.functions]]
name = "style"
function = "mine:style"
weight = 0.5
args = { bonus = 2.0 }

[[rewards.functions]]
function = "mine:told_only"
weight = 0
"""
MINE = """
import asyncio, time

def length(given):
    return given.num_tokens % 3

def style(given, bonus):
    return {"bonus": bonus, "stops": given.finish == "stop"}

async def told_only(given):
    await asyncio.sleep(0.01)
    return 7.0

async def blocks(given):
    time.sleep(3600)

def raises(given):
    print("hello from", given.num_tokens)
    raise KeyError("nothing")
"""


@pytest.fixture
def desk(bare_desk: Path) -> Path:
    (bare_desk / "mine.py").write_text(MINE)
    return bare_desk


def start(reward: str = "", *settings: str) -> "subprocess.Popen[str]":
    """One reward, or several."""
    prompts = f'reward = "{reward}"' if reward else 'prompt_key = "prompt"'
    Path("recipe.toml").write_text(RECIPE.replace("PROMPTS", prompts) + ("" if reward else SEVERAL))
    return polyrl("train", "recipe.toml", *settings)


def samples(capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, Any]]:
    assert main(["samples", "runs/tiny", "--json", *options]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_several_rewards_are_weighted_and_each_is_told_and_stays_with_its_sample(
    desk: Path, capsys: pytest.CaptureFixture[str]
):
    process = start()
    _, errors = process.communicate(timeout=150)
    assert process.returncode == 0, errors
    told = read_metrics(desk / "runs/tiny/metrics.jsonl")
    assert [line["reward/told_only/mean"] for line in told] == [7.0, 7.0]
    assert all(line["reward/style/bonus/mean"] == 2.0 and "reward/length/mean" in line for line in told)
    found = [*samples(capsys, "--step", "0"), *samples(capsys, "--step", "1")]
    assert len(found) >= 2 * 3 * 4
    for one in found:
        parts = one["parts"]
        assert parts["length"] == one["num_tokens"] % 3 and parts["style"] == 2.0 + (one["finish"] == "stop")
        assert one["reward"] == pytest.approx(parts["length"] + 0.5 * parts["style"])
        assert one["written_by"][0] == {
            "version": one["step"], "worker": "trainer", "engine": "builtin", "num_tokens": one["num_tokens"]
        }  # fmt: skip
        assert one["prompt"] and len(one["answer"]) > 0
    for step in (0, 1):
        rewards = [one["reward"] for one in found if one["step"] == step]
        assert sum(rewards) / len(rewards) == pytest.approx(told[step]["reward/mean"])
    worst = samples(capsys, "--step", "0", "--worst")
    assert [one["reward"] for one in worst] == sorted(one["reward"] for one in worst)
    assert [one["reward"] for one in samples(capsys, "--step", "0", "--best", "--limit", "2")] == [
        one["reward"] for one in worst[::-1][:2]
    ]
    text = found[0]["answer"][:3]
    assert all(text in one["answer"] or text in one["prompt"] for one in samples(capsys, "--grep", text))
    assert main(["samples", "runs/tiny", "--step", "0"]) == 0
    shown = capsys.readouterr().out
    assert "(length " in shown and "version 0 on trainer" in shown and max(map(len, shown.splitlines())) <= 80
    assert main(["samples", "runs/tiny", "--step", "9"]) == 2
    assert "step 9 is not kept; expected one from 0 to 1" in capsys.readouterr().err


def doctor(capsys: pytest.CaptureFixture[str]) -> str:
    """What it says once a reward has run for a moment."""
    until = time.monotonic() + 100
    while time.monotonic() < until:
        if Path("runs/tiny/manager.json").exists() and main(["doctor", "runs/tiny"]) == 0:
            said = capsys.readouterr().out
            if "has run longest" in said:
                return said
        capsys.readouterr()
        time.sleep(0.2)
    raise AssertionError("it never spoke of rewards")


def end(process: "subprocess.Popen[str]") -> tuple[float, str, str]:
    """With one Ctrl+C. Returns how long that took."""
    began = time.monotonic()
    os.kill(process.pid, signal.SIGINT)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    return time.monotonic() - began, said, errors


def test_an_async_reward_that_blocks_holds_up_neither_ctrl_c_nor_the_doctor_nor_the_log(
    desk: Path, capsys: pytest.CaptureFixture[str]
):
    process = start("mine:blocks", "rewards.timeout_s=600")
    try:
        said = doctor(capsys)
        assert "mine:blocks has run longest, for" in said and "longer than rewards.timeout_s = 600 is ended" in said
        assert main(["status", "--run-dir", "runs/tiny"]) == 0
        assert "waits for reward (mine:blocks, " in capsys.readouterr().out
        unscored = samples(capsys)
        assert unscored and all(one["state"] == "open" and one["reward"] is None for one in unscored)
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("waits: "):
                assert "mine:blocks has run longest" in line
                break
        else:
            raise AssertionError("the log was silent")
        took_s, said, _ = end(process)
    finally:
        process.kill()
    assert "stopped; " in said
    assert took_s < 20, "it waits for nobody; seconds are for a busy machine"


def test_an_async_reward_that_blocks_is_given_up_when_its_time_is_over(desk: Path):
    process = start("mine:blocks", "rewards.timeout_s=0.2", "rewards.processes=2")
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 2
    assert "the reward mine:blocks failed for all of" in errors and "took longer than 0.2 s" in errors


def test_a_reward_that_raises_is_shown_with_file_line_and_log_and_counted_by_the_doctor(desk: Path):
    process = start("mine:raises")
    _, errors = process.communicate(timeout=150)
    assert process.returncode == 2
    assert "KeyError: 'nothing' (mine.py:19, in raises); runs/tiny/logs/rewards.log has what it printed" in errors
    assert "hello from" in (desk / "runs/tiny/logs/rewards.log").read_text()
