"""From a TOML file and overrides to a typed, checked configuration.

    overrides = ["fleet.workers=3", "domains.0.correlation=0.5"]
    tree = apply_overrides(load_toml(path), overrides)
    scenario = build(tree, Scenario, source=str(path), overrides=overrides)

Rules: every mistake is one ConfigError of one line; it names the dotted path (or the file and line), what was wrong,
what was expected, and the file or the override that says it. Nothing that is passed in is changed. `nan` and `inf` are
never values: they slip through bounds. Nor are whole numbers beyond TOML's own 64 bits: tomllib reads them, and nothing
else takes them.
Left out: includes, environment variables, and keys that hold a dot themselves (an override cannot reach them).
"""

import copy
import math
import re
import threading
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from polyrl.config.dump import dump_toml, show_path, show_value
from polyrl.config.explain import did_you_mean, explain
from polyrl.errors import ConfigError

__all__ = [
    "apply_overrides",
    "build",
    "dump_toml",
    "find_shipped",
    "list_shipped",
    "load_toml",
    "show_shipped",
]

Tree = dict[str, Any]
StructT = TypeVar("StructT", bound=msgspec.Struct)

_ONE_AT_A_TIME = threading.Lock()
"""Two threads in which msgspec meets a type for the first time end the process with a segmentation fault."""
_AT_POSITION = re.compile(r" \(at line (\d+), column \d+\)$")
_EXAMPLE = "fleet.workers=3"
_AT_END = " (at end of document)"
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1


def load_toml(path: str | Path) -> Tree:
    """Read a TOML file. Raises ConfigError with the file, and the line where there is one."""
    text = _read_text(Path(path))
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply to be a configuration") from error
    except ValueError as error:  # also the digits of an integer that Python refuses to read
        raise ConfigError(_syntax_error(path, text, str(error))) from error


def apply_overrides(tree: Tree, overrides: Iterable[str], *, example: str = _EXAMPLE) -> Tree:
    """Return a copy of the tree with each `section.key=value` set; the last one wins. `example` is shown in errors.

    A value is read as TOML (`3`, `[1, 2]`, `"3"`), or else taken as a bare string. In the path, a number picks an
    element of an existing list, and a word picks the table in the list with that `name`. Missing tables are created:
    `build` reports wrong names.
    """
    result = copy.deepcopy(tree)
    for override in overrides:
        path, value = _parse_override(override, example)
        _set(result, path, value)
    return result


def build(tree: Tree, struct_type: type[StructT], *, source: str = "", overrides: Sequence[str] = ()) -> StructT:
    """Make a struct of the tree, or raise ConfigError. The message ends with where the mistake came from: `source`, or
    one of the overrides that were applied to the tree.

    Structs say what they accept: `forbid_unknown_fields=True`, bounds by `msgspec.Meta`, and `__post_init__` raising
    `ValueError("key: reason")` for what takes more than one field to see.
    """
    for path, value, expected in _no_values(tree, ()):
        raise ConfigError(_with_origin(f"{show_path(path)}: got {value}, expected {expected}", source, overrides))
    try:
        with _ONE_AT_A_TIME:
            return msgspec.convert(tree, struct_type)
    except msgspec.ValidationError as error:
        if error.__cause__ is not None and not isinstance(error.__cause__, ValueError):
            raise  # msgspec wraps a TypeError of __post_init__ as well; that one is a bug of ours
        raise ConfigError(_with_origin(explain(error, tree, struct_type), source, overrides)) from error


def _with_origin(line: str, source: str, overrides: Sequence[str]) -> str:
    """Name the override that the mistake is in, the last one first; then one within the table that it is about."""
    place = line.partition(": ")[0]
    given = [(show_path(_parse_override(override)[0]), " ".join(override.split())) for override in reversed(overrides)]
    at_it = [override for path, override in given if f"{place}.".startswith(f"{path}.")]
    within = [override for path, override in given if path.startswith(f"{place}.")]
    for override in (*at_it, *within):
        return f"{line} (given as {override})"
    return f"{line} (in {source})" if source else line


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{path}: is a directory, expected a TOML file") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        return data.decode("utf-8-sig")  # some editors put a mark before it
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text, expected a TOML file") from error


