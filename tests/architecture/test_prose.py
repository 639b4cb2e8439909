"""Docstrings read at first sight: their sentences have a subject, and what a function does is said as an imperative."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[2] / "src" / "polyrl"

NO_SUBJECT = re.compile(r"(?<=[.;] )(Who|Whoever|Nobody|Somebody|What|One that|One who) \w+[^?]*?(?=[.;]|$)")
"""A sentence within a paragraph whose subject is a riddle: "What came too late is dropped."."""
NO_VERB = re.compile(
    r"(The|An?|It|Its|Our|This|Whether|How|What|Which|Whose|Where|While|With|For|From|Each|Every|All|Any|Some|These|Those"
    r"|Only|One|No|Seconds|Tokens|Samples|\w+'s?) |[`(]"
)

NO_NAME = re.compile(r"\b(nobody|somebody|anybody|whoever)\b", re.IGNORECASE)
"""Words in place of a worker, a client, a user or a process."""
OLD_MESSAGES = {"somebody asked", "whoever asked has enough of it", "a-token-that-nobody-may-see-anywhere"}
"""Two reasons that journals hold, which replay compares; and no message."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Prose(NamedTuple):
    where: str
    text: str
    is_field: bool
    does_something: bool
    """It is of a function that is called for what it does or returns."""


@functools.cache
def written() -> tuple[Prose, ...]:
    """All docstrings, and the strings below attributes."""
    return tuple(one for path in sorted(PACKAGE.rglob("*.py")) for one in written_in(path))


def written_in(path: Path) -> Iterator[Prose]:
    file = path.relative_to(PACKAGE)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, Function | ast.ClassDef | ast.Module) and (text := ast.get_docstring(node)):
            yield Prose(f"{file}:{getattr(node, 'name', '')}", text, False, does_something(node))
        for one in node.body[1:] if isinstance(node, ast.ClassDef | ast.Module) else []:
            match one:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield Prose(f"{file}:{one.lineno}", text, True, False)


def does_something(node: ast.AST) -> bool:
    """Whether this is a function that is called for what it does or returns, and neither a property nor a kernel."""
    if not isinstance(node, Function):
        return False
    decorated = " ".join(ast.unparse(one) for one in node.decorator_list)
    return not re.search(r"property|jit|abstract", decorated) and not node.name.startswith("__")


def test_no_sentence_begins_with_a_bare_who_what_or_one():
    docstrings = [one for one in written() if not one.is_field]
    found = [f"{one.where}: {riddle[0]}" for one in docstrings for riddle in NO_SUBJECT.finditer(one.text)]
    assert not found, "\n".join(found)


def test_no_docstring_and_no_field_begins_with_a_bare_who_or_what():
    assert [one.where for one in written() if re.match(r"(Who|Whoever|Whose|What|Those) ", one.text)] == []


def test_a_function_says_in_its_first_words_what_it_does():
    found = [one.where for one in written() if one.does_something and NO_VERB.match(one.text)]
    assert not found, "\n".join(found)


def test_messages_name_a_worker_a_client_or_a_user_and_not_nobody():
    """Strings alone: a docstring and a field's text are prose of other tests."""
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {string}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if NO_NAME.search(text := path.read_text(encoding="utf-8"))
        for line, string in strings_in(ast.parse(text))
        if NO_NAME.search(string) and string not in OLD_MESSAGES
    ]
    assert not found, "\n".join(found)


def strings_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield all strings but those that stand alone, as docstrings do."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.lineno, node.value
