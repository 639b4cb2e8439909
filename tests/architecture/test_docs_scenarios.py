"""The page of scenarios lists every key, what it may be and its default, and its example plays."""

import re
from pathlib import Path

import msgspec
import pytest
from msgspec import inspect
from tests.architecture.settings_tables import rows_of, should_be

from polyrl.scheduling.rules.parallelism import DecodeSpeed, ModelShape
from polyrl.sim import scenario as s
from polyrl.sim.library import load_scenario
from polyrl.sim.simulation import Simulation

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "scenarios.md"
SECTIONS: dict[str, type[msgspec.Struct]] = {
    "run": s.RunSection,
    "trainer": s.TrainerSection,
    "engine": s.EngineSection,
    "fleet": s.SimFleetSection,
    "network": s.NetworkSection,
    "workload": s.WorkloadSection,
    "domains": s.SimDomainSection,
    "domains.reward": s.RewardSection,
    "domains.environment": s.SimEnvironmentSection,
    "hosts": s.SimHostsSection,
    "supply": s.SupplySection,
    "supply.events": s.SupplyEvent,
    "faults": s.FaultsSection,
    "rounds": s.RoundsConfig,
    "routing": s.RoutingConfig,
    "seeding": s.SeedingConfig,
    "hand_back": s.HandBackConfig,
    "parallelism": s.ParallelismConfig,
    "parallelism.model": ModelShape,
    "parallelism.speed": DecodeSpeed,
    "rewards": s.RewardConfig,
    "fleet_rules": s.FleetRules,
    "weight_delivery": s.WeightDeliveryConfig,
    "scaling": s.ScalingConfig,
    "environments": s.EnvironmentRules,
}


def test_every_section_of_a_scenario_is_on_the_page():
    info = inspect.type_info(s.Scenario)
    assert isinstance(info, inspect.StructType)
    named = {field.name for field in info.fields if not isinstance(field.type, inspect.StrType)}
    assert named == {section.partition(".")[0] for section in SECTIONS}


@pytest.mark.parametrize("section", SECTIONS)
def test_the_page_has_every_key_of_a_section_with_its_values_and_default(section):
    assert rows_of(PAGE, section) == should_be(SECTIONS[section])


def test_the_example_of_the_page_plays(tmp_path):
    examples = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    whole = next(example for example in examples if example.startswith("name ="))
    path = tmp_path / "example.toml"
    path.write_text(whole)
    scenario = load_scenario(str(path), ["run.steps=2"])
    sim = Simulation(scenario, 0)
    sim.run()
    assert sim.law_violations == []
