"""Comparisons with other software are not in the wheel, and every one of them is listed where people look."""

import importlib.util
import re
import tomllib
from pathlib import Path

from benchmarks.__main__ import BENCHMARKS

from polyrl.cli.bench import PARTS

ROOT = Path(__file__).parents[2]


def test_the_wheel_is_the_package_alone_and_the_package_holds_no_comparison():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"] == {"packages": ["src/polyrl"]}
    package = ROOT / "src" / "polyrl"
    assert (package / "py.typed").is_file()  # so that type checkers use the package's own types
    measured = {one.stem for one in (package / "bench").glob("*.py")} - {"__init__"}
    assert set(PARTS) <= measured
    assert [one for one in BENCHMARKS if one not in PARTS and one in measured] == []
    assert [
        str(one) for one in package.rglob("*") if one.suffix in (".c", ".sh") or one.name.startswith("bench_")
    ] == []


def test_every_benchmark_is_there_and_on_the_page():
    assert [one for one in BENCHMARKS.values() if importlib.util.find_spec(one.module) is None] == []
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `make bench NAME=([a-z0-9_]+)", page, re.MULTILINE)) == set(BENCHMARKS)
