"""From a configuration back to TOML: resolved configurations, defaults, and values inside messages.

Rules: the output reads back as the same struct; keys keep the order of the struct; one key per line.
Left out: comments, and None, which TOML cannot express. A None is omitted, so a field that may be None has None as its
default if its struct is to come back the same. A None inside a list is an error. `tomli-w` is not used: it writes every
list on lines of its own, a value each, which takes the quantiles of a scenario to a page, and has no value behind an
equals sign, which overrides, messages and workers' arguments need.
"""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPED_TOO = re.compile(r"[\x7f-\x9f\u2028\u2029]")
_SHOWN_CHARACTERS = 60


def dump_toml(config: msgspec.Struct) -> str:
    """Return the whole configuration as a TOML document."""
    tree = msgspec.to_builtins(config, str_keys=True)
    return "\n".join(_table_lines((), tree)).lstrip("\n") + "\n"


def show_value(value: Any) -> str:
    """Return a value for a message: tables and lists by their kind, others as TOML, shortened if long."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}" if value else "an empty list"
    text = inline(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


def show_path(path: Sequence[str | int]) -> str:
    """Return the dotted path, elements of lists by their index: `domains.0.name`."""
    return ".".join(_key(str(part)) for part in path)


def _table_lines(path: tuple[str, ...], table: dict[str, Any]) -> Iterator[str]:
    """Plain values first: after a header, every line belongs to that header's table."""
    present = {key: value for key, value in table.items() if value is not None}
    for key, value in present.items():
        if not _is_table(value) and not _is_array_of_tables(value):
            yield f"{_key(key)} = {inline(value)}"
    for key, value in present.items():
        header = show_path((*path, key))
        if _is_table(value):
            yield from ("", f"[{header}]", *_table_lines((*path, key), value))
        elif _is_array_of_tables(value):
            for item in value:
                yield from ("", f"[[{header}]]", *_table_lines((*path, key), item))


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _is_array_of_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(item, dict) for item in value)


def inline(value: Any) -> str:
    """Return a value, tables and lists included, as TOML writes it after an equals sign."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)  # inf and nan are spelled as TOML spells them
        case str():
            return _string(value)
        case list() | tuple():
            return f"[{', '.join(inline(item) for item in value)}]"
        case dict():
            pairs = (f"{_key(key)} = {inline(item)}" for key, item in value.items() if item is not None)
            return f"{{{', '.join(pairs)}}}"
        case None:
            raise TypeError("TOML has no null: a list cannot hold None")
        case _:
            return str(value)  # dates and times, in a message about a value that should be something else


def _string(text: str) -> str:
    """Write a string with JSON's escapes, which are TOML's. TOML refuses a plain DEL, and the rest would break the line
    or the terminal."""
    return _ESCAPED_TOO.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(text, ensure_ascii=False))


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _string(key)
