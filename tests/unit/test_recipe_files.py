"""Recipes by name and by path, with overrides, and one line for what is wrong."""

from pathlib import Path

import pytest

from polyrl.cli.main import main
from polyrl.config import build
from polyrl.config.places import with_whole_paths
from polyrl.config.recipe import Recipe
from polyrl.config.recipe_files import list_recipes, load_recipe
from polyrl.errors import ConfigError

RECIPE = """\
name = "mine"
[model]
path = "models/x"
[data]
source = "arithmetic"
"""


@pytest.mark.parametrize("name", [name for name, _ in list_recipes()])
def test_every_recipe_that_ships_is_valid_and_says_what_it_is_about(name: str):
    recipe = load_recipe(name)
    assert recipe.name == name and recipe.about


def test_a_file_is_read_and_overrides_come_last(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(RECIPE)
    recipe = load_recipe(str(path), ["train.steps=3", "model.path=elsewhere"])
    assert (recipe.train.steps, recipe.model.path) == (3, "elsewhere")


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (RECIPE, ["lr=1e-4"], r"lr: unknown key; did you mean optimizer\.lr\? \(given as lr=1e-4\)"),
        (RECIPE, ["algorithm.critic.lr=1e-4"], r"algorithm\.critic: .* \(given as algorithm\.critic\.lr=1e-4\)"),
        (RECIPE, ["train.step=3"], r"train\.step: unknown key; did you mean train\.steps\?"),
        (RECIPE, ["train.steps=0"], r"train\.steps: got 0, expected an integer >= 1"),
        (RECIPE, ["train"], "expected section.key=value"),
        ("name = ", [], r"mine\.toml:1: "),
        (None, [], r"mine\.toml: no such file"),
    ],
)
def test_a_mistake_is_one_line_with_its_place(tmp_path: Path, text: str | None, overrides: list[str], message: str):
    path = tmp_path / "mine.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message) as wrong:
        load_recipe(str(path), overrides)
    assert "\n" not in str(wrong.value)


def test_an_unknown_name_is_answered_with_those_there_are():
    with pytest.raises(ConfigError, match=r"arithmetics: no such recipe; .* one of: .*; did you mean arithmetic\?"):
        load_recipe("arithmetics")


def test_whole_paths_are_the_same_from_every_folder_and_what_is_no_path_stays(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides = [
        "model.path=models/tiny",
        "algorithm.kl=loss",
        "algorithm.reference=../before",
        "data.validation=v.jsonl",
        "manager.tls_cert=c.pem",
        "manager.tls_key=k.pem",
    ]
    whole = with_whole_paths(load_recipe("arithmetic", overrides))
    assert whole.model.path == str(tmp_path / "models/tiny")
    assert whole.algorithm.reference == str(tmp_path.parent / "before") and whole.algorithm.critic.path == ""
    assert (whole.data.source, whole.data.validation) == ("arithmetic", str(tmp_path / "v.jsonl"))
    assert (whole.manager.tls_cert, whole.manager.ca) == (str(tmp_path / "c.pem"), "")
    monkeypatch.chdir("/")
    assert with_whole_paths(whole) == whole
    domain = {"name": "sums", "source": "sums.jsonl", "reward": "math"}
    two = build({"name": "two", "model": {"path": "m"}, "data": {"domains": [domain]}}, Recipe)
    assert with_whole_paths(two).data.domains[0].source == "/sums.jsonl"
    several = {**domain, "validation": {"easy": "e.jsonl", "sums": "arithmetic"}}
    two = build({"name": "two", "model": {"path": "m"}, "data": {"domains": [several]}}, Recipe)
    assert with_whole_paths(two).data.domains[0].validation == {"easy": "/e.jsonl", "sums": "arithmetic"}


def test_the_command_lists_them_and_says_so_when_none_is_named(capsys):
    assert main(["train", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [name for name, _ in list_recipes()]
    assert main(["train"]) == 2
    assert "a name of `polyrl train --list`" in capsys.readouterr().err
