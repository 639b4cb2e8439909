"""Tables of the reference pages are what the code makes of them: settings, options, routes, metrics, events."""

import re

import pytest
from website import reference, tables

from polyrl.manager.settings import ManagerSettings
from polyrl.scheduling.core.events import WorkerJoined

KEYS = ("key", "means")


@pytest.fixture(scope="module")
def made():
    return reference.pages()


def test_pages_with_generated_tables_are_current(made):
    stale = [path.name for path, text in made.items() if path.read_text(encoding="utf-8") != text]
    assert stale == []  # `python -m website.reference` writes them


@pytest.mark.parametrize("page", ["recipes", "scenarios", "manager", "metrics", "cli", "builtin-engine"])
def test_no_key_option_route_or_metric_is_without_a_meaning(made, page):
    (text,) = [text for path, text in made.items() if path.stem == page]
    rows = re.findall(r"^\| `.*\|$", text, re.MULTILINE)
    assert len(rows) > 10
    assert [row for row in rows if row.endswith("|  |")] == []


def test_the_page_of_the_manager_has_no_section_that_is_none(made):
    (text,) = [text for path, text in made.items() if path.stem == "manager"]
    named = set(re.findall(r"^### `([^`]+)`$", text, re.MULTILINE))
    assert named == {*reference.sections_of(ManagerSettings), "manager"}


def test_docstrings_below_attributes_are_found():
    docs = tables.attribute_docs(WorkerJoined)
    assert docs["relays"] == "Others may fetch weights from it."
    assert "slots" not in docs


def test_a_table_keeps_the_meanings_of_its_keys_and_nothing_else_of_its_rows():
    page = "## One\n\nWords.\n\n| key | means |\n|---|---|\n| `a` | kept |\n| `gone` | lost |\n\nMore.\n\n## Two\n"
    rows = [("`a`", "from the code"), ("`b`", "new")]
    after = tables.with_table(page, "## One\n", KEYS, rows, keeps_meanings=True)
    assert after == "## One\n\nWords.\n\n| key | means |\n|---|---|\n| `a` | kept |\n| `b` | new |\n\nMore.\n\n## Two\n"


def test_a_table_that_is_not_there_comes_at_the_end_of_its_section():
    after = tables.with_table("## One\n\nWords.\n\n## Two\n", "## One\n", KEYS, [("`a`", "x")])
    assert after == "## One\n\nWords.\n\n| key | means |\n|---|---|\n| `a` | x |\n\n## Two\n"


def test_a_heading_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="no heading '## Three"):
        tables.with_table("## One\n", "## Three\n", KEYS, [])
