"""Runs from Python, with real processes: watched, stopped, resumed, exported, interrupted, and killed."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.integration.desks import bare_desk, model, processes_in
from tests.integration.test_train import desk

import polyrl

__all__ = ["bare_desk", "desk", "model"]  # fixtures
pytestmark = pytest.mark.timeout(300)  # several runs, of which each may take 100 s

RUN = Path("runs/tiny")
SRC = str(Path(__file__).parents[2] / "src")
MANY = {"train.steps": 1000, "data.reward": "own:score", "checkpoint.every_steps": 2}


@pytest.fixture
def place(desk: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe, and processes that are started from it find this package."""
    monkeypatch.setenv("PYTHONPATH", SRC)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (desk / "own.py").write_text("def score(given):\n    return float(given.num_tokens % 3)\n")
    return desk


def until_nothing_runs_in(folder: Path) -> list[str]:
    """What still runs after a while; empty as soon as nothing does."""
    until = time.monotonic() + 60
    while (left := processes_in(folder)) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def test_a_run_is_watched_to_its_end_resumed_with_more_steps_and_exported(place: Path):
    recipe = polyrl.load("recipe.toml", {"data.reward": "own:score", "fleet.workers": 1, "fleet.wait": True})
    with polyrl.start(recipe) as run:
        assert run.is_running and run.first_step == 0
        assert run.url in run.join_command and run.recipe.train.steps == 2
        steps = list(run.steps())
    assert [step.number for step in steps] == [0, 1]
    assert all(step.reward is not None and step.seconds > 0 and step.metrics["tokens/kept"] for step in steps)
    assert run.status == "done: all 2 steps are trained"
    assert [step.reward for step in run.history()] == [step.reward for step in steps]
    assert processes_in(place) == []

    with pytest.raises(polyrl.UserError, match="all 2 steps of runs/tiny are trained"):
        polyrl.resume(run.run_dir)
    with polyrl.resume(
        run.run_dir, {"train.steps": 3, "fleet.workers": 0, "fleet.wait": False}
    ) as again:  # the second run of this process
        assert again.wait() == "done: all 3 steps are trained"
        assert [step.number for step in again.steps()] == [2]
    assert [step.number for step in again.history()] == [0, 1, 2]
    exported = polyrl.export(run.run_dir, "out")
    assert (exported.folder / "config.json").is_file() and exported.checkpoint.name.endswith("3")
    with pytest.raises(polyrl.UserError, match="out: is there already"):
        polyrl.export(run.run_dir, "out")


def test_leaving_the_block_stops_the_run_and_the_next_one_goes_on_after_its_last_step(place: Path):
    with polyrl.start("recipe.toml", MANY, run_dir="mine") as run:
        for step in run.steps():
            if step.number == 2:
                break
    assert run.status == "stopped" and processes_in(place) == []
    trained = len(run.history())
    assert trained >= 3
    left = [step.number for step in run.steps()]  # those that were trained while the block was left
    assert left == list(range(3, 3 + len(left)))

    with polyrl.resume("mine", {"train.steps": trained + 2}) as again:
        assert [step.number for step in again.steps()] == [trained, trained + 1]
    assert again.first_step in (trained, trained + 1)  # a step may have been saved, and not told of
    assert [step.number for step in again.history()] == list(range(trained + 2))


def test_what_goes_wrong_is_one_error_in_the_program(place: Path):
    with pytest.raises(polyrl.ConfigError, match=r"train\.stepz: unknown key; did you mean train\.steps\?"):
        polyrl.load("recipe.toml", {"train.stepz": 3})
    with pytest.raises(polyrl.ConfigError, match=r"train\.steps: got None"):
        polyrl.load("recipe.toml", {"train.steps": None})
    with pytest.raises(polyrl.ConfigError, match=r"model\.path: nowhere: no config\.json there"):
        polyrl.start("recipe.toml", {"model.path": "nowhere"})
    assert not Path("runs").exists()
    (place / "hopeless.py").write_text("def score(given):\n    raise ValueError('never')\n")
    with (
        pytest.raises(polyrl.UserError, match="never") as caught,
        polyrl.start("recipe.toml", {"data.reward": "hopeless:score"}) as run,
    ):
        for _ in run.steps():
            pass
    assert "\n" not in str(caught.value) and run.status.startswith("failed: ")
    assert processes_in(place) == []


@pytest.mark.chaos
def test_a_run_that_is_killed_is_an_error_that_says_so_and_it_can_be_resumed(place: Path):
    with (
        pytest.raises(polyrl.RunFailed, match="its process ended with SIGKILL"),
        polyrl.start("recipe.toml", MANY) as run,
    ):
        for step in run.steps():
            if step.number == 1:
                os.kill(run.pid, signal.SIGKILL)
    assert until_nothing_runs_in(place) == []
    with polyrl.resume(RUN) as again:
        assert again.first_step - next(again.steps()).number in (0, 1)  # a step may have been saved, and not told of


@pytest.mark.chaos
def test_a_run_starts_within_an_event_loop_and_from_another_thread(place: Path):
    heard: dict[str, list[int]] = {}

    def watch(name: str) -> None:
        with polyrl.start("recipe.toml", {"data.reward": "own:score", "train.steps": 1}, run_dir=name) as run:
            heard[name] = [step.number for step in run.steps()]

    async def within() -> None:
        watch("in-a-loop")

    asyncio.run(within())
    thread = threading.Thread(target=watch, args=("in-a-thread",))
    thread.start()
    thread.join()
    assert heard == {"in-a-loop": [0], "in-a-thread": [0]}


PROGRAM = """
import polyrl
with polyrl.start("recipe.toml", {"train.steps": 1000, "data.reward": "own:score"}) as run:
    for step in run.steps():
        print(step.number, flush=True)
"""


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, id="interrupted"),
        pytest.param(signal.SIGKILL, id="killed", marks=pytest.mark.chaos),  # its run is killed above
    ],
)
def test_a_program_that_is_interrupted_or_killed_leaves_no_process_and_a_run_that_goes_on(
    place: Path, number: signal.Signals
):
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    assert [int(program.stdout.readline()) for _ in range(2)] == [0, 1]
    program.send_signal(number)
    _, errors = program.communicate(timeout=100)
    if number == signal.SIGINT:
        assert errors.strip().endswith("KeyboardInterrupt")
        assert processes_in(place) == []
    assert until_nothing_runs_in(place) == []
    trained = len(Path(RUN, "metrics.jsonl").read_text().splitlines())
    with polyrl.resume(RUN) as again:
        assert again.first_step >= trained >= 2
        assert next(again.steps()).number >= trained
