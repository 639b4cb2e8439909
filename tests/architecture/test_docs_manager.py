"""The manager's page lists every setting with its range and default, and every route; the wire's page every frame."""

import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from msgspec import inspect
from tests.architecture.settings_tables import rows_of, should_be

from polyrl.manager.routes import ROUTES
from polyrl.manager.settings import ManagerSettings
from polyrl.wire import frames

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
MANAGER = REFERENCE / "manager.md"
WIRE = REFERENCE / "wire.md"


def sections() -> dict[str, type[msgspec.Struct]]:
    info = inspect.type_info(ManagerSettings)
    assert isinstance(info, inspect.StructType)
    return {field.name: field.type.cls for field in info.fields if isinstance(field.type, inspect.StructType)}


def names_of_frames(union: object) -> set[str]:
    return {frame.__name__ for frame in get_args(union)}


@pytest.mark.parametrize("section", sections())
def test_the_page_has_every_key_of_a_section_with_its_values_and_default(section):
    assert rows_of(MANAGER, section) == should_be(sections()[section])


def test_the_page_has_every_key_outside_sections_with_its_values_and_default():
    outside = [row for row in should_be(ManagerSettings) if row[0].strip("`") not in sections()]
    assert rows_of(MANAGER, "manager") == outside


def test_the_page_has_no_section_that_is_none():
    named = set(re.findall(r"^### `([^`]+)`$", MANAGER.read_text(encoding="utf-8"), re.MULTILINE))
    assert named == {*sections(), "manager"}


def test_the_page_has_exactly_the_routes_there_are():
    routes = {f"{route.method} {route.path}" for route in ROUTES}
    written = re.findall(r"^\| `((?:GET|POST) [^`]+)` ", MANAGER.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(written) == sorted(routes)


@pytest.mark.parametrize(
    ("heading", "union"),
    [
        ("Worker to manager", frames.FromWorker),
        ("Manager to worker", frames.ToWorker),
        ("Trainer to manager", frames.FromTrainer),
        ("Manager to trainer", frames.ToTrainer),
    ],
)
def test_the_page_of_the_wire_has_exactly_the_frames_there_are(heading, union):
    text = WIRE.read_text(encoding="utf-8")
    found = re.search(rf"^### {heading}\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    named = [
        name for row in re.findall(r"^\| (`[^|]+) \|", found[1], re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    ]
    assert sorted(named) == sorted(names_of_frames(union))
