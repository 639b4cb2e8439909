"""A run's workers from its provider: kept by the trainer, changed by `polyrl up` and `polyrl down`, and scaled."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.integration.desks import bare_desk, model
from tests.integration.test_train import desk, start
from tests.warm import run_warm

from polyrl.cli.main import main

__all__ = ["bare_desk", "desk", "model"]  # fixtures
pytestmark = pytest.mark.timeout(600)
RUN = Path("runs/tiny")


def polyrl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_warm(*arguments, timeout_s=200)


def until(holds: Callable[[], bool], seconds: float = 180.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def workers() -> dict[str, int]:
    """The run's workers, by name, with their processes."""
    files = sorted((RUN / "fleet").glob("worker-*.json"))
    found = {file.stem: json.loads(file.read_text())["pid"] for file in files}
    return {name: pid for name, pid in found.items() if Path(f"/proc/{pid}").exists()}


@contextmanager
def running(*settings: str) -> Iterator[None]:
    with Path("their_reward.py").open("a") as reward:
        reward.write("\n\nimport time\n\ndef fine(given):\n    time.sleep(0.1)\n    return given.num_tokens % 2\n")
    process = start("train.steps=100000", "data.reward=their_reward:fine", *settings)
    try:
        until(lambda: (RUN / "metrics.jsonl").exists() or process.poll() is not None)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors


def test_a_worker_that_is_killed_is_started_again_and_up_and_down_may_be_said_twice(desk: Path):
    with running("fleet.workers=1", "fleet.spot=true", "fleet.price_usd_per_hour=0.4", "fleet.wait=true"):
        until(lambda: len(workers()) == 1)
        first = workers()["worker-0"]
        os.kill(first, signal.SIGKILL)
        until(lambda: workers().get("worker-0", first) != first)
        up = polyrl("up", str(RUN), "--workers", "2")
        assert up.returncode == 0, up.stdout + up.stderr
        assert sorted(workers()) == ["worker-0", "worker-1"]
        again = polyrl("up", str(RUN), "--workers", "2")
        assert (again.returncode, again.stdout) == (0, "nothing to do: 2 workers there\n")
        down = polyrl("down", str(RUN))
        assert down.returncode == 0, down.stdout + down.stderr
        assert workers() == {}
        assert polyrl("down", str(RUN)).stdout == "nothing to do: 0 workers there\n"
        assert polyrl("up", str(RUN), "--auto").returncode == 0
        until(lambda: len(workers()) == 1)
    until(lambda: workers() == {})


@pytest.mark.chaos
def test_the_autoscaler_follows_a_market_within_its_budget_and_says_why(desk: Path):
    lines = ("at_s,workers,usd_per_hour", "0,2,0.5", "40,1,0.5", "50,3,4")
    (desk / "supply.csv").write_text("\n".join(lines) + "\n")
    market = 'fleet.provider_args={ supply = "supply.csv", notice_s = 2.0 }'
    scaled = ("scaling.enabled=true", "scaling.max_workers=4", "scaling.max_usd_per_hour=1.2", "fleet.workers=2")
    with running(*scaled, market, "train.price_usd_per_hour=3", "fleet.wait=true"):
        until(lambda: not workers())
    told = polyrl("plan", "--explain", str(RUN))
    assert told.returncode == 0, told.stdout + told.stderr
    offers = [line.partition("offered: ")[2] for line in told.stdout.splitlines() if "offered: " in line]
    assert offers[:3] == [
        "2 workers at $0.50 an hour each",
        "1 workers at $0.50 an hour each",
        "3 workers at $4.00 an hour each",
    ]
    assert len(offers) == 3, "each change is told once"
    decision = next(line for line in told.stdout.splitlines() if "0 workers: " in line)
    assert "0 are within $1.2 an hour" in decision and "another costs $4.00 an hour" in decision


def test_what_cannot_be_brought_up_is_one_line(desk: Path, capsys: pytest.CaptureFixture[str]):
    for arguments, why in (
        (("up", "nowhere"), "nowhere: is no run of `polyrl train`"),
        (("up", "nowhere", "--workers", "-3"), "--workers: -3; expected 0 to 10000"),
        (("up", "nowhere", "--workers", "3", "--auto"), "--auto: the run chooses"),
        (("down", "nowhere"), "nowhere: is no run"),
        (("train", "recipe.toml", "fleet.provider=nobody"), 'fleet.provider: unknown name "nobody"'),
    ):
        assert main(list(arguments)) == 2, arguments
        errors = capsys.readouterr().err
        assert why in errors and errors.count("\n") == 1
