"""The page of recipes lists every key, what it may be and its default; shipped recipes and examples can be read."""

import re
import tomllib
from importlib import resources
from pathlib import Path

import msgspec
import pytest
from msgspec import inspect
from tests.architecture.settings_tables import rows_of, should_be

from polyrl.config import build, dump_toml
from polyrl.config import recipe as r
from polyrl.sim.scenario import Scenario

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "recipes.md"
SECTIONS: dict[str, type[msgspec.Struct]] = {
    "model": r.ModelSection,
    "train": r.TrainSection,
    "algorithm": r.AlgorithmConfig,
    "algorithm.critic": r.CriticConfig,
    "optimizer": r.OptimizerConfig,
    "lora": r.LoraSection,
    "rollout": r.RolloutSection,
    "rollout.impose_lengths": r.ImposedLengthsSection,
    "data": r.DataSection,
    "data.domains": r.DomainSection,
    "data.arithmetic": r.ArithmeticTask,
    "validation": r.ValidationSection,
    "rewards": r.RewardsSection,
    "rewards.functions": r.WeightedReward,
    "environments": r.EnvironmentsSection,
    "fleet": r.FleetSection,
    "manager": r.ManagerSection,
    "weights": r.WeightsSection,
    "checkpoint": r.CheckpointSection,
    "track": r.TrackSection,
    "track.trackers": r.OwnTracker,
}
SHIPPED = sorted(Path(str(resources.files("polyrl") / "recipes")).glob("*.toml"))


def sections_of(struct: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    return {field.name: field.type.cls for field in info.fields if isinstance(field.type, inspect.StructType)}


def test_every_section_is_on_the_page_or_is_one_of_a_scenario_too():
    of_scenarios = sections_of(Scenario)
    here = {name: kind for name, kind in sections_of(r.Recipe).items() if name not in SECTIONS}
    assert here.keys() == {
        "rounds", "routing", "seeding", "hand_back", "parallelism", "fleet_rules", "weight_delivery", "scaling"
    }  # fmt: skip
    assert all(of_scenarios[name] is kind for name, kind in here.items())
    page = PAGE.read_text(encoding="utf-8")
    assert all(f"[`{name}`](scenarios.md#{name})" in page for name in here)


@pytest.mark.parametrize("section", SECTIONS)
def test_the_page_has_every_key_of_a_section_with_its_values_and_default(section):
    rows = should_be(SECTIONS[section])
    if section == "data.domains":  # the keys that data has too are said once
        rows = [row for row in rows if row not in should_be(r.DomainFields)]
    assert rows_of(PAGE, section) == rows


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
