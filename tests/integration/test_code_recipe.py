"""`polyrl train code`, shortened: programs of a small model run in the real sandbox, and more of them pass."""

from pathlib import Path
from statistics import fmean
from typing import cast

import pytest
from tests.integration.desks import polyrl
from tests.rewards.sandbox.conftest import bubblewrap

from polyrl.starters import programs
from polyrl.telemetry.metrics import read_metrics

__all__ = ["bubblewrap"]  # a fixture
SHORT = (
    "train.steps=8",
    "optimizer.lr=1e-3",
    "validation.num_prompts=32",
    "validation.every_steps=8",
    "manager.port=0",
)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("bubblewrap")
def test_more_programs_pass_their_tests_after_a_few_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    programs.make_model(tmp_path / "models" / "code", seed=0, num_steps=1200)
    process = polyrl("train", "code", *SHORT, "--quiet")
    said, errors = process.communicate(timeout=250)
    assert process.returncode == 0, said + errors
    told = read_metrics(tmp_path / "runs" / "code" / "metrics.jsonl")
    rewards = [cast("float", line["reward/mean"]) for line in told if "reward/mean" in line]
    passed = [cast("float", line["validation/pass@1"]) for line in told if "validation/pass@1" in line]
    assert len(rewards) == 8 and len(passed) == 2
    assert fmean(rewards[:2]) < 0.6 and fmean(rewards[-2:]) > fmean(rewards[:2]) + 0.2
    assert passed[-1] > passed[0] + 0.2
    crashed = [cast("float", line["reward/crashed/mean"]) for line in told if "reward/mean" in line]
    assert crashed[-1] < crashed[0]
