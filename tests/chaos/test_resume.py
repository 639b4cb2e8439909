"""A trainer that is killed at random moments and goes on: the same weights to the last bit as one that never was.

Real processes: `polyrl train` on the arithmetic task, with its manager and the builtin engine. In synchronous mode
results are compared to the last bit; with rounds written ahead, that nothing is lost whoever is killed.
"""

import json
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from tests.chaos.training_runs import end_of, polyrl, rewards, wait_for
from tests.processes import children

from polyrl.config.recipe import ArithmeticTask
from polyrl.run import checkpoints
from polyrl.starters import arithmetic
from polyrl.telemetry.metrics import read_metrics
from polyrl.trainer.state import checkpoint, redo

SETTINGS = (
    "manager.port=0", "data.prompts_per_step=4",
    "rounds.samples_per_prompt=4", "validation.every_steps=0", "validation.at_start=false",
    "train.min_micro_batch_samples=8", "checkpoint.every_steps=3",
)  # fmt: skip

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    arithmetic.make_model(folder, seed=0, task=ArithmeticTask(), num_steps=200)
    return folder


LORA = ("lora.rank=4", "lora.dropout=0.1", "optimizer.lr=3e-3", "algorithm.kl=loss")


def train(model: Path, run_dir: Path, num_steps: int, more: tuple[str, ...]) -> subprocess.Popen[bytes]:
    given = (f"model.path={model}", f"train.steps={num_steps}", "train.mode=synchronous", *SETTINGS, *more)
    return polyrl("train", "arithmetic", *given, "--run-dir", str(run_dir))


@pytest.mark.parametrize(
    ("num_kills", "at_least", "num_steps", "more"),
    [(6, 2, 40, ()), (3, 1, 12, LORA), pytest.param(26, 20, 100, (), marks=pytest.mark.long)],
    ids=["all-weights", "lora", "often"],
)
def test_a_trainer_killed_at_random_moments_ends_with_the_same_weights(
    model: Path, tmp_path: Path, num_kills: int, at_least: int, num_steps: int, more: tuple[str, ...]
):
    whole = train(model, tmp_path / "whole", num_steps, more)
    output, _ = whole.communicate(timeout=300)
    assert whole.returncode == 0, output.decode()[-2000:]
    draw = random.Random(num_kills)
    run_dir = tmp_path / "killed"
    kills = 0
    process = train(model, run_dir, num_steps, more)
    while True:
        until_running(process, run_dir)
        if kills == num_kills:
            output, _ = process.communicate(timeout=300)
            break
        time.sleep(draw.uniform(0.0, 1.0))
        if process.poll() is not None:  # it was through before
            output = process.stdout.read() if process.stdout else b""
            break
        process.send_signal(signal.SIGKILL)
        process.wait()
        kills += 1
        process = polyrl("train", "--resume", str(run_dir))
    assert process.returncode == 0 or b"are trained" in output, output.decode()[-2000:]
    assert kills >= at_least
    expected, found = end_of(tmp_path / "whole", num_steps), end_of(run_dir, num_steps)
    assert expected.keys() == found.keys()
    assert all(torch.equal(one, found[name]) for name, one in expected.items())
    assert rewards(run_dir) == rewards(tmp_path / "whole")
    ledger = polyrl("ledger", str(run_dir), "--verify")
    said, _ = ledger.communicate(timeout=120)
    assert ledger.returncode == 0, said.decode()
    assert f"trained {4 * num_steps}" in " ".join(said.decode().split()), said.decode()


