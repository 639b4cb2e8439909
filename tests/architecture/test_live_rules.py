"""What the scheduler decides is carried out live: the page that says so, held against the code."""

import inspect
import re
from pathlib import Path
from typing import get_args

from polyrl.manager import frames_out, to_hosts
from polyrl.scheduling.core import commands as c

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "polyrl"
PAGE = ROOT / "docs" / "concepts" / "scheduler.md"
ROW = re.compile(r"^\| `((?:rules|parts)/\w+)` \| (.+?) \|", re.MULTILINE)


def rows() -> dict[str, list[str]]:
    """The files that carry each rule or part out, by its name."""
    return {name: re.findall(r"`([^`]+)`", files) for name, files in ROW.findall(PAGE.read_text(encoding="utf-8"))}


def test_every_rule_and_part_is_on_the_page_and_nothing_else():
    found = {
        f"{folder}/{file.stem}"
        for folder in ("rules", "parts")
        for file in (SOURCE / "scheduling" / folder).glob("*.py")
        if file.stem != "__init__"
    }
    assert rows().keys() == found


def test_every_rule_and_part_has_a_carrier_that_exists():
    for name, files in rows().items():
        assert files, f"{name} has no live carrier"
        assert [one for one in files if not (SOURCE / one).is_file()] == [], name


def test_the_manager_carries_out_every_command():
    code = "".join(map(inspect.getsource, (frames_out, to_hosts)))
    assert [
        one.__name__ for one in get_args(c.Command) if f"case c.{one.__name__}(" not in code.replace("| c.", "case c.")
    ] == []
