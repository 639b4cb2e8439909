"""A run whose rewards are computed by reward workers alone, which are killed, drained and joined by others.

Real processes: `polyrl train` with `rewards.processes = 0`, its manager, and `polyrl worker --rewards`. Rewards and
weights are those of the same run with reward processes of its own, to the last bit; of answers, and of episodes.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests
import torch
from tests.chaos.training_runs import end_of, polyrl, rewards, wait_for
from tests.integration.desks import bare_desk, model
from tests.processes import children

from polyrl.starters import agents
from polyrl.telemetry.metrics import read_metrics
from polyrl.wire.credentials import bearer, read_token_file

__all__ = ["bare_desk", "model"]  # fixtures
NUM_STEPS, PROMPTS, SAMPLES = 12, 3, 4
RECIPE = f"""
name = "graded"
model.path = "model"
train = {{ steps = {NUM_STEPS}, mode = "synchronous" }}
rollout.max_new_tokens = 16
data = {{ source = "rows.jsonl", prompts_per_step = {PROMPTS}, reward = "mine:graded" }}
validation.at_start = false
rounds.samples_per_prompt = {SAMPLES}
manager.port = 0
checkpoint.every_steps = 4
"""
MINE = """
import os, pathlib, time

def graded(given):
    busy = pathlib.Path(f"busy-{os.getppid()}")
    busy.touch()
    time.sleep(0.2)
    busy.unlink(missing_ok=True)
    return {"length": given.num_tokens % 3, "stops": given.finish == "stop", "row": given.row["number"] % 2}
"""
EPISODES = """
name = "played"
model = { path = "model", device = "cpu" }
train = { steps = 6, mode = "synchronous", min_micro_batch_samples = 8 }
algorithm.zero_variance = "keep"
rollout.max_new_tokens = 24
rounds.samples_per_prompt = 4
validation.at_start = false
environments.slots = 16
manager.port = 0

[data]
environment = "calculator"
environment_args = { style = "letters" }
num_prompts = 50
prompts_per_step = 2

[[rewards.functions]]
function = "played:thrift"
weight = 0.25

[[rewards.functions]]
function = "played:rank"
weight = 0.1
whole_group = true
"""
PLAYED = """
import os, pathlib, time

def thrift(given):
    played = given.episode
    busy = pathlib.Path(f"busy-{os.getppid()}")
    busy.touch()
    time.sleep(0.2)
    busy.unlink(missing_ok=True)
    letters = sum(len(one.given) + len(one.drawn) for one in played.calls)
    return {"calls": 1.0 / len(played.calls), "letters": 1.0 / letters, "paid": played.reward}

def rank(given):
    lengths = [len(one.conversation) + one.episode.parts["turns"] for one in given.answers]
    return [float(sorted(lengths).index(one)) for one in lengths]
