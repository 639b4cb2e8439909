"""The page of scenarios has every section, and its example plays."""

import re
from pathlib import Path

from msgspec import inspect
from website.reference import SCENARIO

from polyrl.sim import scenario as s
from polyrl.sim.library import load_scenario
from polyrl.sim.simulation import Simulation

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "scenarios.md"


def test_every_section_of_a_scenario_is_on_the_page():
    info = inspect.type_info(s.Scenario)
    assert isinstance(info, inspect.StructType)
    named = {field.name for field in info.fields if not isinstance(field.type, inspect.StrType)}
    assert named == {section.partition(".")[0] for section in SCENARIO}


def test_the_example_of_the_page_plays(tmp_path):
    examples = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    whole = next(example for example in examples if example.startswith("name ="))
    path = tmp_path / "example.toml"
    path.write_text(whole)
    scenario = load_scenario(str(path), ["run.steps=2"])
    sim = Simulation(scenario, 0)
    sim.run()
    assert sim.law_violations == []
