"""The page that follows a token, a dead worker's sample and a version through the code names functions that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/concepts/live.md"
STOP = re.compile(r"\[`([\w/]+\.py)`\]\([^)]+\) `(\w+)` \|$", re.MULTILINE)


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_row_names_a_function_of_its_file():
    page = PAGE.read_text(encoding="utf-8")
    stops = STOP.findall(page)
    assert len(stops) == len(re.findall(r"^\| \d+ \|", page, re.MULTILINE)) > 30
    assert [stop for stop in stops if stop[1] not in functions_of(ROOT / "src/polyrl" / stop[0])] == []
