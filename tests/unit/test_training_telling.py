"""What a training run tells its trackers of validation."""

import asyncio
from pathlib import Path

from tests.telemetry.test_metrics import a_line

from polyrl.cli.training.display import Display
from polyrl.cli.training.processes import Address
from polyrl.cli.training.telling import Telling
from polyrl.config.recipe_files import load_recipe
from polyrl.telemetry.metrics import read_metrics, read_steps
from polyrl.trainer.loop import StepReport
from polyrl.trainer.step import Added, StepStats
from polyrl.wire.dial import Dialer

URL = "http://127.0.0.1:9"


def test_validation_of_the_last_version_is_on_file_and_is_no_step(tmp_path: Path):
    telling = Telling(
        load_recipe("arithmetic", []), tmp_path, Address(URL, 9), Display("tiny", 2, Dialer(URL, "a token"))
    )
    asyncio.run(telling.validated(2, {"validation/pass@1": 0.5}))
    telling.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 2, "validation/pass@1": 0.5}]
    assert read_steps(tmp_path / "metrics.jsonl") == []


def test_a_step_that_trained_nothing_has_no_lengths(tmp_path: Path):
    display = Display("tiny", 2, Dialer(URL, "a token"))
    telling = Telling(load_recipe("arithmetic", []), tmp_path, Address(URL, 9), display)
    seconds = {"total": 1.0, "generate": 1.0, "train": 0.0, "wait": 0.0, "save": 0.0, "publish": 0.1}
    stats = StepStats(0, Added(), updated=False, metrics={})
    report = StepReport(0, stats, a_line(0, num_groups=0), [0.1, 0.1], [], [], {}, 0, 1, seconds)
    asyncio.run(telling.step_ended(report))
    telling.close()
    [line] = read_metrics(tmp_path / "metrics.jsonl")
    assert line["reward/mean"] == 0.1
    assert line["token/response_length/mean"] is line["token/prompt_length/mean"] is None
