"""`polyrl.load`: a recipe from Python, and one line for a mistake in it."""

from pathlib import Path
from typing import Any

import pytest

import polyrl

SMALL: dict[str, Any] = {
    "name": "small", "model": {"path": "model"}, "data": {"source": "rows.jsonl", "reward": "mine:score"},
}  # fmt: skip


def test_a_recipe_is_loaded_by_name_from_a_file_a_dict_or_another_one(tmp_path: Path):
    shipped = polyrl.load("arithmetic", {"train.steps": 3})
    file = tmp_path / "mine.toml"
    file.write_text('name = "small"\nmodel.path = "model"\ndata.source = "rows.jsonl"\ndata.reward = "mine:score"\n')
    for one in (shipped, polyrl.load(str(file), {"train.steps": 3}), polyrl.load(SMALL, {"train": {"steps": 3}})):
        assert one.train.steps == 3
    assert polyrl.load(shipped, {"fleet.workers": 2}).fleet.workers == 2
    assert polyrl.load(shipped) == shipped


@pytest.mark.parametrize(
    ("recipe", "overrides", "line"),
    [
        ("nope", None, "nope: no such recipe; expected a file ending in .toml, or one of: arithmetic"),
        ("arithmetic", {"train.stepz": 3}, "train.stepz: unknown key; did you mean train.steps?"),
        ("arithmetic", {"train.steps": "x"}, 'train.steps: got "x", expected an integer'),
        ("arithmetic", {"train.steps": None}, "train.steps: got None; expected a value, or leave the key out"),
        ("arithmetic", {"train.steps": float("nan")}, "train.steps: got nan, expected a finite number"),
        ("arithmetic", ["train.steps=3"], "overrides: got ['train.steps=3']; expected values by dotted key"),
        ({"name": "x"}, None, "model: missing, expected a table"),
    ],
)
def test_a_mistake_is_one_line(recipe: Any, overrides: Any, line: str):
    with pytest.raises(polyrl.ConfigError) as raised:
        polyrl.load(recipe, overrides)
    assert str(raised.value).startswith(line) and "\n" not in str(raised.value)
