"""The scheduler is pure: it imports only what is listed here, calls nothing that reads or writes the world, and never
walks through a set, whose order changes from process to process.

import-linter forbids what we thought of; this allow-list refuses what nobody thought of. Sets are found by their form
(a display, a comprehension, `set(...)`, a name annotated or assigned as one in the same file); a set behind a function
call is not seen. The determinism tests are there for those.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import polyrl

PACKAGE = Path(polyrl.__file__).parent
PURE_FILES = sorted([*(PACKAGE / "scheduling").rglob("*.py"), PACKAGE / "ids.py", PACKAGE / "errors.py"])

ALLOWED_MODULES = {
    "__future__",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "hashlib",
    "heapq",
    "itertools",
    "math",
    "msgspec",
    "statistics",
    "struct",
    "typing",
    "zlib",
}
ALLOWED_OWN_MODULES = ("polyrl.ids", "polyrl.errors", "polyrl.scheduling")

# hash() and id() differ from process to process; the rest reads or writes the world.
FORBIDDEN_CALLS = {
    *("open", "print", "input", "breakpoint", "eval", "exec", "compile", "__import__", "globals"),
    *("hash", "id"),
}
SET_TYPES = {"set", "frozenset", "Set", "AbstractSet", "MutableSet"}
SET_METHODS = {"union", "intersection", "difference", "symmetric_difference"}
ORDER_KEEPING_CALLS = {"list", "tuple", "iter", "enumerate", "zip", "map", "filter", "reversed", "deque", "fromkeys"}


def offences(source: str, module: str = "polyrl.scheduling.example") -> list[str]:
    """Every line of a pure module that breaks a rule, as `line: why`."""
    tree = ast.parse(source)
    sets = set_names(tree)
    found = [*import_offences(tree, module), *call_offences(tree), *set_offences(tree, sets)]
    return [f"{line}: {why}" for line, why in sorted(found)]


def import_offences(tree: ast.AST, module: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        for name in imported_modules(node, module):
            if not is_allowed(name):
                yield getattr(node, "lineno", 0), f"imports {name}"


def imported_modules(node: ast.AST, module: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    parents = module.split(".")[: -node.level] if node.level else []
    origin = ".".join([*parents, *([node.module] if node.module else [])])
    # `from polyrl import ids` names a module after the import; `from polyrl.ids import Step` names it before.
    return [f"{origin}.{alias.name}" for alias in node.names] if origin == "polyrl" else [origin]


def is_allowed(name: str) -> bool:
    own = any(name == allowed or name.startswith(f"{allowed}.") for allowed in ALLOWED_OWN_MODULES)
    return own or name.partition(".")[0] in ALLOWED_MODULES


def call_offences(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            yield node.lineno, f"calls {node.func.id}()"


def set_offences(tree: ast.AST, sets: set[str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        for walked in walked_in_order(node):
            if is_set(walked, sets):
                yield walked.lineno, f"walks through the set {ast.unparse(walked)}"


def walked_in_order(node: ast.AST) -> list[ast.expr]:
    """What this node walks through in a way that the order can be seen afterwards. Making a set of it cannot be."""
    match node:
        case ast.For(iter=walked) | ast.Starred(value=walked):
            return [walked]
        case ast.ListComp(generators=generators) | ast.DictComp(generators=generators):
            return [generator.iter for generator in generators]
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=args) if name in ORDER_KEEPING_CALLS:
            return args
        case ast.Call(func=ast.Attribute(attr="pop", value=walked), args=[]):
            return [walked]
        case _:
            return []


def is_set(node: ast.expr, sets: set[str]) -> bool:
    match node:
        case ast.Set() | ast.SetComp():
            return True
        case ast.Call(func=ast.Name(id="set" | "frozenset")):
            return True
        case ast.Call(func=ast.Attribute(attr=name, value=inner)) if name in SET_METHODS | {"copy"}:
            return is_set(inner, sets)
        case ast.BinOp(op=ast.BitOr() | ast.BitAnd() | ast.Sub() | ast.BitXor(), left=left, right=right):
            return is_set(left, sets) or is_set(right, sets)
        case ast.Name() | ast.Attribute():
            return ast.unparse(node) in sets
        case _:
            return False


def set_names(tree: ast.AST) -> set[str]:
    """Names of this file (`x`, `self.x`) that are annotated or assigned as a set. A field of a class is `self.` too."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.AnnAssign(target=target, annotation=annotation) if is_set_type(annotation):
                names |= {ast.unparse(target), f"self.{ast.unparse(target)}"}
            case ast.Assign(targets=[target], value=value) if is_set(value, names):
                names.add(ast.unparse(target))
            case ast.arg(arg=name, annotation=ast.expr() as annotation) if is_set_type(annotation):
                names.add(name)
            case _:
                pass
    return names


def is_set_type(annotation: ast.expr) -> bool:
    outer = annotation.value if isinstance(annotation, ast.Subscript) else annotation
    return isinstance(outer, ast.Name) and outer.id in SET_TYPES


@pytest.mark.parametrize("path", PURE_FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_pure_code_keeps_to_itself(path):
    module = ".".join(["polyrl", *path.relative_to(PACKAGE).with_suffix("").parts])
    assert offences(path.read_text(encoding="utf-8"), module) == []


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import time", "imports time"),
        ("import collections.abc, os.path", "imports os.path"),
        ("def f():\n    from random import choice", "imports random"),
        ("from polyrl import sim", "imports polyrl.sim"),
        ("from ..sim import engine_model", "imports polyrl.sim"),
        ("from .. import cli", "imports polyrl.cli"),
        ("import polyrl.scheduling_extras", "imports polyrl.scheduling_extras"),
        ("print('here')", "calls print()"),
        ("with open('x') as f: pass", "calls open()"),
        ("order = sorted(xs, key=lambda x: hash(x))", "calls hash()"),
        ("for x in {1, 2}: pass", "walks through the set"),
        ("y = [x for x in set(xs)]", "walks through the set"),
        ("y = list({x for x in xs} - {1})", "walks through the set"),
        ("lost = set(xs)\nfor x in lost: pass", "walks through the set lost"),
        ("def f(lost: frozenset[int]): return tuple(lost)", "walks through the set lost"),
        ("class A:\n    idle: set[int]\n    def f(self): return [*self.idle]", "walks through the set self.idle"),
        ("idle: set[int] = set()\nx = idle.pop()", "walks through the set idle"),
    ],
)
def test_a_planted_offence_is_found(source, why):
    (offence,) = offences(source)
    assert why in offence


@pytest.mark.parametrize(
    "source",
    [
        "from collections.abc import Iterator\nimport math, msgspec",
        "from polyrl.ids import Step\nfrom polyrl import errors\nfrom . import events\nfrom .events import Event",
        "lost = set(xs)\nfor x in sorted(lost): pass\nok = 1 in lost and len(lost)",
        "lost = {1}\nfresh = {x + 1 for x in lost}",
        "for x in dict.fromkeys(xs): pass\nnames = [x for x in mapping]",
        "def f(total: int, used: int): return list(range(total - used))",
        "queue = []\nqueue.pop()",
    ],
)
def test_innocent_code_is_left_alone(source):
    assert offences(source) == []
