"""Pages that list what the code has list all of it: the commands, and the libraries we depend on."""

import re
import tomllib
from pathlib import Path

from polyrl.cli.bench import PARTS
from polyrl.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"


def declared_libraries() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"].values()
    wanted = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *(one for ex in extras for one in ex),
    ]
    return {re.split(r"[\[<>=!~; ]", requirement)[0] for requirement in wanted} - {"polyrl"}


def test_the_dependencies_page_gives_a_reason_for_exactly_the_libraries_we_declare():
    page = (REFERENCE / "dependencies.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([^`]+)` ", page, re.MULTILINE)) == declared_libraries()


def test_the_command_line_page_has_a_section_for_exactly_the_commands_there_are():
    page = (REFERENCE / "cli.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^## `polyrl ([a-z]+)", page, re.MULTILINE)) == set(COMMANDS)


def test_the_demo_takes_as_long_wherever_its_time_is_told():
    told = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "Makefile", "src/polyrl/cli/demo.py")]
    assert {tuple(re.findall(r"(\w+) to (\w+) minutes", text)) for text in told} == {(("two", "five"),)}


def test_the_line_of_bench_leaves_no_part_out():
    assert [part for part in PARTS if part not in COMMANDS["bench"].help] == []
