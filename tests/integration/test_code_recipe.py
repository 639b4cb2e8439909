"""`polyrl train code`, shortened: programs of a small model run in the real sandbox, and more of them pass."""

from pathlib import Path
from statistics import fmean
from typing import Any, cast

import pytest
from tests.integration.desks import polyrl
from tests.rewards.sandbox.conftest import bubblewrap

from polyrl.starters import programs
from polyrl.telemetry.metrics import read_metrics

__all__ = ["bubblewrap"]  # a fixture
pytestmark = pytest.mark.usefixtures("bubblewrap")


def trained(folder: Path, num_lessons: int, *settings: str) -> list[dict[str, Any]]:
    """Teach a model so many batches of programs, train it, and return what the run tells of its steps."""
    programs.make_model(folder / "models" / "code", seed=0, num_steps=num_lessons)
    process = polyrl("train", "code", "manager.port=0", *settings, "--quiet")
    said, errors = process.communicate(timeout=250)
    assert process.returncode == 0, said + errors
    return read_metrics(folder / "runs" / "code" / "metrics.jsonl")


def test_programs_run_in_the_sandbox_and_those_of_an_untaught_model_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    small = ("train.steps=1", "data.prompts_per_step=4", "validation.at_start=false", "validation.every_steps=0")
    (line,) = trained(tmp_path, 2, *small, "algorithm.zero_variance=keep", "rollout.max_new_tokens=24")
    assert line["reward/mean"] == 0.0 and line["reward/crashed/mean"] > 0.5


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_more_programs_pass_their_tests_after_a_few_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    settings = ("train.steps=8", "optimizer.lr=1e-3", "validation.num_prompts=32", "validation.every_steps=8")
    told = trained(tmp_path, 1200, *settings)
    rewards = [cast("float", line["reward/mean"]) for line in told if "reward/mean" in line]
    passed = [cast("float", line["validation/pass@1"]) for line in told if "validation/pass@1" in line]
    assert len(rewards) == 8 and len(passed) == 2
    assert fmean(rewards[:2]) < 0.6 and fmean(rewards[-2:]) > fmean(rewards[:2]) + 0.2
    assert passed[-1] > passed[0] + 0.2
    crashed = [cast("float", line["reward/crashed/mean"]) for line in told if "reward/mean" in line]
    assert crashed[-1] < crashed[0]
