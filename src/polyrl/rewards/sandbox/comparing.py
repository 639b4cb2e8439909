"""Compare what a program printed or returned with what is expected. Pure; what the program said is not trusted.

Rules kept here: values are compared by content, with a tolerance where one side is a float; a list and a tuple are the
same. NaN equals NaN. No comparison takes long, whatever a program returns: depth is bounded, long numbers are not read,
and members of sets and keys are looked up by their text, since a program can choose numbers that all have one hash.
"""

import builtins
import itertools
import json
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from polyrl.rewards.sandbox.inside import values

_LONGEST_NUMBER = 400
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


def is_raised(expected: str, lineage: Sequence[Any]) -> bool:
    """Return whether an exception is of the expected class, by the names of its class and those above, as a program
    told them.

    A class that derives from exceptions of Python's that do not derive from each other is none of them: it would be
    what any test expects.
    """
    known = [vars(builtins).get(one) for one in lineage if isinstance(one, str)]
    known = [one for one in known if isinstance(one, type)]
    return expected in lineage and all(issubclass(one, above) for one, above in itertools.pairwise(known))


class FoundSet(NamedTuple):
    """A set of a program's: its members as JSON text."""

    texts: frozenset[str]


class FoundDict(NamedTuple):
    """A dict of a program's, by the JSON text of its keys."""

    items: dict[str, Any]


def read_value(said: Any, depth: int = 0) -> Any:
    """Return a value that a program described. Raises values.NotPlain."""
    if depth > 2 * values.MAX_DEPTH:
        raise values.NotPlain("nested too deeply")
    if isinstance(said, list):
        return [read_value(one, depth + 1) for one in said]
    if isinstance(said, dict) and len(said) == 1:
        ((kind, held),) = said.items()
        try:
            match kind:
                case "tuple":
                    return [read_value(one, depth + 1) for one in held]
                case "set":
                    return FoundSet(frozenset(_text(one) for one in held))
                case "dict":
                    return FoundDict({_text(key): read_value(one, depth + 1) for key, one in held})
                case _:
                    pass
        except (TypeError, ValueError) as error:
            raise values.NotPlain(f"a {kind} that is none") from error
    return values.decode(said, depth)


def same_value(expected: Any, found: Any) -> bool:
    if isinstance(expected, int | float) and isinstance(found, int | float):
        return _same_number(expected, found)
    if isinstance(expected, list | tuple) and isinstance(found, list):
        return len(expected) == len(found) and all(map(same_value, expected, found))
    if isinstance(found, FoundDict):
        return isinstance(expected, dict) and _same_dict(expected, found.items)
    if isinstance(found, FoundSet):  # JSON has no sets
        if not isinstance(expected, list | set | tuple) or len(expected) != len(found.texts):
            return False
        return {_plain_text(one) for one in expected} == found.texts
    return type(expected) is type(found) and expected == found


def _same_dict(expected: dict[Any, Any], found: dict[str, Any]) -> bool:
    """Compare by keys. Those of JSON are texts; a program's may be numbers."""
    if len(expected) != len(found):
        return False
    for key, value in expected.items():
        text = next((one for one in (_plain_text(key), str(key)) if one in found), None)
        if text is None or not same_value(value, found[text]):
            return False
    return True


def _text(said: Any) -> str:
    return json.dumps(_without_tuples(said), sort_keys=True)


def _plain_text(value: Any) -> str:
    return _text(values.encode(value))


def _without_tuples(said: Any, depth: int = 0) -> Any:
    if depth > 2 * values.MAX_DEPTH:
        raise values.NotPlain("nested too deeply")
    if isinstance(said, dict) and set(said) == {"tuple"}:
        said = said["tuple"]
    return [_without_tuples(one, depth + 1) for one in said] if isinstance(said, list) else said


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
    if ("." not in expected and "e" not in expected.lower()) or len(found) > _LONGEST_NUMBER:
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