def test_killed_in_its_first_moments_again_and_again_it_begins_or_goes_on_as_it_says(model: Path, tmp_path: Path):
    """Also before it has a checkpoint, and before its manager has heard of it."""
    run_dir, num_steps, draw = tmp_path / "young", 30, random.Random(1)
    for kill in range(5):
        process = again(model, run_dir, num_steps)
        wait_for((run_dir / "manager.json").is_file, process)
        if kill == 2:
            wait_for(lambda: checkpoints.has_begun(run_dir), process)
        else:
            time.sleep(draw.uniform(0.0, 0.4))
        process.send_signal(signal.SIGKILL)
        process.wait()
        checkpoints.wait_for_manager_to_end(run_dir)
        (run_dir / "manager.json").unlink(missing_ok=True)
    assert checkpoints.has_begun(run_dir)
    process = again(model, run_dir, num_steps)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output.decode()[-2000:]
    assert end_of(run_dir, num_steps)


def again(model: Path, run_dir: Path, num_steps: int) -> subprocess.Popen[bytes]:
    if (run_dir / "recipe.toml").exists():
        return polyrl("train", "--resume", str(run_dir))
    return train(model, run_dir, num_steps, ())


def until_running(process: subprocess.Popen[bytes], run_dir: Path) -> None:
    """Until it has a checkpoint: from then on it can be killed at any moment."""
    until = time.monotonic() + 120.0
    while time.monotonic() < until and process.poll() is None and not checkpoint.found(run_dir):
        time.sleep(0.05)
    time.sleep(0.5)


AHEAD = (
    "train.mode=async", "train.max_staleness=2", "rounds.tail_batching=prompts", "fleet.workers=1", "fleet.wait=true",
    "fleet.settings={ slots = 8, kv_tokens = 4096 }",
)  # fmt: skip


def test_with_rounds_ahead_trainer_worker_and_manager_are_killed_and_nothing_is_lost(model: Path, tmp_path: Path):
    num_steps, run_dir = 40, tmp_path / "ahead"
    draw = random.Random(3)
    given = (f"model.path={model}", f"train.steps={num_steps}", *SETTINGS, *AHEAD)
    process = polyrl("train", "arithmetic", *given, "--run-dir", str(run_dir))
    killed: list[str] = []
    for victim in ("manager", "worker", "trainer", "manager", "trainer", "worker", "trainer"):
        until_running(process, run_dir)
        time.sleep(draw.uniform(0.0, 1.0))
        while process.poll() is None and victim != "trainer" and not children(process.pid, victim):
            time.sleep(0.05)  # it is still to be started
        if process.poll() is not None:
            break
        if victim == "trainer":
            process.send_signal(signal.SIGKILL)
            process.wait()
            process = polyrl("train", "--resume", str(run_dir))
        else:
            for pid in children(process.pid, victim):
                os.kill(pid, signal.SIGKILL)
        killed.append(victim)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output.decode()[-2000:]
    assert {"worker", "trainer", "manager"} <= set(killed)
    assert end_of(run_dir, num_steps)
    lines = read_metrics(run_dir / "metrics.jsonl")
    steps = [int(line["step"] or 0) for line in lines]
    assert steps == list(range(num_steps))
    assert 0 < max(int(line["staleness/max"] or 0) for line in lines) <= 2
    ledger = polyrl("ledger", str(run_dir), "--verify")
    said, _ = ledger.communicate(timeout=120)
    assert ledger.returncode == 0, said.decode()
    assert f"trained {4 * num_steps}" in " ".join(said.decode().split()), said.decode()


def test_killed_in_the_middle_of_writing_a_checkpoint_it_ends_with_the_same_weights(model: Path, tmp_path: Path):
    num_steps, run_dir = 60, tmp_path / "killed"
    whole = train(model, tmp_path / "whole", num_steps, ())
    folder = run_dir / checkpoint.FOLDER
    process = train(model, run_dir, num_steps, ("checkpoint.every_steps=2",))
    caught = 0
    while caught < 3 and process.poll() is None:
        if not (checkpoint.found(run_dir) and any(folder.glob(".step-*"))):
            time.sleep(0.0005)
            continue
        process.send_signal(signal.SIGKILL)
        process.wait()
        caught += any(folder.glob(".step-*"))
        process = polyrl("train", "--resume", str(run_dir))
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output.decode()[-2000:]
    assert caught == 3
    assert b"again" in output  # what was killed is in the log
    assert not list(folder.glob(".step-*"))
    assert whole.communicate(timeout=300) and whole.returncode == 0
    expected, found = end_of(tmp_path / "whole", num_steps), end_of(run_dir, num_steps)
    assert all(torch.equal(one, found[name]) for name, one in expected.items())


