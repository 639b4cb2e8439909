"""Explain a mistake in a configuration, in one line for the person who wrote it.

msgspec says `` Expected `int` >= 0 - at `$.domains[0].quota` ``. This module says
`domains.0.quota: got -3, expected an integer >= 0`. From msgspec's message it takes only the place
and the kind of the mistake; the value found comes from the tree, the value expected from the types.
Left out: custom types. A type that this module cannot describe keeps msgspec's message.
"""

import difflib
import enum
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from msgspec import inspect

from polyrl.config.dump import show_path, show_value

PathPart = str | int
Path = tuple[PathPart, ...]

_WHERE = re.compile(r" - at `\$(?P<path>[^`]*)`$")
_PART = re.compile(r"\.(?P<name>[^.\[]+)|\[(?P<index>\d+|\.\.\.)\]")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`")
_KEYED_REASON = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*: ")
UNKNOWN_KEY = "unknown key"
_ANY_KEY = "..."  # msgspec does not say which key of a dict it was


def explain(error: msgspec.ValidationError, tree: Any, struct_type: type[msgspec.Struct]) -> str:
    """Return the one line: dotted path, what was wrong, what was expected."""
    message = _WHERE.sub("", str(error))
    path = _locate(str(error), tree, struct_type)
    if error.__cause__ is not None:
        return _own_reason(path, str(error.__cause__))
    root = inspect.type_info(struct_type)
    if unknown := _UNKNOWN.fullmatch(message):
        known = _known_keys(_type_at(root, tree, path), _value_at(tree, path))
        return _unknown_key(path, unknown["name"], known, _places_of(unknown["name"], root))
    if missing := _MISSING.fullmatch(message):
        full = (*path, missing["name"])
        expected = _describe(_type_at(root, tree, full))
        return f"{show_path(full)}: missing" + (f", expected {expected}" if expected else "")
    return _wrong_value(path, _value_at(tree, path), _type_at(root, tree, path), message)


def _own_reason(path: Path, reason: str) -> str:
    """Return a `ValueError("key: reason")` of a struct's own check; the key is relative to that struct."""
    reason = " ".join(reason.split())
    if not path:
        return reason
    return f"{show_path(path)}.{reason}" if _KEYED_REASON.match(reason) else f"{show_path(path)}: {reason}"


def _unknown_key(path: Path, name: str, known: list[str], elsewhere: list[Path]) -> str:
    """Return the line for an unknown key, with the likeliest key that was meant.

    `elsewhere`: tables that have a key of this name.
    """
    if elsewhere:
        hint = f"did you mean {show_path(min(elsewhere, key=len))}?"
    else:
        hint = did_you_mean(name, known, lambda near: show_path((*path, near))) or f"expected one of {', '.join(known)}"
    return f"{show_path((*path, name))}: {UNKNOWN_KEY}; {hint}"


def _places_of(name: str, kind: inspect.Type, path: Path = ()) -> list[Path]:
    """Return the dotted paths of tables within `kind` that have a key of this name."""
    if not isinstance(kind, inspect.StructType):
        return []
    found = [(*path, field.encode_name) for field in kind.fields if field.encode_name == name]
    return found + [
        place for field in kind.fields for place in _places_of(name, field.type, (*path, field.encode_name))
    ]


def _wrong_value(path: Path, value: Any, kind: inspect.Type | None, message: str) -> str:
    where = f"{show_path(path)}: " if path else ""
    expected = _describe(kind)
    if expected is None:
        return f"{where}got {show_value(value)}; {message.replace('`', '')}"
    choices = [choice for choice in _choices(kind) if isinstance(choice, str)]
    hint = did_you_mean(value, choices, show_value) if isinstance(value, str) else ""
    return f"{where}got {show_value(value)}, expected {expected}{hint and f'; {hint}'}"


# Where: msgspec's path, with the keys of dicts found again


def _locate(text: str, tree: Any, struct_type: type[msgspec.Struct]) -> Path:
    path = _parse_path(text)
    while _ANY_KEY in path:
        depth = path.index(_ANY_KEY)
        path = (*path[:depth], _guilty_key(text, path[:depth], tree, struct_type), *path[depth + 1 :])
    return path


def _parse_path(text: str) -> Path:
    where = _WHERE.search(text)
    if where is None:
        return ()
    parts = (match["name"] or match["index"] for match in _PART.finditer(where["path"]))
    return tuple(int(part) if part.isdecimal() else part for part in parts)


def _guilty_key(text: str, path: Path, tree: Any, struct_type: type[msgspec.Struct]) -> str:
    """Return the key of the dict at `path` that makes the same mistake when it is alone in that dict."""
    for key, value in _value_at(tree, path).items():
        try:
            msgspec.convert(_replaced(tree, path, {key: value}), struct_type)
        except msgspec.ValidationError as error:
            if str(error) == text:
                return key
    return "*"


def _replaced(tree: Any, path: Path, value: Any) -> Any:
    """Return a copy of the tree, shallow off the path, with another value at the path."""
    if not path:
        return value
    copied: Any = tree.copy()
    copied[path[0]] = _replaced(tree[path[0]], path[1:], value)
    return copied


def _value_at(tree: Any, path: Path) -> Any:
    for part in path:
        tree = tree[part]
    return tree


# What was expected: types in words


