"""Docstrings read at first sight: their sentences have a subject, and what a function does is said as an imperative."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "polyrl"

NO_SUBJECT = re.compile(r"(?<=[.;] )(Who|Whoever|Nobody|Somebody|What|One that|One who) \w+[^?]*?(?=[.;]|$)")
"""A sentence within a paragraph whose subject is a riddle: "What came too late is dropped."."""
NO_VERB = re.compile(
    r"(The|An?|It|Its|Our|This|Whether|How|What|Which|Whose|Where|While|With|For|From|Each|Every|All|Any|Some|These|Those"
    r"|Only|One|No|Seconds|Tokens|Samples|\w+'s?) |[`(]"
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def fields() -> Iterator[tuple[str, str]]:
    """The strings below attributes."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for one in getattr(node, "body", []) if isinstance(node, ast.ClassDef | ast.Module) else []:
                if (
                    isinstance(one, ast.Expr)
                    and isinstance(one.value, ast.Constant)
                    and isinstance(one.value.value, str)
                ):
                    yield f"{path.relative_to(PACKAGE)}:{one.lineno}", one.value.value


def documented() -> Iterator[tuple[str, ast.AST, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, Function | ast.ClassDef | ast.Module) and (text := ast.get_docstring(node)):
                yield f"{path.relative_to(PACKAGE)}:{getattr(node, 'name', '')}", node, text


def does_something(node: ast.AST) -> bool:
    """Whether this is a function that is called for what it does or returns, and neither a property nor a kernel."""
    if not isinstance(node, Function):
        return False
    decorated = " ".join(ast.unparse(one) for one in node.decorator_list)
    return not re.search(r"property|jit|abstract", decorated) and not node.name.startswith("__")


def test_no_sentence_begins_with_a_bare_who_what_or_one():
    found = [f"{where}: {riddle[0]}" for where, _, text in documented() for riddle in NO_SUBJECT.finditer(text)]
    assert not found, "\n".join(found)


def test_no_docstring_and_no_field_begins_with_a_bare_who_or_what():
    texts = [*fields(), *((where, text) for where, _, text in documented())]
    assert [where for where, text in texts if re.match(r"(Who|Whoever|Whose|What|Those) ", text)] == []


def test_a_function_says_in_its_first_words_what_it_does():
    found = [where for where, node, text in documented() if does_something(node) and NO_VERB.match(text)]
    assert not found, "\n".join(found)
