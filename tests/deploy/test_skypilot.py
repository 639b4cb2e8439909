"""The tasks of SkyPilot: their commands, and, where `make test-deploy` has installed it, SkyPilot's own word."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.deploy.commands import commands_of, parsed

from polyrl.config.recipe_files import load_recipe
from polyrl.wire.credentials import TOKEN_VARIABLE

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "skypilot"
SKY = ROOT / ".venv-skypilot" / "bin" / "python"
GIVEN = {"JOIN": "http://10.0.0.1:5000", "MODEL": "models/tiny"}
READ = """
import sys, sky
for file in sys.argv[1:]:
    task = sky.Task.from_yaml_config(sky.utils.yaml_utils.read_yaml(file), env_overrides={"JOIN": "http://h:1",
        "MODEL": "m"}, secrets_overrides={"POLYRL_TOKEN": "x"})
    print(task.name, *sorted(str(one.use_spot) for one in task.resources))
"""


def task(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


def test_the_trainer_begins_and_goes_on_with_one_run():
    wanted = task("train.yaml")
    resuming, beginning = map(parsed, commands_of(wanted["run"], wanted["envs"]))
    assert resuming.resume == beginning.run_dir == wanted["envs"]["RUN_DIR"]
    recipe = load_recipe(beginning.recipe, beginning.settings)
    assert [recipe.manager.port, recipe.weights.port] == wanted["resources"]["ports"]
    assert recipe.manager.host == "0.0.0.0"


def test_a_worker_joins_with_what_it_is_given():
    wanted = task("worker.yaml")
    assert {name for name, value in wanted["envs"].items() if value is None} == GIVEN.keys()
    assert wanted["secrets"] == {TOKEN_VARIABLE: None}
    [worker] = map(parsed, commands_of(wanted["run"], wanted["envs"] | GIVEN))
    assert (worker.join, worker.model, worker.spot) == (GIVEN["JOIN"], GIVEN["MODEL"], "auto")
    assert wanted["resources"]["use_spot"]


@pytest.mark.skipif(not SKY.exists(), reason="no SkyPilot here; `make test-deploy` installs it")
def test_skypilot_takes_both():
    files = [str(FOLDER / name) for name in ("train.yaml", "worker.yaml")]
    done = subprocess.run([SKY, "-c", READ, *files], check=True, capture_output=True, text=True, timeout=100)
    assert done.stdout.split("\n")[:2] == ["polyrl-train False", "polyrl-worker True True True"]
