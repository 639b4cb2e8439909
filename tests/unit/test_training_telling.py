"""What a training run tells its trackers of validation."""

import asyncio
from pathlib import Path

from polyrl.cli.training.display import Display
from polyrl.cli.training.processes import Address
from polyrl.cli.training.telling import Telling
from polyrl.config.recipe_files import load_recipe
from polyrl.telemetry.metrics import read_metrics, read_steps
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
