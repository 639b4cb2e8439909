"""`polyrl train` with `rewards.sandbox`: a run within walls, and what is refused before it starts."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from tests.integration.desks import bare_desk, model, polyrl, processes_in
from tests.rewards.sandbox.conftest import bubblewrap

from polyrl.cli.main import main
from polyrl.telemetry.metrics import read_metrics

__all__ = ["bare_desk", "bubblewrap", "model"]  # fixtures
RECIPE = """
name = "tiny"
model.path = "model"
train.steps = 2
rollout.max_new_tokens = 16
data = { source = "rows.jsonl", prompts_per_step = 3, reward = "sandboxed_rewards:score" }
validation.at_start = false
rounds.samples_per_prompt = 4
manager.port = 0
seeding = { initial_s = 0.2, max_step_s = 1.0 }
rewards.sandbox = true
"""
MINE = """
import os, socket

def tried(make):
    try:
        make()
    except OSError:
        return 0.0
    return 1.0

def score(given):
    return {
        "score": given.num_tokens % 3,
        "right_row": float(given.row["number"] < 20),
        "token": tried(lambda: open("runs/tiny/admin.token").read()),
        "journal": tried(lambda: open("runs/tiny/manager.json").read()),
        "network": tried(lambda: socket.create_connection(("127.0.0.1", 9), timeout=1)),
        "file": tried(lambda: open("new", "w").close()),
        "key": float("MY_API_KEY" in os.environ),
    }
"""


@pytest.fixture
def desk(bare_desk: Path) -> Path:
    (bare_desk / "sandboxed_rewards.py").write_text(MINE)
    (bare_desk / "recipe.toml").write_text(RECIPE)
    return bare_desk


@pytest.mark.timeout(200)
@pytest.mark.usefixtures("bubblewrap")
def test_a_run_whose_rewards_are_in_a_sandbox_is_like_any_other(desk: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_API_KEY", "secret")
    process = polyrl("train", "recipe.toml")
    said, errors = process.communicate(timeout=150)
    assert process.returncode == 0, said + errors
    assert (desk / "runs/tiny/admin.token").exists() and not (desk / "new").exists()
    for line in read_metrics(desk / "runs/tiny/metrics.jsonl"):
        assert line["reward/right_row/mean"] == 1.0
        for name in ("token", "journal", "network", "file", "key"):
            assert line[f"reward/{name}/mean"] == 0.0, name
    assert processes_in(desk) == []


@pytest.mark.usefixtures("bubblewrap")
def test_a_file_of_answers_is_scored_in_the_sandbox_too(desk: Path, capsys: pytest.CaptureFixture[str]):
    (desk / "answers.jsonl").write_text('{"prompt": 0, "answer": "x"}\n')
    assert main(["rewards", "recipe.toml", "answers.jsonl", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parts"]["file"] == 0.0
    assert main(["rewards", "recipe.toml", "answers.jsonl", "--json", "rewards.sandbox=false"]) == 0
    assert json.loads(capsys.readouterr().out)["parts"]["file"] == 1.0


def test_without_bubblewrap_nothing_starts_and_one_line_says_why(desk: Path, monkeypatch: pytest.MonkeyPatch):
    folder = desk / "bin"
    folder.mkdir()
    for name in ("git", "sh"):
        if (found := shutil.which(name)) is not None:
            (folder / name).symlink_to(found)
    monkeypatch.setenv("PATH", os.pathsep.join([str(folder), str(Path(sys.executable).parent)]))
    for arguments in (("train", "recipe.toml"), ("train", "recipe.toml", "--dry-run")):
        process = polyrl(*arguments)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 2
        assert errors.splitlines()[-1] == (
            "polyrl: error: rewards.sandbox: bwrap is missing: apt-get install bubblewrap, or leave rewards.sandbox out"
        )
    assert not (desk / "runs").exists()


def test_a_function_that_has_a_sandbox_of_its_own_is_refused(desk: Path, capsys: pytest.CaptureFixture[str]):
    settings = ["data.reward=code"]
    assert main(["train", "recipe.toml", "--dry-run", *settings]) == 2
    assert "rewards.sandbox: code has a sandbox of its own" in capsys.readouterr().err
