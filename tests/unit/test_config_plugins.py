"""Functions that a setting names: ours, a person's own, and one line for whatever is wrong with these."""

import sys
from pathlib import Path

import pytest

from polyrl.config.plugins import find
from polyrl.errors import ConfigError

OURS = {"root": "math:sqrt", "longest": max}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    return tmp_path


def test_ours_are_found_by_name_and_others_in_the_current_folder_too(folder: Path):
    (folder / "their_functions_here.py").write_text("def double(one):\n    return 2 * one\n")
    assert find("longest", "a.key", OURS) is max
    assert find("root", "a.key", OURS)(9) == 3
    assert find("their_functions_here:double", "a.key", OURS)(4) == 8


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rot", 'a.key: unknown name "rot"; expected root, longest, by_hand, or module:function; did you mean root?'),
        (
            "gone_from_here:f",
            'a.key: "gone_from_here:f": gone_from_here cannot be imported: ModuleNotFoundError: No mo',
        ),
        ("bad_import:f", 'a.key: "bad_import:f": bad_import cannot be imported: OSError: no disk, no fun'),
        (":f", 'a.key: ":f":  cannot be imported: ValueError: Empty module name'),
        ("math:pi", 'a.key: "math:pi": math has no function pi'),
    ],
)
def test_what_is_wrong_is_one_line_with_the_setting(folder: Path, name: str, message: str):
    (folder / "bad_import.py").write_text("raise OSError('no disk,\\n no fun')\n")
    with pytest.raises(ConfigError) as wrong:
        find(name, "a.key", OURS, also=("by_hand",))
    assert str(wrong.value).startswith(message) and "\n" not in str(wrong.value)
