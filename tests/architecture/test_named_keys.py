"""Recipe keys that advice and the page for readers of other trainers name are there, under that name."""

import re
from pathlib import Path

import msgspec
import pytest

from polyrl.config.recipe import Recipe
from polyrl.config.recipe_files import load_recipe
from polyrl.errors import UserError

ROOT = Path(__file__).parents[2]
SECTIONS = [field.encode_name for field in msgspec.structs.fields(Recipe)]
KEY = re.compile(rf"(?<![\w./-])((?:{'|'.join(SECTIONS)})\.[a-z_]{{2,}})(?![\w/(-]|\.\w)")
FILES = {".py", ".md", ".toml", ".jsonl", ".json", ".bin"}
ADVICE = ("src/polyrl/dashboard/alarms.py", "src/polyrl/dashboard/waiting.py", "src/polyrl/run/diagnosis.py")
WORDS = ROOT / "docs" / "concepts" / "words.md"


def is_key(name: str) -> bool:
    try:
        load_recipe("arithmetic", [f"{name}=@"])
    except UserError as error:  # most keys want another value than @
        return "unknown key" not in str(error)
    return True


def named(text: str) -> set[str]:
    return {name for name in KEY.findall(text) if f".{name.rpartition('.')[2]}" not in FILES}


@pytest.mark.parametrize("path", ADVICE)
def test_advice_names_keys_that_are_there(path: str):
    strings = re.findall(r'"([^"\n]*)"', (ROOT / path).read_text(encoding="utf-8"))
    found = {name for one in strings for name in named(one)}
    assert [name for name in sorted(found) if not is_key(name)] == []


def test_our_options_beside_those_of_other_trainers_are_there():
    rows = [line.split("|")[1] for line in WORDS.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    found = {name for one in rows for name in named(one)}
    assert len(found) > 20
    assert [name for name in sorted(found) if not is_key(name)] == []


def test_a_key_that_is_not_there_is_found():
    assert named("lower train.grad_clip, see dashboard/alarms.py and recipe.toml") == {"train.grad_clip"}
    assert not is_key("train.grad_clip")
    assert is_key("optimizer.grad_clip")
