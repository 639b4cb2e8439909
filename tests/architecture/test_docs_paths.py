"""The page that follows a token, a dead worker's sample and a version through the code names functions that exist, and
the page of what a review found names tests that do."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/concepts/live.md"
FINDINGS = ROOT / "docs/results/findings.md"
STOP = re.compile(r"\[`([\w/]+\.py)`\]\([^)]+\) `(\w+)` \|$", re.MULTILINE)


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_row_names_a_function_of_its_file():
    page = PAGE.read_text(encoding="utf-8")
    stops = STOP.findall(page)
    assert len(stops) == len(re.findall(r"^\| \d+ \|", page, re.MULTILINE)) > 30
    assert [stop for stop in stops if stop[1] not in functions_of(ROOT / "src/polyrl" / stop[0])] == []


def test_every_finding_has_a_row_and_the_tests_that_it_names_are_there():
    rows = re.findall(r"^\| (\d+) \|.*\| ([^|]+) \|$", FINDINGS.read_text(encoding="utf-8"), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 59))
    for number, shown in rows:
        file = ROOT
        for name in re.findall(r"`(tests/[\w/]+\.py|test_\w+)`", shown):
            if name.endswith(".py"):
                file = ROOT / name
                assert file.exists(), (number, name)
            else:
                assert name in functions_of(file), (number, name)
