"""The shape of the source: short functions, short files, and a map that names every file.

An exception has a reason, and is taken off the list when it is no longer one: the tests fail for a needless entry too.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "polyrl"
FILES = sorted(PACKAGE.rglob("*.py"))

MAX_FUNCTION_LINES = 50
LONG_FUNCTIONS = {
    "cli/worker.py:add_arguments": "a list of options",
    "engines/builtin/cuda/kernels.py:_decode_kernel": "a Triton kernel is one function",
    "engines/builtin/cuda/small_kernels.py:one_by_one_kernel": "a Triton kernel is one function",
    "engines/builtin/cuda/small_kernels.py:tiles_kernel": "a Triton kernel is one function",
    "engines/builtin/cuda/small_kernels.py:attention_kernel": "a Triton kernel is one function",
    "engines/builtin/cuda/runner.py:__init__": "a list of the tensors that CUDA graphs read and write",
}

MAX_FILE_LINES = 450
LONG_FILES = {
    "client/fleet.py": "the trainer's side of a fleet is one public class",
    "config/recipe.py": "one typed tree, read from top to bottom",
    "weights/fetch.py": "one algorithm: chunks from several sources at once",
    "wire/frames.py": "one list of all frames",
    "worker/agent.py": "a worker's life is one state machine",
}


def functions(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def test_no_function_is_longer_than_a_screen():
    found = {
        f"{path.relative_to(PACKAGE)}:{name}"
        for path in FILES
        for name, num_lines in functions(path)
        if num_lines > MAX_FUNCTION_LINES
    }
    assert found == LONG_FUNCTIONS.keys()


def test_no_file_is_too_long_to_be_read_in_one_go():
    found = {
        str(path.relative_to(PACKAGE))
        for path in FILES
        if len(path.read_text(encoding="utf-8").splitlines()) > MAX_FILE_LINES
    }
    assert found == LONG_FILES.keys()


def test_a_run_is_put_together_in_one_short_file():
    assert len((PACKAGE / "run/training.py").read_text(encoding="utf-8").splitlines()) < 200


def named_on_the_map(text: str) -> set[str]:
    """Return the files and folders (with a slash at the end) that the tables of ARCHITECTURE.md name.

    The first name of a cell has its folder, the others are beside it; a row in bold names a folder for the rows below.
    """
    named: set[str] = set()
    base = group = ""
    for line in text.splitlines():
        if not line.startswith("|"):
            continue
        cell = line.split("|")[1]
        names = re.findall(r"`([\w/]+)`", cell)
        if cell.strip().startswith("file"):
            base = names[0].removeprefix("src/polyrl/") if names else ""
            group = ""
        elif cell.strip().startswith("**") and base:
            group = names[0]
        elif names:
            folder = base + group if base else names[0].rpartition("/")[0] + "/"
            for name in names:
                whole = name if "/" in name else folder + name
                named.add(whole if whole.endswith("/") else f"{whole}.py")
    return named


def test_the_map_names_files_that_are_there_and_all_files_of_a_package_of_which_it_names_one():
    named = named_on_the_map((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"))
    assert len(named) > 100
    assert [name for name in sorted(named) if not (PACKAGE / name).exists()] == []
    told = {name.rpartition("/")[0] for name in named if not name.endswith("/")}
    there = [str(path.relative_to(PACKAGE)) for path in FILES if path.name != "__init__.py"]
    assert [name for name in there if name.rpartition("/")[0] in told and name not in named] == []
