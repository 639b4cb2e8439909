"""Values of function calls as JSON: what goes into the sandbox, and what comes out of it.

Rules kept here: only plain data travels, by exact type; an object of a program's own class becomes its class's name
and equals nothing. A tuple is a list, as in JSON. Depth and size are bounded on both sides.
"""

import json
from typing import Any

MAX_DEPTH = 100


class NotPlain(Exception):
    """The data does not describe a value."""


def encode(value: Any, depth: int = 0) -> Any:
    """Describe a value. What is not plain data is described by its type's name."""
    if depth > MAX_DEPTH:
        return {"other": "a value that is nested too deeply"}
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple):
        return [encode(one, depth + 1) for one in value]
    if kind in (set, frozenset):
        return {"set": [encode(one, depth + 1) for one in value]}
    if kind is dict:
        return {"dict": [[encode(key, depth + 1), encode(one, depth + 1)] for key, one in value.items()]}
    if kind in (bytes, bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, bool | int | float | str | list | tuple | set | frozenset | dict):  # a subclass: its contents
        for plain in (int, float, str, dict, list, tuple, set, frozenset):
            if isinstance(value, plain):
                return encode(plain(value), depth + 1)
    return {"other": str(kind.__name__)}


def decode(said: Any, depth: int = 0) -> Any:
    """Return the value that is described. Raises NotPlain."""
    if depth > 2 * MAX_DEPTH:
        raise NotPlain("nested too deeply")
    if said is None or isinstance(said, bool | int | float | str):
        return said
    if isinstance(said, list):
        return [decode(one, depth + 1) for one in said]
    if isinstance(said, dict) and len(said) == 1:
        ((kind, held),) = said.items()
        try:
            match kind:
                case "set":
                    return {_hashable(decode(one, depth + 1)) for one in held}
                case "dict":
                    return {_hashable(decode(key, depth + 1)): decode(one, depth + 1) for key, one in held}
                case "bytes":
                    return bytes.fromhex(held)
                case "other":
                    return Other(str(held)[:200])
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
    """Raises NotPlain."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise NotPlain("no JSON") from error


def _hashable(value: Any) -> Any:
    """A list inside a set or as a key was a tuple."""
    return tuple(_hashable(one) for one in value) if isinstance(value, list) else value
