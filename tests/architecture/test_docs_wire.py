"""The page of the wire lists every frame."""

import re
from pathlib import Path
from typing import get_args

import pytest

from polyrl.wire import frames

WIRE = Path(__file__).parents[2] / "docs" / "reference" / "wire.md"


def names_of_frames(union: object) -> set[str]:
    return {frame.__name__ for frame in get_args(union)}


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