def _type_at(kind: inspect.Type | None, value: Any, path: Path) -> inspect.Type | None:
    """Return the type that the configuration expects at the path; None where it cannot be told."""
    for part in path:
        kind = _inner_type(_alternatives(kind), value, part)
        value = value.get(part) if isinstance(value, dict) else value[part] if isinstance(part, int) else None
    return kind


def _inner_type(kinds: Sequence[inspect.Type], value: Any, part: PathPart) -> inspect.Type | None:
    tags = [kind.tag for kind in kinds if isinstance(kind, inspect.StructType) and kind.tag_field == part]
    if tags and part != "":
        return inspect.LiteralType(tuple(tags))
    for kind in _narrowed(kinds, value):
        match kind, part:
            case inspect.StructType(fields=fields), str():
                found = next((field.type for field in fields if field.encode_name == part), None)
                if found is not None:
                    return found
            case inspect.DictType(value_type=value_type), str():
                return value_type
            case ((inspect.ListType(item_type=item_type) | inspect.VarTupleType(item_type=item_type)), int()):
                return item_type
            case inspect.TupleType(item_types=item_types), int():
                return item_types[part]
            case _:
                pass
    return None


def _alternatives(kind: inspect.Type | None) -> list[inspect.Type]:
    """Return the members of a union, without None, which TOML cannot say."""
    if isinstance(kind, inspect.UnionType):
        return [member for member in kind.types if not isinstance(member, inspect.NoneType)]
    if isinstance(kind, inspect.Metadata):
        return _alternatives(kind.type)
    return [] if kind is None else [kind]


def _narrowed(kinds: Iterable[inspect.Type], value: Any) -> list[inspect.Type]:
    """Keep only the tagged struct that the value names; types without a tag all stay."""

    def fits(kind: inspect.Type) -> bool:
        if not isinstance(kind, inspect.StructType) or kind.tag_field is None:
            return True
        return isinstance(value, dict) and value.get(kind.tag_field, kind.tag) == kind.tag

    return [kind for kind in kinds if fits(kind)]


def _known_keys(kind: inspect.Type | None, value: Any) -> list[str]:
    known: list[str] = []
    for struct in _narrowed(_alternatives(kind), value):
        if isinstance(struct, inspect.StructType):
            known += [] if struct.tag_field is None else [struct.tag_field]
            known += [field.encode_name for field in struct.fields]
    return known


def _choices(kind: inspect.Type | None) -> list[Any]:
    """Return the values of a Literal or an Enum."""
    choices: list[Any] = []
    for member in _alternatives(kind):
        if isinstance(member, inspect.LiteralType):
            choices += member.values
        elif isinstance(member, inspect.EnumType):
            choices += [item.value for item in _members(member.cls)]
    return choices


def _members(cls: type[enum.Enum]) -> list[enum.Enum]:
    return list(cls)


def _describe(kind: inspect.Type | None) -> str | None:
    """Return the type in words; None when one of its alternatives has none."""
    words = [_describe_one(member) for member in _alternatives(kind)]
    known = [word for word in words if word is not None]
    return " or ".join(known) if known and len(known) == len(words) else None


def _describe_one(kind: inspect.Type) -> str | None:
    match kind:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType() | inspect.FloatType():
            return _describe_number(kind)
        case inspect.StrType():
            return "a string" + _length_words(kind.min_length, kind.max_length, "character") + _pattern_words(kind)
        case inspect.LiteralType() | inspect.EnumType():
            choices = [show_value(choice) for choice in _choices(kind)]
            return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
        case inspect.ListType() | inspect.VarTupleType():
            return "a list" + _length_words(kind.min_length, kind.max_length, "item")
        case inspect.TupleType():
            return f"a list of {len(kind.item_types)}"
        case inspect.StructType() | inspect.DictType():
            return "a table"
        case _:
            return None


def _describe_number(kind: inspect.IntType | inspect.FloatType) -> str:
    limits = ((">", kind.gt), (">=", kind.ge), ("<", kind.lt), ("<=", kind.le))
    bounds = [f"{sign} {limit:g}" for sign, limit in limits if limit is not None]
    if kind.multiple_of is not None:
        bounds.append(f"a multiple of {kind.multiple_of:g}")
    name = "an integer" if isinstance(kind, inspect.IntType) else "a number"
    return " ".join([name, " and ".join(bounds)]).rstrip()


def _length_words(shortest: int | None, longest: int | None, unit: str) -> str:
    bounds = [f"at least {shortest}"] if shortest is not None else []
    bounds += [f"at most {longest}"] if longest is not None else []
    return f" of {' and '.join(bounds)} {unit}(s)" if bounds else ""


def _pattern_words(kind: inspect.StrType) -> str:
    return f" that matches {kind.pattern}" if kind.pattern is not None else ""


def did_you_mean(name: str, known: Iterable[str], show: Callable[[str], str] = str) -> str:
    """Return `did you mean X?`: the nearest known name that begins with `name`, or else the nearest; empty for none."""
    names = list(known)
    begun = [one for one in names if one.startswith(name)] if len(name) > 1 else []
    near = difflib.get_close_matches(name, begun, n=1, cutoff=0.0) or difflib.get_close_matches(name, names, n=1)
    return f"did you mean {show(near[0])}?" if near else ""
