"""A trainer of two nodes with two ranks each, in network namespaces: it trains what one rank does; nodes die."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.chaos.namespaces import FIRST_NODE, Nodes, two_nodes, why_not
from tests.chaos.test_resume import SETTINGS, model
from tests.chaos.training_runs import end_of, rewards
from tests.processes import children

from polyrl.run.rank_watch import GONE_S
from polyrl.trainer.state import checkpoint

__all__ = ["model"]
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600), pytest.mark.skipif(bool(why_not()), reason=why_not())]

MEET = f"{FIRST_NODE}:29500"
OVER_NODES = ("--nodes", "2", "--meet", MEET)
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@contextmanager
def started(argv: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as sink:
        process = subprocess.Popen(argv, stdout=sink, stderr=sink, env=ENVIRONMENT)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def recipe(model: Path, run_dir: Path, num_steps: int, *more: str) -> list[str]:
    given = (f"model.path={model}", f"train.steps={num_steps}", *SETTINGS, *more)
    return ["train", "arithmetic", *given, "--run-dir", str(run_dir)]


def polyrl(net: Nodes, number: int, *argv: str) -> list[str]:
    return net.inside(number, sys.executable, "-m", "polyrl", *argv)


def torchrun(net: Nodes, number: int, argv: list[str]) -> list[str]:
    place = ("--master-addr", FIRST_NODE, "--master-port", "29501", "--node-rank", str(number))
    launch = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", *place, "-m", "polyrl")
    return net.inside(number, sys.executable, *launch, *argv)


def last_step(run_dir: Path) -> int:
    return max((checkpoint.step_of(one) + 1 for one in (run_dir / "checkpoints/redo").glob("step-*")), default=0)


def until(holds: Callable[[], bool], what: str, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def test_torchrun_on_two_nodes_trains_what_one_rank_trains(model: Path, tmp_path: Path):
    whole = recipe(model, tmp_path / "whole", 4, "train.mode=synchronous")
    subprocess.run([sys.executable, "-m", "polyrl", *whole], env=ENVIRONMENT, check=True, timeout=200)
    argv = recipe(model, tmp_path / "run", 4, "train.mode=synchronous")
    with (
        two_nodes() as net,
        started(torchrun(net, 1, argv), tmp_path / "second"),
        started(torchrun(net, 0, argv), tmp_path / "first") as first,
    ):
        assert first.wait(300) == 0, read(tmp_path / "first")[-3000:]
    assert rewards(tmp_path / "run") == rewards(tmp_path / "whole")
    found, expected = end_of(tmp_path / "run", 4), end_of(tmp_path / "whole", 4)
    assert found.keys() == expected.keys()
    masters = [name for name in expected if "/master/" in name]
    assert all(torch.allclose(found[name], expected[name], atol=1e-3) for name in masters)


def test_a_dead_rank_and_a_node_cut_off_stop_the_step_in_one_line_and_the_run_goes_on_with_its_fleet(
    model: Path, tmp_path: Path
):
    run_dir, first_log, second_log = tmp_path / "run", tmp_path / "first", tmp_path / "second"
    argv = (*recipe(model, run_dir, 500, "train.local_generation=false"), *OVER_NODES, "--ranks", "4")
    with two_nodes() as net, started(polyrl(net, 1, "train", *OVER_NODES, "--node", "1"), second_log) as second:
        with started(polyrl(net, 0, *argv), first_log) as first:
            until((run_dir / "manager.json").exists, "there is no manager")
            address = json.loads(read(run_dir / "manager.json"))["url"]
            joins = ("--join", address, "--token-file", str(run_dir / "worker.token"), "--name", "apart")
            worker_argv = polyrl(net, 0, "worker", "--engine", "builtin", "--model", str(model), *joins)
            with started(worker_argv, tmp_path / "worker") as worker:  # only this one generates
                until(lambda: last_step(run_dir) >= 2, "no step was trained")
                ranks = children(second.pid, "train")
                assert len(ranks) == 2
                os.kill(ranks[1], signal.SIGKILL)
                line = goes_on(first, first_log, run_dir, 1)
                assert " on node 1 (10.203.0.2) ha" in line and "3" in line.partition(" on ")[0]

                net.cut()
                line = goes_on(first, first_log, run_dir, 2, then=net.heal)
                assert line.startswith(f"polyrl: node 1 (10.203.0.2) has not answered for {GONE_S} s: ranks 2, 3; ")
                assert worker.poll() is None, "it was told that the run is over"
            first.send_signal(signal.SIGINT)
            assert first.wait(60) == 130, read(first_log)[-2000:]
        assert second.wait(60) == 0, read(second_log)[-2000:]
    assert "Traceback" not in read(first_log)


def test_a_machine_that_waits_for_the_first_one_says_so_and_nothing_else(tmp_path: Path):
    argv = [sys.executable, "-m", "polyrl", "train", "--nodes", "2", "--node", "1", "--meet", "127.0.0.1:9"]
    with started(argv, tmp_path / "log") as process:
        until(lambda: read(tmp_path / "log") != "", "it says nothing")
        time.sleep(8)  # torch tries for 5 s, and has much to tell then
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    assert read(tmp_path / "log") == "node 1: waits for node 0 at 127.0.0.1:9\npolyrl: interrupted\n"


def goes_on(
    first: subprocess.Popen[bytes], log: Path, run_dir: Path, times: int, then: Callable[[], None] | None = None
) -> str:
    """Wait until the run has lost a rank so often, and trained two steps since. Returns the line on it."""
    until(lambda: read(log).count("going on from step") == times, read(log)[-2000:], 30.0)
    if then is not None:
        then()
    line = [one for one in read(log).splitlines() if "going on from step" in one][-1]
    step = int(line.partition("going on from step ")[2].split()[0])
    until(lambda: last_step(run_dir) >= step + 2 or first.poll() is not None, "it did not go on")
    assert first.poll() is None, read(log)[-3000:]
    return line
