"""What a training run tells its trackers of validation."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from tests.telemetry.test_metrics import a_line

from polyrl.config.recipe_files import load_recipe
from polyrl.run.display import Display
from polyrl.run.processes import ManagerAddress
from polyrl.run.reporting import Reporter
from polyrl.scheduling.core.ledger import StepLine
from polyrl.telemetry.metric_names import describe
from polyrl.telemetry.metrics import MetricsFile, read_metrics, read_steps
from polyrl.trainer.reports import StepReport
from polyrl.trainer.step_stats import Added, StepStats
from polyrl.wire.dial import Dialer

URL = "http://127.0.0.1:9"


def test_validation_of_the_last_version_is_on_file_and_is_no_step(tmp_path: Path):
    reporter = Reporter(
        load_recipe("arithmetic", []), tmp_path, ManagerAddress(URL, 9), Display("tiny", 2, Dialer(URL, "a token"))
    )
    asyncio.run(reporter.validated(2, {"validation/pass@1": 0.5}))
    reporter.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 2, "validation/pass@1": 0.5}]
    assert read_steps(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize("before", ["a line of its own", "a step's line", "none"])
def test_a_run_that_goes_on_keeps_what_was_validated_of_the_version_it_starts_from(tmp_path: Path, before: str):
    display = Display("tiny", 4, Dialer(URL, "a token"))
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.log(2, {"validation/pass@1": 0.25, "reward/mean": 0.1})
    if before != "none":
        more = {"reward/mean": 0.2} if before == "a step's line" else {}
        file.log(3, {"validation/pass@1": 0.5, **more})
    file.close()
    reporter = Reporter(load_recipe("arithmetic", []), tmp_path, ManagerAddress(URL, 9), display, first_step=3)
    assert reporter.knows(3) is (before != "none")
    assert not reporter.knows(2)
    reporter.close()  # no step was trained
    assert read_metrics(tmp_path / "metrics.jsonl")[1:] == [
        {"step": 3, "validation/pass@1": 0.5} for _ in range(before != "none")
    ]


def test_a_step_that_trained_nothing_has_no_lengths(tmp_path: Path):
    display = Display("tiny", 2, Dialer(URL, "a token"))
    reporter = Reporter(load_recipe("arithmetic", []), tmp_path, ManagerAddress(URL, 9), display)
    seconds = {"total": 1.0, "generate": 1.0, "train": 0.0, "idle": 0.0, "save": 0.0, "publish": 0.1}
    stats = StepStats(0, Added(), metrics={})
    report = StepReport(0, stats, a_line(0, num_groups=0), [0.1, 0.1], [], [], {}, 0, 1, seconds)
    asyncio.run(reporter.step_ended(report))
    reporter.close()
    [line] = read_metrics(tmp_path / "metrics.jsonl")
    assert [name for name in line if describe(name) is None] == []
    assert line["reward/mean"] == 0.1
    assert line["token/response_length/mean"] is line["token/prompt_length/mean"] is None


def test_parts_of_rewards_become_no_more_metrics_than_a_person_can_look_at(tmp_path: Path):
    """A host gave each of its episodes 33 others: thousands of names, and the page had no room for later metrics."""
    display = Display("tiny", 9, Dialer(URL, "a token"))
    reporter = Reporter(load_recipe("arithmetic", []), tmp_path, ManagerAddress(URL, 9), display)
    seconds = {"total": 1.0, "generate": 1.0, "train": 0.0, "idle": 0.0, "save": 0.0, "publish": 0.1}
    for step in range(3):
        parts = {"turns": 3.0, **{f"x{step}-{number}": 1.0 for number in range(500)}}
        stats = StepStats(step, Added(), metrics={})
        report = StepReport(step, stats, a_line(step), [0.1], [5], [5], {}, 0, 0, seconds, parts)
        asyncio.run(reporter.step_ended(report))
    reporter.close()
    lines = read_metrics(tmp_path / "metrics.jsonl")
    named = {name for line in lines for name in line if name.startswith("reward/") and name.count("/") == 2}
    assert len(named) == 128
    assert all(line["reward/turns/mean"] == 3.0 for line in lines)


class OneFleet:
    advice = None

    def __init__(self, *lines: StepLine) -> None:
        self.lines = list(lines)


@pytest.mark.parametrize(("known", "cost"), [((2, 3), 0.5), ((3,), None)])
def test_the_first_step_of_a_run_that_goes_on_costs_what_came_since_the_one_before(
    tmp_path: Path, known: tuple[int, ...], cost: float | None
):
    display = Display("tiny", 4, Dialer(URL, "a token"))
    reporter = Reporter(load_recipe("arithmetic", []), tmp_path, ManagerAddress(URL, 9), display, first_step=3)
    lines = {2: a_line(2, usd=7.0), 3: a_line(3, usd=7.5)}
    reporter.begin(cast("Any", OneFleet(*(lines[step] for step in known))))
    seconds = {"total": 2.0, "generate": 1.0, "train": 0.0, "idle": 0.5, "save": 0.0, "publish": 0.1}
    stats = StepStats(3, Added(), metrics={})
    asyncio.run(reporter.step_ended(StepReport(3, stats, lines[3], [1.0], [4], [4], {0: 4}, 0, 0, seconds)))
    reporter.close()
    [line] = read_metrics(tmp_path / "metrics.jsonl")
    assert (line["cost/usd_step"], line["cost/usd_total"]) == (cost, 7.5)
    assert (line["time/step_total"], line["idle/trainer_share"]) == (2.0, 0.25)


def test_adaptive_factors_that_changed_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    display = Display("tiny", 4, Dialer(URL, "a token"))
    reporter = Reporter(load_recipe("arithmetic", []), tmp_path, ManagerAddress(URL, 9), display)
    lines = [a_line(0, prompt_factor=1.25, sample_factor=1.25), a_line(1, prompt_factor=1.5, sample_factor=1.25)]
    reporter.begin(cast("Any", OneFleet(*lines)))
    seconds = {"total": 1.0, "generate": 1.0, "train": 0.5, "idle": 0.0}
    for step, line in enumerate(lines):
        stats = StepStats(step, Added(), metrics={})
        asyncio.run(reporter.step_ended(StepReport(step, stats, line, [1.0], [4], [4], {0: 4}, 0, 0, seconds)))
    reporter.close()
    said = "".join(capsys.readouterr())
    assert said.count("rounds.prompt_factor") == 1
    assert "step 1: rounds.prompt_factor from 1.25 to 1.5: the fastest for the lengths seen" in " ".join(said.split())
    assert [one["rounds/prompt_factor"] for one in read_metrics(tmp_path / "metrics.jsonl")] == [1.25, 1.5]


def test_a_step_of_the_past_is_told_without_what_is_not_known_of_it_and_validation_waits_for_its_own(tmp_path: Path):
    display = Display("tiny", 4, Dialer(URL, "a token"))
    reporter = Reporter(load_recipe("arithmetic", []), tmp_path, ManagerAddress(URL, 9), display, first_step=1)
    asyncio.run(reporter.validated(1, {"validation/pass@1": 0.5}))
    for step, line, seconds in ((0, None, {}), (1, a_line(1), {"save": 0.1, "publish": 0.2})):
        stats = StepStats(step, Added(), metrics={})
        seconds = {"total": 1.0, "generate": 1.0, "train": 0.5, "idle": 0.0, **seconds}
        asyncio.run(reporter.step_ended(StepReport(step, stats, line, [1.0], [4], [4], {0: 4}, 0, 0, seconds)))
    reporter.close()
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert (first["step"], first["reward/mean"], first["time/step_publish"]) == (0, 1.0, None)
    assert "cost/usd_total" not in first and "validation/pass@1" not in first
    assert (second["validation/pass@1"], second["time/step_publish"]) == (0.5, 0.2)


def test_validation_that_nobody_was_told_of_is_told_with_its_step_by_whoever_goes_on(tmp_path: Path):
    """Killed between making step 2 safe and telling of it: version 2 is not validated again, its step is trained."""
    recipe, display = load_recipe("arithmetic", []), Display("tiny", 4, Dialer(URL, "a token"))
    before = Reporter(recipe, tmp_path, ManagerAddress(URL, 9), display, first_step=2)
    asyncio.run(before.validated(2, {"validation/pass@1": 0.5}))
    after = Reporter(recipe, tmp_path, ManagerAddress(URL, 9), display, first_step=3)
    assert not after.knows(3)
    for step in (2, 3):
        stats, seconds = (
            StepStats(step, Added(), metrics={}),
            {"total": 1.0, "generate": 1.0, "train": 0.5, "idle": 0.0},
        )
        asyncio.run(after.step_ended(StepReport(step, stats, None, [1.0], [4], [4], {0: 4}, 0, 0, seconds)))
    after.close()
    told = [(line["step"], line.get("validation/pass@1")) for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert told == [(2, 0.5), (3, None)]


def test_a_version_whose_validation_is_on_file_is_not_validated_again(tmp_path: Path):
    recipe, display = load_recipe("arithmetic", []), Display("tiny", 4, Dialer(URL, "a token"))
    before = Reporter(recipe, tmp_path, ManagerAddress(URL, 9), display)
    asyncio.run(before.validated(2, {"validation/pass@1": 0.5}))
    after = Reporter(recipe, tmp_path, ManagerAddress(URL, 9), display, first_step=2)
    assert after.knows(2)
    after.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 2, "validation/pass@1": 0.5}]
    (tmp_path / "validated.json").write_text('{"version": 2, "ra')
    (tmp_path / "metrics.jsonl").unlink()
    assert not Reporter(recipe, tmp_path, ManagerAddress(URL, 9), display, first_step=2).knows(2)
