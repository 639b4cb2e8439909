"""Ranks as real processes: one of them is killed, all stop with one line, and another number of them goes on."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from tests.chaos.test_resume import SETTINGS, end_of, model, polyrl, rewards

from polyrl.trainer.state import checkpoint

__all__ = ["model"]
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]
NUM_STEPS = 6


def train(model: Path, run_dir: Path, ranks: int, num_steps: int = NUM_STEPS, *more: str) -> subprocess.Popen[bytes]:
    given = (f"model.path={model}", f"train.steps={num_steps}", "train.restarts=0", *SETTINGS, *more)
    given = (*given, "--ranks", str(ranks))
    return polyrl("train", "arithmetic", *given, "--run-dir", str(run_dir))


def end(process: subprocess.Popen[bytes]) -> str:
    output, _ = process.communicate(timeout=240)
    return output.decode()


def others(process: subprocess.Popen[bytes]) -> list[int]:
    """The ranks that it has started."""
    return [one for one in _children(process.pid) if _words(one)[-2:] == ["polyrl", "train"]]


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        found += [int(one) for one in (thread / "children").read_text().split()]
    return found


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().rstrip("\0").split("\0")
    except OSError:
        return []


def until_trained(process: subprocess.Popen[bytes], run_dir: Path, step: int) -> None:
    until = time.monotonic() + 240.0
    while time.monotonic() < until and process.poll() is None:
        if any(checkpoint.step_of(one) + 1 >= step for one in (run_dir / "checkpoints/redo").glob("step-*")):
            return
        time.sleep(0.05)
    raise AssertionError(f"step {step} of {run_dir} was not trained: {end(process)[-2000:]}")


def is_gone(pid: int) -> bool:
    """Within some seconds."""
    until = time.monotonic() + 15.0
    while time.monotonic() < until:
        if not _words(pid):
            return True
        time.sleep(0.1)
    return False


def test_a_rank_that_is_killed_ends_all_and_the_run_goes_on_with_another_number(model: Path, tmp_path: Path):
    whole = train(model, tmp_path / "whole", 1)
    run_dir = tmp_path / "killed"
    process = train(model, run_dir, 2)
    until_trained(process, run_dir, 2)
    (rank_one,) = others(process)
    os.kill(rank_one, signal.SIGKILL)
    said = end(process)
    assert process.returncode == 2, said[-2000:]
    line = said.strip().splitlines()[-1]
    assert line.startswith("polyrl: error: rank 1 has ended (SIGKILL), see "), said[-2000:]
    assert line.endswith(f"go on with `polyrl train --resume {run_dir}`")
    assert "Traceback" not in said

    process = polyrl("train", "--resume", str(run_dir), "--ranks", "1", f"train.steps={NUM_STEPS - 1}")
    said = end(process)
    assert process.returncode == 0 or "are trained" in said, said[-2000:]
    process = polyrl("train", "--resume", str(run_dir), "--ranks", "2", f"train.steps={NUM_STEPS}")
    said = end(process)
    assert process.returncode == 0, said[-2000:]

    assert end(whole).strip()
    told, wanted = rewards(run_dir), rewards(tmp_path / "whole")
    assert told == wanted
    expected, found = end_of(tmp_path / "whole", NUM_STEPS), end_of(run_dir, NUM_STEPS)
    assert expected.keys() == found.keys()
    masters = [name for name in expected if "/master/" in name]
    assert all(torch.allclose(found[name], expected[name], atol=1e-3) for name in masters)


def test_steps_in_the_log_alone_are_settled_by_ranks_and_others_go_on_with_the_change(model: Path, tmp_path: Path):
    run_dir = tmp_path / "run"
    process = train(model, run_dir, 2, 500, "checkpoint.every_steps=500")
    until_trained(process, run_dir, 2)
    process.kill()
    process.wait()
    num = checkpoint.step_of(max((run_dir / "checkpoints/redo").glob("step-*"))) + 1
    process = polyrl("train", "--resume", str(run_dir), "optimizer.lr=0.5", f"train.steps={num + 1}")
    said = end(process)
    assert process.returncode == 0, said[-2000:]
    assert f"from step {num} on, the curve has a break: optimizer.lr" in " ".join(said.split())
    assert "Traceback" not in said


@pytest.mark.parametrize("after_s", [0.0, 3.0, 6.0])
def test_a_rank_that_is_killed_before_the_run_begins_ends_it_at_once_with_one_line(
    model: Path, tmp_path: Path, after_s: float
):
    """While the ranks meet, and while they load."""
    run_dir = tmp_path / "run"
    process = train(model, run_dir, 2, 500)
    until = time.monotonic() + 60.0
    while not others(process) and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(after_s)
    os.kill(others(process)[0], signal.SIGKILL)
    began = time.monotonic()
    said = end(process)
    assert time.monotonic() - began < 30.0
    assert process.returncode == 2, said[-2000:]
    assert said.strip().splitlines()[-1].startswith("polyrl: error: rank 1 has ended (SIGKILL), see "), said[-2000:]
    assert "Traceback" not in said


def test_no_rank_outlives_rank_zero_killed_or_interrupted(model: Path, tmp_path: Path):
    run_dir = tmp_path / "run"
    process = train(model, run_dir, 2, 500)
    until_trained(process, run_dir, 1)
    (rank_one,) = others(process)
    process.kill()
    process.wait()
    assert is_gone(rank_one)
    process = polyrl("train", "--resume", str(run_dir))
    until_trained(process, run_dir, 4)
    (rank_one,) = others(process)
    process.send_signal(signal.SIGINT)
    said = end(process)
    assert process.returncode == 130, said[-2000:]
    assert said.strip().splitlines()[-1] == f"stopped; go on with `polyrl train --resume {run_dir}`"
    assert is_gone(rank_one)
