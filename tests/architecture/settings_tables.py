"""Tables of settings on a page, and what they should say: every key of a struct, what it may be and its default."""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import NODEFAULT, inspect

from polyrl.config.dump import show_value


def facts(section: type[msgspec.Struct]) -> Iterator[tuple[str, str, str]]:
    """(key, what it may be, default) of every key, as the page writes them."""
    info = inspect.type_info(section)
    assert isinstance(info, inspect.StructType)
    for field in info.fields:
        yield field.name, allowed(field.type), default(field)


def allowed(kind: inspect.Type) -> str:
    match kind:
        case inspect.UnionType(types=types):
            return " or ".join(allowed(one) for one in types if not isinstance(one, inspect.NoneType))
        case inspect.LiteralType(values=values):
            return ", ".join(f"`{value}`" for value in sorted(map(str, values)))
        case inspect.IntType() | inspect.FloatType():
            name = "integer" if isinstance(kind, inspect.IntType) else "number"
            bounds = [(">", kind.gt), (">=", kind.ge), ("<", kind.lt), ("<=", kind.le)]
            return " ".join([name, *(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)])
        case inspect.BoolType():
            return "true, false"
        case inspect.StrType():
            return "text"
        case inspect.ListType() | inspect.VarTupleType() | inspect.TupleType():
            return "list"
        case inspect.StructType() | inspect.DictType():
            return "table"
        case _:
            raise AssertionError(f"no words for {kind}")


def default(field: inspect.Field) -> str:
    if field.default_factory is not NODEFAULT:
        value = field.default_factory()
    elif field.default is NODEFAULT:
        return "required"
    else:
        value = field.default
    match value:
        case None:
            return "none"
        case msgspec.Struct():
            return "its defaults"
        case list():
            return f"`{[list(one) for one in value]}`"
        case tuple():
            return f"`{list(value)}`"
        case dict():
            return "empty"
        case float():
            return f"`{value:.6g}`"
        case _:
            return f"`{show_value(value)}`"


def rows_of(page: Path, section: str) -> list[tuple[str, ...]]:
    """The first three cells of every row of the section's table."""
    text = page.read_text(encoding="utf-8")
    found = re.search(rf"^### `{re.escape(section)}`\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    lines = [] if found is None else [line for line in found[1].splitlines() if line.startswith("| `")]
    return [tuple(cell.strip() for cell in line.split("|")[1:4]) for line in lines]


def should_be(section: type[msgspec.Struct]) -> list[tuple[str, str, str]]:
    return [(f"`{key}`", values, default) for key, values, default in facts(section)]
