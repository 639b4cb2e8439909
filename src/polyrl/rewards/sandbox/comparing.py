"""Compare what a program printed or returned with what is expected. Pure; the program's side is a stranger's bytes.

Rules kept here: values are compared by content, with a tolerance where one side is a float; a list and a tuple are the
same. NaN equals NaN. Nothing here recurses deeper than the decoder allows, and no comparison is quadratic.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

_RELATIVE, _ABSOLUTE = 1e-6, 1e-9


def same_output(found: bytes, expected: str, how: Literal["lines", "words", "exact"]) -> bool:
    text = found.decode(errors="replace")
    match how:
        case "exact":
            return text == expected
        case "lines":
            return _lines(text) == _lines(expected)
        case "words":
            ours, theirs = expected.split(), text.split()
            return len(ours) == len(theirs) and all(map(_same_word, ours, theirs))


def same_value(expected: Any, found: Any) -> bool:
    if isinstance(expected, int | float) and isinstance(found, int | float):
        return _same_number(expected, found)
    if isinstance(expected, list | tuple) and isinstance(found, list | tuple):
        return len(expected) == len(found) and all(map(same_value, expected, found))
    if isinstance(expected, dict) and isinstance(found, dict):
        return _same_dict(expected, found)
    if isinstance(expected, list) and isinstance(found, set):  # JSON has no sets
        return len(expected) == len(found) and all(_is_in(one, found) for one in expected)
    return type(expected) is type(found) and expected == found


def _same_dict(expected: dict[Any, Any], found: dict[Any, Any]) -> bool:
    """Keys of JSON are texts; a program's may be numbers."""
    if len(expected) != len(found):
        return False
    if all(isinstance(key, str) for key in expected):
        named = {key if isinstance(key, str) else repr(key): value for key, value in found.items()}
    else:
        named = found
    return all(key in named and same_value(value, named[key]) for key, value in expected.items())


def _is_in(value: Any, values: set[Any]) -> bool:
    try:
        return _frozen(value) in values
    except TypeError:
        return False


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _same_number(expected: float, found: float) -> bool:
    if isinstance(expected, int) and isinstance(found, int):
        return expected == found
    try:
        one, other = float(expected), float(found)
    except OverflowError:
        return expected == found
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return math.isclose(one, other, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)


def _same_word(expected: str, found: str) -> bool:
    if expected == found:
        return True
    if "." not in expected and "e" not in expected.lower():
        return False
    try:
        return _same_number(float(expected), float(found))
    except ValueError:
        return False


def _lines(text: str) -> Sequence[str]:
    lines = [one.rstrip() for one in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines
