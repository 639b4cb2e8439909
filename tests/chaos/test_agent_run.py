"""A run on an environment of several turns, whose processes are killed: the rewards and weights of one that was not.

Real processes: `polyrl train treasure` with its manager, a worker with the builtin engine and a host. Each of them is
killed by its pid between turns or within one, and so is the trainer, which goes on with `--resume`. A function of the
whole conversation scores every episode beside its environment.
"""

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from tests.chaos.training_runs import end_of, polyrl, rewards, wait_for
from tests.processes import children

from polyrl.starters import agents
from polyrl.telemetry.metrics import read_metrics
from polyrl.trainer.state import checkpoint

NUM_STEPS = 24
PROMPTS, SAMPLES = 4, 4
SETTINGS = (
    "manager.port=0", f"data.prompts_per_step={PROMPTS}", f"rounds.samples_per_prompt={SAMPLES}",
    f"train.steps={NUM_STEPS}", "train.mode=synchronous", "train.min_micro_batch_samples=8",
    "checkpoint.every_steps=3", "fleet.workers=1", "fleet.wait=true", "fleet.settings={ slots = 8, kv_tokens = 4096 }",
)  # fmt: skip
REWARDS = (f"modules={Path(__file__).parent}", 'rewards.functions=[{function="episode_thrift:thrift",weight=0.25}]')
COMMANDS = {"manager": "manager", "worker": "worker", "host": "env"}

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "treasure"
    agents.make_model("treasure", folder, seed=0, num_steps=120)
    return folder


def train(model: Path, run_dir: Path) -> subprocess.Popen[bytes]:
    return polyrl("train", "treasure", f"model.path={model}", *SETTINGS, *REWARDS, "--run-dir", str(run_dir))


def num_trained(run_dir: Path) -> int:
    file = run_dir / "metrics.jsonl"
    return len(read_metrics(file)) if file.exists() else 0


def until_next_step(process: subprocess.Popen[bytes], run_dir: Path) -> None:
    """Wait until one more step is trained: then everybody works."""
    wait_for(lambda: bool(checkpoint.found(run_dir)), process)
    before = num_trained(run_dir)
    wait_for(lambda: num_trained(run_dir) > before, process)


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    process = train(model, run_dir)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output.decode()[-2000:]
    assert len(rewards(run_dir)) == NUM_STEPS
    return run_dir


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long)])
def test_host_worker_manager_and_trainer_are_killed_and_rewards_and_weights_are_those_of_an_undisturbed_run(
    model: Path, whole: Path, tmp_path: Path, seed: int
):
    run_dir, draw = tmp_path / "killed", random.Random(seed)
    victims = ["host", "worker", "manager", "trainer", "host"]
    draw.shuffle(victims)
    process = train(model, run_dir)
    killed: list[str] = []
    for victim in victims:
        until_next_step(process, run_dir)
        time.sleep(draw.uniform(0.0, 0.3))
        if victim == "trainer":
            process.send_signal(signal.SIGKILL)
            process.wait()
            process = polyrl("train", "--resume", str(run_dir))
        else:
            wait_for(lambda: bool(children(process.pid, COMMANDS[victim])), process)  # noqa: B023 (called at once)
            for pid in children(process.pid, COMMANDS[victim]):
                os.kill(pid, signal.SIGKILL)
        killed.append(victim)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output.decode()[-2000:]
    assert sorted(killed) == sorted(victims)
    assert rewards(run_dir) == rewards(whole)
    expected, found = end_of(whole, NUM_STEPS), end_of(run_dir, NUM_STEPS)
    assert expected.keys() == found.keys()
    assert all(torch.equal(one, found[name]) for name, one in expected.items())
    check_ledger(run_dir)


HANGING = """\
import pathlib
import threading

from polyrl.starters.environments import Treasure

lock, num_steps = threading.Lock(), 0


class Hanging(Treasure):
    def step(self, text):
        global num_steps
        num_steps += 1
        mark = pathlib.Path(__file__).with_name("has_hung")
        if num_steps == 40 and not mark.exists():
            mark.touch()
            lock.acquire()  # and nobody gives it back
        with lock:
            return super().step(text)
"""


def test_a_host_in_which_everything_waits_for_a_lock_is_ended_and_no_episode_is_scored_for_it(
    model: Path, tmp_path: Path
):
    (tmp_path / "hanging.py").write_text(HANGING)
    settings = (
        "data.environment=hanging:Hanging", f"modules={tmp_path}", "train.steps=4", "fleet.workers=0",
        "environments.turn_timeout_s=5", "environments.least_turn_timeout_s=2", "environments.timeout_reward=-5",
    )  # fmt: skip
    run_dir = tmp_path / "run"
    process = polyrl("train", "treasure", f"model.path={model}", *SETTINGS, *settings, "--run-dir", str(run_dir))
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output.decode()[-2000:]
    assert (tmp_path / "has_hung").exists()
    assert "it hangs: none of its" in output.decode() and "it is started again" in output.decode()
    ledger = polyrl("ledger", str(run_dir), "--json")
    found = json.loads(ledger.communicate(timeout=120)[0])["episodes"]
    assert found["hosts_hung"] == 1
    assert found["ended"] == {"scored": PROMPTS * SAMPLES * 4}, "no time-out: no reward of -5"


def check_ledger(run_dir: Path) -> None:
    ledger = polyrl("ledger", str(run_dir), "--verify")
    said, _ = ledger.communicate(timeout=120)
    words = " ".join(said.decode().split())
    assert ledger.returncode == 0, said.decode()
    assert f"samples started {PROMPTS * SAMPLES * NUM_STEPS} trained {PROMPTS * SAMPLES * NUM_STEPS}" in words, words
    begun = int(words.partition("episodes begun ")[2].split()[0].replace(",", ""))
    assert begun >= PROMPTS * SAMPLES * NUM_STEPS, words
