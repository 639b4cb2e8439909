"""What may be changed in a run that goes on: nothing that its manager's journal was written with."""

from pathlib import Path

import pytest

from polyrl.cli.training.checkpoints import read_recipe, write_recipe
from polyrl.config.recipe import scheduler_config
from polyrl.config.recipe_files import load_recipe
from polyrl.errors import UserError


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write_recipe(tmp_path, load_recipe("arithmetic"))
    return tmp_path


@pytest.mark.parametrize(
    "override",
    [
        "train.steps=7",
        "train.stop_at_reward=0.5",
        "train.micro_batch_tokens=99999",
        "fleet.workers=3",
        "fleet.price_usd_per_hour=3",
        "manager.host=0.0.0.0",
        "weights.groups=2",
        "track.tensorboard=true",
        "validation.every_steps=3",
        "checkpoint.keep_last=9",
    ],
)
def test_what_may_be_changed_leaves_what_the_manager_was_told(run_dir: Path, override: str):
    before, after = read_recipe(run_dir, []), read_recipe(run_dir, [override])
    assert before != after
    assert scheduler_config(before, [50]) == scheduler_config(after, [50])


@pytest.mark.parametrize(
    "override",
    [
        "train.price_usd_per_hour=3",
        "rewards.processes=3",
        "rewards.timeout_s=5",
        "rounds.samples_per_prompt=5",
        "optimizer.lr=0.5",
        "train.seed=4",
    ],
)
def test_everything_else_is_refused_by_its_name(run_dir: Path, override: str):
    with pytest.raises(UserError, match=f"^{override.partition('=')[0]}: cannot be changed"):
        read_recipe(run_dir, [override])
