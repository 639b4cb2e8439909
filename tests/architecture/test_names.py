"""One thing has one name: no two public classes share one, and a word of the glossary names at most one type."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from polyrl.scheduling.core.desk import ON_DESK

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src/polyrl"

SAME_NAME: dict[str, str] = {}
"""Names that several public classes may have, each with its reason."""

BY_THE_STATE = re.compile(rf"\bdesk\.state\.({'|'.join((*ON_DESK, 'fleet.seats'))})\b")


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        yield name.removesuffix(".__init__"), ast.parse(path.read_text())


def named(node: ast.stmt) -> str:
    """The name of a public class, or of a type that is put together from others; empty: it is neither."""
    match node:
        case ast.ClassDef(name=name):
            pass
        case ast.AnnAssign(target=ast.Name(id=name), annotation=ast.Name(id="TypeAlias")):
            pass
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if not is_type_variable(value):
            pass
        case _:
            return ""
    return name if name[:1].isupper() and not name.isupper() else ""


def is_type_variable(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and ast.unparse(value.func) in ("TypeVar", "ParamSpec")


@functools.cache
def types() -> tuple[tuple[str, str, bool], ...]:
    """The name of each public type, its module, and whether it is a class."""
    return tuple(
        (name, module, isinstance(node, ast.ClassDef))
        for module, tree in modules()
        for node in tree.body
        if (name := named(node))
    )


def places(*, classes_only: bool) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, module, is_class in types():
        if is_class or not classes_only:
            found.setdefault(name, []).append(module)
    return found


def test_no_two_public_classes_have_the_same_name():
    several = {name: where for name, where in places(classes_only=True).items() if len(where) > 1}
    assert several.keys() <= SAME_NAME.keys(), {name: several[name] for name in several.keys() - SAME_NAME.keys()}
    assert SAME_NAME.keys() <= several.keys(), "an exception that is none any more"


def test_no_type_alias_has_the_name_of_a_class():
    classes, all_types = places(classes_only=True), places(classes_only=False)
    twice = {name: all_types[name] for name in classes if all_types[name] != classes[name]}
    assert not twice


def glossary() -> list[str]:
    table = (ROOT / "ARCHITECTURE.md").read_text().split("## Words")[1].split("## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")][1:]
    return [word.strip() for row in rows for word in row.split(",")]


def test_a_word_of_the_glossary_names_one_type():
    all_types = places(classes_only=False)
    found = {word: all_types[word.title()] for word in glossary() if word.title() in all_types}
    assert {word: where for word, where in found.items() if len(where) > 1} == {}
    assert {"sample", "group", "round", "step", "worker", "engine", "event", "command"} <= found.keys()


OF_ONE_MEANING = {
    "turn": r"hosts/|starters/(agents|environments)|scheduling/(core|parts/turns|rules/play_limits)|manager/to_hosts"
    r"|wire/(control|host_frames)|run/(trying|validation_desk)|bench/(chats|conversations|episodes)|cli/status",
    "ask": r"manager/(asking|openapi|serving/|http)|scheduling/parts/asking",
}
"""Words that other projects use for several things: by word, the files whose names may have it, in its one meaning."""
A_VERB = {"take_turns", "turn_away"}


def names_made_by(tree: ast.Module) -> Iterator[str]:
    """Yield the names of functions, classes, arguments, attributes and variables that a module makes."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case _:
                pass


def words_of(name: str) -> set[str]:
    """Return the words of a name, the plural as the singular: `NumTurns` and `num_turns` are num and turn."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("_")
    return {word.removesuffix("s") for word in words}


def test_a_word_with_one_meaning_is_in_no_other_name():
    assert OF_ONE_MEANING.keys() - {"ask"} <= set(glossary()) and "asked" in glossary()
    elsewhere = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for name in names_made_by(ast.parse(path.read_text()))
        for word, where in OF_ONE_MEANING.items()
        if word in words_of(name) and name not in A_VERB and not re.match(where, str(path.relative_to(PACKAGE)))
    }
    assert not elsewhere, "\n".join(sorted(elsewhere))


def test_variables_that_hold_tokens_are_not_called_text():
    texts = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for name in re.findall(r"\b(\w*texts?): \"?(?:Sequence\[)?SampleTokens", path.read_text())
    }
    assert not texts


def test_no_class_of_tokens_is_called_a_text():
    """Texts of replies in OpenAI's shape, which are made of texts of tokens, are none."""
    found = [
        f"{module}.{node.name}"
        for module, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and "text" in words_of(node.name) and holds_token_ids(node)
    ]
    assert not found


def holds_token_ids(class_: ast.ClassDef) -> bool:
    for node in ast.walk(class_):
        match node:
            case ast.AnnAssign(target=ast.Name(id="tokens") | ast.Attribute(attr="tokens"), annotation=kind):
                return "str" not in ast.unparse(kind)
            case ast.Assign(targets=[ast.Attribute(attr="tokens")]):
                return True
            case _:
                pass
    return False


def test_what_the_desk_holds_is_reached_through_the_desk_alone():
    checked = [path for path in PACKAGE.rglob("*.py") if path.name not in ("desk.py", "invariants.py")]
    texts = {path: path.read_text() for path in checked}
    by_state = {str(path): BY_THE_STATE.findall(text) for path, text in texts.items() if BY_THE_STATE.search(text)}
    assert not by_state