def _syntax_error(path: str | Path, text: str, message: str) -> str:
    """Return `file:line: message` for a message of tomllib, which keeps its line in the text until Python 3.14."""
    if message.endswith(_AT_END):
        return f"{path}:{max(1, len(text.splitlines()))}: {message.removesuffix(_AT_END)} at the end of the file"
    position = _AT_POSITION.search(message)
    if position is None:
        return f"{path}: {message}"
    return f"{path}:{position[1]}: {message[: position.start()]}"


def _parse_override(override: str, example: str = _EXAMPLE) -> tuple[list[str], Any]:
    dotted, equals, text = override.partition("=")
    path = [part.strip() for part in dotted.split(".")]
    if not equals or not all(path):
        form = "section.key=value" if "." in example else "key=value"
        raise ConfigError(f"{override.strip()!r}: expected {form}, for example {example}")
    return path, _parse_value(text.strip())


def _parse_value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _set(tree: Tree, path: list[str], value: Any) -> None:
    node: Any = tree
    for depth, part in enumerate(path[:-1], start=1):
        node = node.setdefault(part, {}) if isinstance(node, dict) else node[_index(node, path, depth - 1)]
        if not isinstance(node, dict | list):
            raise ConfigError(f"{show_path(path)}: {show_path(path[:depth])} is {show_value(node)}, expected a table")
    if isinstance(node, dict):
        node[path[-1]] = value
    else:
        node[_index(node, path, len(path) - 1)] = value


def _index(items: list[Any], path: list[str], depth: int) -> int:
    part = path[depth]
    if part.isdecimal() and int(part) < len(items):
        return int(part)
    names = [str(item["name"]) for item in items if isinstance(item, dict) and "name" in item]
    if part in names and len(names) == len(items):
        return names.index(part)
    allowed = f"an index from 0 to {len(items) - 1}" if items else "no index: the list is empty"
    if names and len(names) == len(items):
        allowed += f", or a name: {', '.join(names)}"
    raise ConfigError(
        f"{show_path(path)}: {show_path(path[:depth])} is a list, got {show_value(part)}, expected {allowed}"
    )


def _no_values(node: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any, str]]:
    """Yield the path of each number that no key accepts, and what is expected there."""
    match node:
        case float() if not math.isfinite(node):
            yield path, node, "a finite number"
        case int() if not _LEAST <= node <= _MOST:
            yield path, f"an integer of {node.bit_length()} bits", f"one from {_LEAST} to {_MOST}"
        case dict():
            for key, value in node.items():
                yield from _no_values(value, (*path, key))
        case list():
            for index, value in enumerate(node):
                yield from _no_values(value, (*path, index))
        case _:
            pass


# Files that ship with the package, beside a person's own


def list_shipped(folder: Path) -> list[tuple[str, str]]:
    """Return the name and the summary of every file in a folder of the package, by name."""
    found = [(path.stem, load_toml(path)) for path in sorted(folder.glob("*.toml"))]
    return [(name, str(tree.get("about", ""))) for name, tree in found]


def show_shipped(found: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in found)
    return "\n".join(f"{name:<{width}}  {about}" for name, about in found)


def find_shipped(name: str, shipped: Path, kind: str, own: Path | None = None) -> Path:
    """Return a path (relative to the folder `own`), or the name of one in the folder `shipped`. Raises ConfigError."""
    path = (own or Path()) / name
    if path.suffix == ".toml":
        return path
    ours = shipped / f"{name}.toml"
    if ours.is_file():
        return ours
    known = [one for one, _ in list_shipped(shipped)]
    hint, expected = did_you_mean(name, known), f"a file ending in .toml, or one of: {', '.join(known)}"
    raise ConfigError(f"{name}: no such {kind}; expected {expected}{hint and f'; {hint}'}")
