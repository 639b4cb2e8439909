"""Public environments, unmodified, on a small model: rewards are the same to the last bit whoever is killed."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests.environments.disturbed import EXAMPLES, TrainedHere, package_python

from polyrl.trainer.state import checkpoint

pytestmark = [pytest.mark.environments, pytest.mark.timeout(900)]

SETTINGS = ("data.prompts_per_step=4", "rounds.samples_per_prompt=4")


def skip_without(package: str) -> Path:
    python = package_python()
    program = python / "bin" / "python"
    if not program.exists():
        pytest.skip(f"{python} is not there; `make environments` makes it")
    found = subprocess.run([program, "-c", f"import {package}"], capture_output=True, check=False)
    if found.returncode:
        pytest.skip(f"{package} is not installed in {python}; `make environments` installs it")
    return python


def make_model() -> ModuleType:
    """The module of that name in examples/environments, which is no package."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        spec = importlib.util.spec_from_file_location("make_model", EXAMPLES / "make_model.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest.mark.parametrize(
    ("recipe", "package", "num_steps"),
    [
        ("frozen-lake", "textarena", 8),
        ("chain-sum", "reasoning_gym", 40),  # of 0.13 s: whoever kills must still be in time
        ("sums", "verifiers", 8),
    ],
)
def test_rewards_and_weights_are_those_of_the_undisturbed_run_whoever_is_killed(
    recipe: str, package: str, num_steps: int, tmp_path: Path
):
    python = skip_without(package)
    make_model().make(recipe, python, tmp_path / "model", num_episodes=64, num_steps=60)
    settings = (f"train.steps={num_steps}", *SETTINGS)
    quiet = TrainedHere(recipe, tmp_path / "model", python, tmp_path / "quiet", settings)
    quiet.play({})
    killed = TrainedHere(recipe, tmp_path / "model", python, tmp_path / "killed", settings)
    killed.play({num_steps // 4: "worker", num_steps * 3 // 8: "env", num_steps * 5 // 8: "manager"})
    assert len(quiet.rewards()) == num_steps
    assert killed.rewards() == quiet.rewards()
    expected, found = (checkpoint.load(checkpoint.found(run.run_dir)[-1])[1] for run in (quiet, killed))
    assert expected.keys() == found.keys()
    assert all(torch.equal(one, found[name]) for name, one in expected.items())
