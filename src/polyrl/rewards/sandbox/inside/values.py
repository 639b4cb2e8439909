"""Values of function calls as JSON: what goes into the sandbox, and what comes out of it.

Rules kept here: only plain data travels, by exact type; an object of a program's own class becomes its class's name
and equals nothing. Depth and size are bounded on both sides.
"""

import json
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 100
PROGRAM = "solution"
"""The name of the module that a program is."""


PLAIN: tuple[Any, ...] = (int, float, str, dict, list, tuple, set, frozenset)


class NotPlain(Exception):
    """The data does not describe a value."""


def encode(value: Any, depth: int = 0, other: Callable[[Any], Any] | None = None) -> Any:
    """Describe a value. Anything but plain data is described by `other`, or else by its type's name."""
    if depth > MAX_DEPTH:
        return {"other": "a value that is nested too deeply"}
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [encode(one, depth + 1, other) for one in value]
    if kind is tuple:
        return {"tuple": [encode(one, depth + 1, other) for one in value]}
    if kind in (set, frozenset):
        return {"set": [encode(one, depth + 1, other) for one in value]}
    if kind is dict:
        return {"dict": [[encode(key, depth + 1, other), encode(one, depth + 1, other)] for key, one in value.items()]}
    if kind in (bytes, bytearray):
        return {"bytes": bytes(value).hex()}
    if other is None or kind.__module__ != PROGRAM:  # of a subclass, its contents
        for plain in PLAIN:
            if isinstance(value, plain):
                return encode(plain(value), depth + 1, other)
    return {"other": str(kind.__name__) if other is None else other(value)}


def decode(said: Any, depth: int = 0, other: Callable[[Any], Any] | None = None) -> Any:
    """Return the value that is described; what is no plain data is what `other` makes of it. Raises NotPlain."""
    if depth > 2 * MAX_DEPTH:
        raise NotPlain("nested too deeply")
    if said is None or isinstance(said, bool | int | float | str):
        return said
    if isinstance(said, list):
        return [decode(one, depth + 1, other) for one in said]
    if isinstance(said, dict) and len(said) == 1:
        ((kind, held),) = said.items()
        try:
            match kind:
                case "tuple":
                    return tuple(decode(one, depth + 1, other) for one in held)
                case "set":
                    return {_hashable(decode(one, depth + 1, other)) for one in held}
                case "dict":
                    return {
                        _hashable(decode(key, depth + 1, other)): decode(one, depth + 1, other) for key, one in held
                    }
                case "bytes":
                    return bytes.fromhex(held)
                case "other":
                    return Other(str(held)[:200]) if other is None else other(held)
        except (TypeError, ValueError) as error:
            raise NotPlain(f"a {kind} that is none") from error
    raise NotPlain("no value")


class Other:
    """A value that is no plain data. It equals nothing."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}>"


def to_bytes(said: Any) -> bytes:
    return json.dumps(said).encode()


def from_bytes(data: bytes) -> Any:
    """Parse JSON. Raises NotPlain."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise NotPlain("no JSON") from error


def _hashable(value: Any) -> Any:
    """Make a tuple of a list that is in a set, or a key, and a frozenset of a set: it was one."""
    if isinstance(value, set):
        return frozenset(value)
    return tuple(_hashable(one) for one in value) if isinstance(value, list) else value
