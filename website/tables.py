"""Tables of the reference pages that are made from the code, and putting them into a page.

A page's prose stays as it is: `with_table` replaces the rows of one table, found by the heading above it and its first
column. A setting's key, values and default come from its type, and an option from the parser. Their last cell, the
meaning, may say more than the code does: it is kept for every key that the page has already, and begins as the
docstring or the help for a new one.
"""

import argparse
import ast
import inspect as python_inspect
import re
import textwrap
from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec
from msgspec import NODEFAULT, inspect

from polyrl.config.dump import show_value

Row = Sequence[str]


def settings(section: type[msgspec.Struct]) -> list[Row]:
    """Return a row for each key: what it may be, its default, its docstring."""
    info = inspect.type_info(section)
    assert isinstance(info, inspect.StructType)
    docs = attribute_docs(section)
    return [(f"`{field.name}`", allowed(field.type), default(field), docs.get(field.name, "")) for field in info.fields]


def options(parser: argparse.ArgumentParser) -> list[Row]:
    """Return a row for each option of a command, but --help."""
    rows = []
    for action in parser._actions:
        if action.option_strings and action.dest != "help" and action.help != argparse.SUPPRESS:
            rows.append((f"`{action.option_strings[0]}{_value(action)}`", (action.help or "") % vars(action)))
    return rows


def attribute_docs(kind: type) -> dict[str, str]:
    """Return the docstrings below a class's attributes, those of its bases too, each as one line."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        if one.__module__.startswith("polyrl"):
            (tree,) = ast.parse(textwrap.dedent(python_inspect.getsource(one))).body
            assert isinstance(tree, ast.ClassDef)
            found.update(_docs_below(tree.body))
    return found


def _docs_below(body: Sequence[ast.stmt]) -> Iterable[tuple[str, str]]:
    for attribute, below in pairwise(body):
        if isinstance(attribute, ast.AnnAssign) and isinstance(attribute.target, ast.Name):
            match below:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield attribute.target.id, one_line(text)
                case _:
                    pass


def one_line(text: str) -> str:
    return " ".join(text.split())


def with_table(page: str, heading: str, header: Row, rows: Sequence[Row], *, keeps_meanings: bool = False) -> str:
    """Return the page with these rows in the table below a heading, which is found by the table's first column.

    `heading` is the beginning of the line. A table that is not there yet is put at the end of the section.
    """
    level = heading.partition(" ")[0]
    start = re.search(rf"^{re.escape(heading)}", page, re.MULTILINE)
    if start is None:
        raise ValueError(f"the page has no heading {heading!r}")
    after = page.index("\n", start.end()) + 1
    follows = re.compile(rf"^#{{1,{len(level)}}} ", re.MULTILINE).search(page, after)
    end = len(page) if follows is None else follows.start()
    section = page[after:end]
    there = re.search(rf"^\| {re.escape(header[0])} \|.*\n\|[-|]+\|\n((?:\|.*\n)*)", section, re.MULTILINE)
    if there is None:
        written = f"{section.rstrip()}\n\n{lines(header, rows)}\n"
        return page[:after] + written + page[end:]
    if keeps_meanings:
        rows = _with_meanings(rows, there[1])
    return page[:after] + section[: there.start()] + lines(header, rows) + section[there.end() :] + page[end:]


def _with_meanings(rows: Sequence[Row], table: str) -> list[Row]:
    """Return the rows, each with the last cell of the table's row that begins with the same word in code."""
    written = {
        _key(cells[0]): cells[-1]
        for line in table.splitlines()
        if (cells := [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    }
    return [[*row[:-1], written.get(_key(row[0])) or row[-1]] for row in rows]


def _key(cell: str) -> str:
    return cell.strip("`").split("`")[0].split(" ")[0]


def lines(header: Row, rows: Sequence[Row]) -> str:
    """Return a table in Markdown."""
    written = [f"| {' | '.join(row)} |\n" for row in [header, *rows]]
    return "".join([written[0], "|---" * len(header), "|\n", *written[1:]])


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    choices = "|".join(map(str, action.choices or ()))
    name = (action.metavar if isinstance(action.metavar, str) else choices or action.dest.upper()).replace("|", "\\|")
    return f" [{name}]" if action.nargs == "?" else f" {name}"


def allowed(kind: inspect.Type) -> str:
    """Return what a value of this type may be, in words."""
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
            raise ValueError(f"no words for {kind}")


def default(field: inspect.Field) -> str:
    """Return a field's default as a page writes it."""
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
