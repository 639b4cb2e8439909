"""`polyrl train` as real processes, for tests that kill them: starting one, waiting for it, what it left."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from polyrl.telemetry.metrics import read_metrics
from polyrl.trainer.state import checkpoint


def polyrl(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "polyrl", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def end_of(run_dir: Path, num_steps: int) -> dict[str, torch.Tensor]:
    state, tensors = checkpoint.load(checkpoint.found(run_dir)[-1])
    assert state.next_step == num_steps
    return dict(tensors)


def rewards(run_dir: Path) -> dict[int, list[object]]:
    told = ("reward/mean", "reward/std", "rounds/filtered_groups")
    lines = read_metrics(run_dir / "metrics.jsonl")
    return {int(line["step"] or 0): [line[name] for name in told] for line in lines}


def wait_for(holds: Callable[[], bool], process: subprocess.Popen[bytes], pause_s: float = 0.01) -> None:
    until = time.monotonic() + 120.0
    while not holds():
        assert time.monotonic() < until and process.poll() is None
        time.sleep(pause_s)