"""

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]


@pytest.fixture
def desk(bare_desk: Path) -> Path:
    (bare_desk / "mine.py").write_text(MINE)
    (bare_desk / "recipe.toml").write_text(RECIPE)
    return bare_desk


def train(run_dir: Path, *settings: str) -> subprocess.Popen[bytes]:
    return polyrl("train", "recipe.toml", *settings, "--run-dir", str(run_dir))


def reward_worker(run_dir: Path, name: str) -> subprocess.Popen[bytes]:
    url = json.loads((run_dir / "manager.json").read_text())["url"]
    joining = ("--join", url, "--token-file", str(run_dir / "reward.token"), "--slots", "3", "--name", name)
    return polyrl("worker", "--rewards", *joining)


def reward_workers(run_dir: Path) -> dict[str, dict[str, object]]:
    """The reward workers that the manager knows; none while it does not answer."""
    headers = bearer(read_token_file(run_dir / "admin.token"))
    try:
        url = json.loads((run_dir / "manager.json").read_text())["url"]
        status = requests.get(f"{url}/v1/status", headers=headers, timeout=10).json()
    except (OSError, ValueError):
        return {}
    return {one["name"]: one for one in status.get("reward_workers", ())}


def num_trained(run_dir: Path) -> int:
    file = run_dir / "metrics.jsonl"
    return len(read_metrics(file)) if file.exists() else 0


def until_next_step(process: subprocess.Popen[bytes], run_dir: Path) -> None:
    before = num_trained(run_dir)
    wait_for(lambda: num_trained(run_dir) > before, process)


def samples_in_ledger(run_dir: Path) -> str:
    """What became of all samples, after the ledger was verified."""
    ledger = polyrl("ledger", str(run_dir), "--verify")
    said, _ = ledger.communicate(timeout=120)
    assert ledger.returncode == 0, said.decode()
    return " ".join(said.decode().split()).partition("prompts started")[2].partition("seconds of")[0]


def finished(process: subprocess.Popen[bytes], within_s: float = 240.0) -> str:
    """What it said, when it ended as it should."""
    output, _ = process.communicate(timeout=within_s)
    assert process.returncode == 0, output.decode()[-2000:]
    return output.decode()


def check_equal(whole: Path, run_dir: Path, num_steps: int) -> None:
    assert len(rewards(run_dir)) == num_steps
    assert rewards(run_dir) == rewards(whole)
    expected, found = end_of(whole, num_steps), end_of(run_dir, num_steps)
    assert all(torch.equal(one, found[name]) for name, one in expected.items())
    assert samples_in_ledger(run_dir) == samples_in_ledger(whole)
    assert "reward_failed" not in samples_in_ledger(run_dir)


def remote_counts(run_dir: Path) -> tuple[float, float]:
    """Results of reward workers, and jobs that were lost with one."""
    told = read_metrics(run_dir / "metrics.jsonl")
    scored, lost = ([float(line[f"reward/remote_{what}"] or 0) for line in told] for what in ("scored", "lost"))
    return sum(scored), sum(lost)


def test_reward_workers_are_killed_and_drained_and_rewards_and_weights_are_those_of_local_scoring(desk: Path):
    whole, run_dir = desk / "whole", desk / "remote"
    finished(train(whole))
    process = train(run_dir, "rewards.processes=0")
    wait_for((run_dir / "manager.json").exists, process)
    workers = {name: reward_worker(run_dir, name) for name in ("first", "second")}
    until_next_step(process, run_dir)
    busy = desk / f"busy-{workers['first'].pid}"
    wait_for(busy.exists, process)
    workers["first"].send_signal(signal.SIGKILL)
    until_next_step(process, run_dir)
    (manager,) = children(process.pid, "manager")
    os.kill(manager, signal.SIGKILL)
    until_next_step(process, run_dir)
    workers["third"] = reward_worker(run_dir, "third")
    wait_for(lambda: reward_workers(run_dir).get("third", {}).get("state") == "ready", process)
    workers["second"].send_signal(signal.SIGTERM)
    assert "left: SIGTERM" in finished(workers["second"], 60)
    finished(process)
    assert "left: the run is over" in finished(workers["third"], 60)
    workers["first"].communicate(timeout=10)
    check_equal(whole, run_dir, NUM_STEPS)
    num_scored, num_lost = remote_counts(run_dir)
    assert num_scored >= NUM_STEPS * PROMPTS
    assert num_lost >= 1


def test_episodes_are_scored_by_a_reward_worker_that_is_killed_and_by_the_one_that_replaces_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    agents.make_model("calculator", tmp_path / "model", seed=0, num_steps=40)
    (tmp_path / "played.py").write_text(PLAYED)
    (tmp_path / "recipe.toml").write_text(EPISODES)
    whole, run_dir = tmp_path / "whole", tmp_path / "remote"
    finished(train(whole))
    process = train(run_dir, "rewards.processes=0")
    wait_for((run_dir / "manager.json").exists, process)
    first = reward_worker(run_dir, "first")
    until_next_step(process, run_dir)
    wait_for((tmp_path / f"busy-{first.pid}").exists, process)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=10)
    second = reward_worker(run_dir, "second")
    finished(process)
    assert "left: the run is over" in finished(second, 60)
    check_equal(whole, run_dir, num_steps=6)
    num_scored, num_lost = remote_counts(run_dir)
    assert num_scored >= 6 * 2 * 2, (
        "of every group at least one episode, since equal ones are scored once, and all together"
    )
    assert num_lost >= 1


def test_a_run_without_any_reward_worker_waits_says_so_and_goes_on_with_the_first_that_joins(desk: Path):
    run_dir = desk / "remote"
    process = train(run_dir, "rewards.processes=0", "train.steps=1")
    wait_for((run_dir / "manager.json").exists, process)
    doctor = [sys.executable, "-m", "polyrl", "doctor", str(run_dir)]
    said = ""
    until = time.monotonic() + 60
    while "no reward worker can" not in said:
        assert time.monotonic() < until and process.poll() is None, said
        said = subprocess.run(doctor, capture_output=True, text=True, timeout=60, check=False).stdout
    assert "polyrl worker --rewards --join URL --token-file reward.token" in said
    wait_for(lambda: "and no reward worker is here" in (run_dir / "logs/train.log").read_text(), process)
    worker = reward_worker(run_dir, "late")
    assert "a reward worker joins with:" in finished(process, 120)
    finished(worker, 60)
