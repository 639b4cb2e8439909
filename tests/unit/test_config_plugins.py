"""Functions that a setting names: ours, a person's own, and one line for whatever is wrong with these."""

import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from polyrl.config.plugins import check_arguments, find, is_own
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


class Part:
    def __init__(
        self,
        model: str,
        width: float = 0.2,
        *,
        names: list[str] | None = None,
        call: "Unknown | None" = None,  # noqa: F821  # pyright: ignore[reportUndefinedVariable]
    ) -> None: ...


def compute(batch: object, config: object, beta: float, mode: Literal["a", "b"] = "a") -> None: ...


def take_all(batch: object, **more: object) -> None: ...


@pytest.mark.parametrize(
    ("function", "args", "num_given", "said"),
    [
        (compute, {"beta": 1}, 2, ""),
        (compute, {}, 2, "a.args.beta: missing, expected a number (compute)"),
        (compute, {"beta": 1, "bta": 2}, 2, "a.args.bta: unknown key; did you mean beta? (compute)"),
        (compute, {"beta": "1"}, 2, 'a.args.beta: got "1", expected a number (compute)'),
        (compute, {"beta": 1, "mode": "c"}, 2, 'a.args.mode: got "c", expected one of "a", "b" (compute)'),
        (compute, {"beta": 1, "batch": 1}, 2, "a.args.batch: unknown key; expected one of beta, mode (compute)"),
        (compute, {}, 5, "a.args: compute takes 4 arguments by position, and is called with 5"),
        (take_all, {"anything": [1]}, 1, ""),
        (Part, {"model": "m", "width": 1, "names": ["x"]}, 0, ""),
        (Part, {"model": "m", "nmes": []}, 0, "a.args.nmes: unknown key; did you mean names? (Part)"),
        (max, {"whatever": 1}, 1, ""),
    ],
)
def test_arguments_are_held_against_the_signature(function, args: dict[str, Any], num_given: int, said: str):
    if not said:
        check_arguments(function, args, "a.args", num_given)
        return
    with pytest.raises(ConfigError) as wrong:
        check_arguments(function, args, "a.args", num_given)
    assert str(wrong.value) == said


def test_a_class_without_a_method_of_its_contract_is_refused_and_one_with_it_is_found(folder: Path):
    (folder / "their_classes.py").write_text("class Half:\n    def log(self): ...\n")
    assert find("their_classes:Half", "a.key", {}, what="Class", methods=("log",)).__name__ == "Half"
    with pytest.raises(ConfigError, match=r'^a\.key: "their_classes:Half": has no method close; expected log, close$'):
        find("their_classes:Half", "a.key", {}, what="Class", methods=("log", "close"))


@pytest.mark.parametrize("name", ["a:b", "a.b:C", "_a:_b"])
def test_what_is_written_as_a_module_and_a_name_is_a_persons_own(name: str):
    assert is_own(name)
    assert not any(
        map(is_own, (f"{name}.jsonl", f"data/{name}", name.replace(":", "/"), f"{name}#train", "arithmetic"))
    )
