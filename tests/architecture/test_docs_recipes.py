"""The page of recipes has every section; shipped recipes and examples can be read."""

import re
import tomllib
from importlib import resources
from pathlib import Path

import pytest
from website.reference import RECIPE, sections_of

from polyrl.config import build, dump_toml
from polyrl.config import recipe as r
from polyrl.sim.scenario import Scenario

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "recipes.md"
SHIPPED = sorted(Path(str(resources.files("polyrl") / "recipes")).glob("*.toml"))


def test_every_section_is_on_the_page_or_is_one_of_a_scenario_too():
    of_scenarios = sections_of(Scenario)
    here = {name: kind for name, kind in sections_of(r.Recipe).items() if name not in RECIPE}
    assert here.keys() == {
        "rounds", "routing", "seeding", "hand_back", "parallelism", "fleet_rules", "weight_delivery", "scaling"
    }  # fmt: skip
    assert all(of_scenarios[name] is kind for name, kind in here.items())
    page = PAGE.read_text(encoding="utf-8")
    assert all(f"[`{name}`](scenarios.md#{name})" in page for name in here)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_recipe_reads_and_is_called_as_its_file(path):
    recipe = build(tomllib.loads(path.read_text(encoding="utf-8")), r.Recipe, source=path.name)
    assert recipe.name == path.stem
    assert recipe.about
    assert build(tomllib.loads(dump_toml(recipe)), r.Recipe) == recipe


def test_there_is_a_recipe_for_the_arithmetic_task():
    assert "arithmetic" in [path.stem for path in SHIPPED]


def test_the_examples_of_the_page_read():
    examples = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert examples
    for example in examples:
        build(tomllib.loads(example), r.Recipe)