def test_killed_before_anyone_is_told_how_a_version_validated_it_is_told_and_the_best_is_known(
    model: Path, tmp_path: Path
):
    """Validated, its step trained and safe, and not told of: the moment at which only validated.json has it."""
    num_steps, run_dir, wanted = 20, tmp_path / "killed", "validation/pass@1"
    more = ("validation.every_steps=2", "validation.num_prompts=8", f"checkpoint.keep_best={wanted}")
    process = train(model, run_dir, num_steps, more)
    caught = 0
    for version in range(2, num_steps - 2, 2):
        wait_for(lambda step=version: redo.has(run_dir, step), process, pause_s=0.0002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        caught += version not in rewards(run_dir)
        process = polyrl("train", "--resume", str(run_dir))
        if caught == 3:
            break
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output.decode()[-2000:]
    assert caught == 3
    lines = read_metrics(run_dir / "metrics.jsonl")
    told = {int(line["step"] or 0): float(line[wanted] or 0) for line in lines if wanted in line}
    assert sorted(told) == list(range(2, num_steps + 1, 2))
    best = checkpoint.read_best(run_dir)
    assert best is not None and best.step == max(told, key=lambda version: (told[version], -version))


def test_steps_that_come_out_otherwise_replace_their_version_and_a_worker_fetches_it_anew(model: Path, tmp_path: Path):
    """Other packs add up in another order, as a GPU does by itself. The worker lives on, and holds what was before."""
    num_steps, run_dir = 40, tmp_path / "run"
    more = ("train.mode=streaming", "train.local_generation=false", "checkpoint.every_steps=100")
    process = train(model, run_dir, num_steps, more)
    wait_for((run_dir / "manager.json").is_file, process)
    url = json.loads((run_dir / "manager.json").read_text())["url"]
    joining = ("--join", url, "--token-file", str(run_dir / "worker.token"), "--model", str(model), "dtype=float32")
    worker = polyrl("worker", "--engine", "builtin", "--name", "stays", "slots=8", "kv_tokens=4096", *joining)
    newest = 0
    while True:  # until it is killed within a round that the worker writes with a version of logged steps
        wait_for(lambda known=newest + 2: max(checkpoint.read_published(run_dir), default=0) >= known, process)
        time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        newest = max(checkpoint.read_published(run_dir))
        if newest == redo.num_after(run_dir, 0):
            break
        process = polyrl("train", "--resume", str(run_dir))
    process = polyrl("train", "--resume", str(run_dir), "train.micro_batch_tokens=64")
    output, _ = process.communicate(timeout=300)
    said = output.decode()
    assert process.returncode == 0, said[-2000:]
    assert re.search(rf"version {newest} is not what it was, bit for bit, after the steps were trained again", said), (
        said
    )
    assert "rejected" not in said and "Traceback" not in said, said
    told, _ = worker.communicate(timeout=60)
    assert worker.returncode == 0, told.decode()[-2000:]
    state, _ = checkpoint.load(checkpoint.found(run_dir)[-1])
    assert state.next_step == num_steps
    shown = (run_dir / "logs/manager.log").read_text()
    assert f"version {newest} is published anew, with another digest" in shown and "is refused" not in shown
    ledger = polyrl("ledger", str(run_dir), "--verify")
    shown, _ = ledger.communicate(timeout=120)
    assert ledger.returncode == 0, shown.decode()
    assert f"trained {4 * num_steps}" in " ".join(shown.decode().split()), shown.decode()
