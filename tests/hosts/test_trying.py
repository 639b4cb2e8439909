"""`polyrl env try`: an episode in the terminal, and one line for every mistake."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "environments.md"
NEEDS_TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


def env_try(*args: str, typed: str = "", cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "polyrl", "env", *args]
    given = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        command, input=typed, capture_output=True, text=True, timeout=100, cwd=cwd, env=given, check=False
    )


def test_a_person_plays_the_class_of_the_guide_and_sees_the_conversation_and_the_reward(tmp_path: Path):
    (tmp_path / "guessing.py").write_text(re.findall(r"```python\n(# guessing.*?)```", GUIDE.read_text(), re.DOTALL)[0])
    typed = "nothing\n" + "\n".join(map(str, (2, 1, 3))) + "\n"
    ended = env_try("try", "guessing:Guessing", "largest=3", "--human", typed=typed, cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "I think of a number from 1 to 3. Guess it." in ended.stdout
    assert "That is no number." in ended.stdout
    assert re.search(r"reward 1, correct, [234] turns\n$", ended.stdout)


def test_letters_by_chance_play_to_an_end_that_is_told_as_json():
    told = json.loads(env_try("try", "treasure", "--json").stdout)
    assert told.keys() == {"reward", "correct", "turns", "parts", "why"}


def test_an_input_that_ends_early_is_a_failure_without_a_reward():
    ended = env_try("try", "calculator", "--human")
    assert ended.returncode == 1
    assert ended.stdout.endswith("failed, with no reward: the input ended before the episode\n")


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["try", "calcuator"], "did you mean calculator?"),
        (["try"], "expected an environment's name next"),
        (["calculator"], "got 'calculator', expected try, play or check"),
        (["play", "calculator"], "--join: missing"),
        (["play", "calculator", "--join", "http://127.0.0.1:1", "--slots", "0"], "--slots: 0; expected 1 to"),
        (["try", "calculator", "larget=3"], "environment_args.larget: unknown key; did you mean largest?"),
        (["try", "calculator", "largest=0"], "environment calculator: ValueError: largest: 0; expected a number"),
        (["try", "nobody_here:Game"], "nobody_here cannot be imported"),
        (["try", "json:dumps"], "environment"),
        pytest.param(["try", "calculator", "--model", "nowhere"], "nowhere", marks=NEEDS_TORCH),
        (["try", "calculator", "--turns", "0"], "--turns"),
    ],
)
def test_a_mistake_is_one_line(args: list[str], line: str, tmp_path: Path):
    ended = env_try(*args, cwd=tmp_path)
    assert ended.returncode == 2
    assert line in ended.stderr
    assert ended.stderr.count("\n") == 1


@NEEDS_TORCH
def test_a_model_of_characters_plays_without_a_chat_template(tmp_path: Path):
    from polyrl.config.recipe import ArithmeticTask
    from polyrl.starters.arithmetic import make_model

    folder = tmp_path / "model"
    make_model(folder, seed=0, task=ArithmeticTask(), num_steps=1)
    ended = env_try("try", "treasure", "style=letters", "--model", str(folder), "--tokens", "30", "--json")
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["turns"] >= 1


def test_the_recipe_of_the_guide_can_be_read():
    from polyrl.config import build
    from polyrl.config.recipe import Recipe

    recipe, validated = map(tomllib.loads, re.findall(r"```toml\n(.*?)```", GUIDE.read_text(), re.DOTALL))
    assert build(recipe, Recipe).data.environment == "textarena"
    assert build({**recipe, **validated}, Recipe).validates
