"""The conformance suite as somebody else runs it: a copy of its folder, beside a trainer that has nothing of ours."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "conformance"
NOT_THERE = ("polyrl", "tests", "torch", "numpy", "msgspec")
WRONG = """\
from conformance.plain import PlainServer, PlainTrainer


class RetriesCountServer(PlainServer):
    def ask(self, session, saw, retry):
        return super().ask(session, saw, 0)


class TurnsCountTrainer(PlainTrainer):
    def mean_reward(self, episodes):
        paid = [one.reward for one in episodes for _ in one.calls if not one.failed]
        return sum(paid) / len(paid)
"""


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    shutil.copytree(FOLDER, tmp_path / "conformance", ignore=shutil.ignore_patterns("our*.py", "__pycache__"))
    for name in NOT_THERE:
        (tmp_path / f"{name}.py").write_text("raise ImportError('it is not installed here')\n")
    (tmp_path / "their_trainer.py").write_text(WRONG)
    return tmp_path


def run_for(trainer: str, server: str, folder: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "pytest", "-q", "conformance", "-p", "no:cacheprovider"]
    named = {"CONFORMANCE_TRAINER": trainer, "CONFORMANCE_SERVER": server}
    env = {**os.environ, **named, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": ""}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=110)
    return done.returncode, done.stdout + done.stderr


def test_a_copy_of_the_folder_runs_without_polyrl_and_the_rules_alone_pass_every_case(elsewhere: Path):
    code, said = run_for("conformance.plain:PlainTrainer", "conformance.plain:PlainServer", elsewhere)
    assert code == 0, said
    assert "failed" not in said and " passed" in said


def test_a_trainer_that_is_wrong_in_one_thing_is_told_what_goes_wrong(elsewhere: Path):
    code, said = run_for("their_trainer:TurnsCountTrainer", "their_trainer:RetriesCountServer", elsewhere)
    assert code == 1
    assert "An episode with more turns counts more" in said, said
    assert "is drawn anew, and both answers are trained" in said, said
    assert "test_each_drawn_token" not in said, "the other tests count all the same"
