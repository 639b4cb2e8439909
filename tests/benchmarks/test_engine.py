"""The engine beside its peers: what is said when a peer cannot be had, and how turns are compared."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.engine import EngineTurns, num_turns_for

from polyrl.bench.engine import Ran

ROOT = Path(__file__).parents[2]


def bench_with_vllm_of(home, *more: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "benchmarks", "engine", "--batch", "1", "--new", "4", "--peer", "vllm", *more]
    env = {**os.environ, "HOME": str(home)}
    return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_a_peer_that_is_not_installed_is_said_with_the_command_that_installs_it(tmp_path):
    done = bench_with_vllm_of(tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "--peer vllm" in done.stderr and "benchmarks/install_vllm_cpu.sh" in done.stderr


def test_a_peer_that_does_not_start_is_said_with_its_last_words(tmp_path):
    program = tmp_path / ".cache" / "polyrl" / "engines" / "vllm" / "bin" / "vllm"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho first\necho no such model\nexit 3\n")
    program.chmod(0o755)
    done = bench_with_vllm_of(tmp_path)
    assert done.returncode == 2
    assert "the server did not start: no such model" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("job_s", "num"), [(0.3, 25), (0.8, 10), (3.0, 5), (600.0, 5)])
def test_short_jobs_are_measured_in_more_turns(job_s: float, num: int):
    assert num_turns_for(job_s) == num


def test_the_spread_is_that_of_neighbouring_turns():
    ours = [Ran(seconds, 0.1, 0.1, 100, 1.0, 1.0) for seconds in (1.0, 2.0, 4.0)]
    turns = EngineTurns(ours, [100.0, 50.0, 12.5])
    assert turns.ratio_quartiles == [1.0, 2.0]
    assert turns.median.seconds == 2.0
