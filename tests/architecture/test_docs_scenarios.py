"""The page of scenarios lists every key, what it may be and its default, and its example plays."""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec import NODEFAULT, inspect

from polyrl.config.dump import show_value
from polyrl.scheduling.parallelism import DecodeSpeed, ModelShape
from polyrl.sim import scenario as s
from polyrl.sim.library import load_scenario
from polyrl.sim.simulation import Simulation

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "scenarios.md"
SECTIONS: dict[str, type[msgspec.Struct]] = {
    "run": s.RunSection,
    "trainer": s.TrainerSection,
    "engine": s.EngineSection,
    "fleet": s.FleetSection,
    "network": s.NetworkSection,
    "workload": s.WorkloadSection,
    "domains": s.DomainSection,
    "domains.reward": s.RewardSection,
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
}


def facts(section: type[msgspec.Struct]) -> Iterator[tuple[str, str, str]]:
    """(key, what it may be, default) of every key, as the page writes them."""
    info = inspect.type_info(section)
    assert isinstance(info, inspect.StructType)
    for field in info.fields:
        yield field.name, allowed(field.type), default(field)


def allowed(kind: inspect.Type) -> str:
    match kind:
        case inspect.UnionType(types=types):
            return allowed(next(one for one in types if not isinstance(one, inspect.NoneType)))
        case inspect.LiteralType(values=values):
            return ", ".join(f"`{value}`" for value in sorted(map(str, values)))
        case inspect.IntType() | inspect.FloatType():
            name = "integer" if isinstance(kind, inspect.IntType) else "number"
            bounds = [(">", kind.gt), (">=", kind.ge), ("<", kind.lt), ("<=", kind.le)]
            return " ".join([name, *(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)])
        case inspect.BoolType():
            return "true, false"
        case inspect.StrType():
            return "text"
        case inspect.ListType():
            return "list"
        case inspect.StructType():
            return "table"
        case _:
            raise AssertionError(f"no words for {kind}")


def default(field: inspect.Field) -> str:
    if field.default_factory is not NODEFAULT:
        value = field.default_factory()
    elif field.default is NODEFAULT:
        return "required"
    else:
        value = field.default
    match value:
        case None:
            return "none"
        case msgspec.Struct():
            return "its defaults"
        case list():
            return f"`{[list(one) for one in value]}`"
        case float():
            return f"`{value:.6g}`"
        case _:
            return f"`{show_value(value)}`"


def rows_of(section: str) -> list[str]:
    found = re.search(rf"^### `{re.escape(section)}`\n(.*?)(?=^##|\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [] if found is None else [line for line in found[1].splitlines() if line.startswith("| `")]


def test_every_section_of_a_scenario_is_on_the_page():
    info = inspect.type_info(s.Scenario)
    assert isinstance(info, inspect.StructType)
    named = {field.name for field in info.fields if not isinstance(field.type, inspect.StrType)}
    assert named == {section.partition(".")[0] for section in SECTIONS}


@pytest.mark.parametrize("section", SECTIONS)
def test_the_page_has_every_key_of_a_section_with_its_values_and_default(section):
    written = [tuple(cell.strip() for cell in row.split("|")[1:4]) for row in rows_of(section)]
    assert written == [(f"`{key}`", values, default) for key, values, default in facts(SECTIONS[section])]


def test_the_example_of_the_page_plays(tmp_path):
    examples = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    whole = next(example for example in examples if example.startswith("name ="))
    path = tmp_path / "example.toml"
    path.write_text(whole)
    scenario = load_scenario(str(path), ["run.steps=2"])
    sim = Simulation(scenario, 0)
    sim.run()
    assert sim.law_violations == []
