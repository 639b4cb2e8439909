"""Programs and their cases: what passes, what fails, and what is never run."""

import asyncio
import shutil
from typing import Any

import pytest
from tests.rewards.sandbox.surroundings import LIMITS, honest, in_sandbox

from polyrl.errors import UserError
from polyrl.rewards.sandbox.program import CallCase, Case, InputCase, Program, PytestCase, SandboxLimits, Verdict
from polyrl.rewards.sandbox.sandbox import BlockingSandbox, Sandbox

pytestmark = [pytest.mark.usefixtures("bubblewrap"), pytest.mark.timeout(300)]


def verdict_of(source: str, *cases: Case, language: str = "python", **options: Any) -> Verdict:
    found: list[Verdict] = []

    async def body(sandbox: Sandbox) -> None:
        found.append(await sandbox.run(Program(source=source, cases=cases, language=language, **options)))

    in_sandbox(body, size=1)
    return found[0]


def call(value: Any, *args: Any, function: str = "f", **more: Any) -> CallCase:
    return CallCase(function=function, args=list(args), value=value, **more)


def test_the_first_failure_ends_the_cases():
    cases = [InputCase(input=str(number), output=str(number + (number == 2))) for number in range(5)]
    verdict = verdict_of("print(input())", *cases)
    assert (verdict.outcome, verdict.num_passed, len(verdict.cases), verdict.num_cases) == ("failed", 2, 3, 5)
    assert "printed '2\\n', expected '3'" in verdict.detail


def test_no_program_makes_anew_what_the_first_call_of_compile_makes():
    """The types of syntax trees, which cost a third of a trivial program's time. What the zygote made is frozen."""
    source = "import gc\nprint(sum(isinstance(one, type) and one.__module__ == 'ast' for one in gc.get_objects()))"
    assert verdict_of(source, InputCase(output="0")).outcome == "passed"


def test_arguments_inputs_and_values_may_be_large_and_a_case_beyond_all_is_no_fault_of_the_program():
    numbers, text = list(range(400_000)), "x" * 3_000_000
    right = "def f(x): return [one + 1 for one in x]"
    assert verdict_of(right, call([one + 1 for one in numbers], numbers)).outcome == "passed"
    assert verdict_of(right, call(numbers, numbers)).outcome == "failed"
    assert verdict_of("def f(x): return x, x, input", call(1, numbers)).outcome == "failed"
    assert verdict_of("print(input())", InputCase(input=text, output=text)).outcome == "passed"
    assert verdict_of("print(input() * 2)", InputCase(input=text, output=text)).outcome == "failed"
    for case in (
        InputCase(input="x" * (32 << 20), output=""),
        call(1, "x" * (32 << 20)),
        PytestCase(source="#" * (32 << 20)),
    ):
        with pytest.raises(UserError, match=r"a case of 33,554,\d* bytes, expected at most 31,457,280"):
            verdict_of("def f(x): return 1", case)


# Neither knows which exception is expected.
FORGED_LINEAGE = """
import os
def f(a):
    os.write(3, b'{"raised": ["KeyError", "ValueError", "TypeError"]}')
    os._exit(1)
"""
LOOKS_AT_ITS_JOB = """
import sys
def f(a):
    frame, said = sys._getframe(1), ""
    while frame is not None:
        said += str(frame.f_locals.get("job", ""))
        frame = frame.f_back
    if "raise" in said or "KeyError" in said: raise KeyError
"""


@pytest.mark.parametrize(
    ("source", "case", "outcome"),
    [
        ("def f(a, b): return a + b", call(5, 2, 3), "passed"),
        ("def f(a, b): return a - b", call(5, 2, 3), "failed"),
        ("def f(a): return (a, [a])", call([1, [1]], 1), "passed"),
        ("def f(a): return 0.1 + 0.2", call(0.3, 1), "passed"),
        ("def f(a): return {1: {2, 3}}", call({"1": [3, 2]}, 1), "passed"),
        ("def f(a): return {2, 3}", call([2, 3, 3], 1), "failed"),
        ("class Solution:\n    def f(self, a): return a", call(7, 7, function="Solution.f"), "passed"),
        ("async def f(a): return a", call(7, 7), "passed"),
        ("def f(a): print('noise'); return a", call(7, 7), "passed"),
        ("def f(a): raise KeyError(a)", call(None, 7, raises="LookupError"), "passed"),
        ("def f(a): raise KeyError(a)", call(None, 7, raises="ValueError"), "failed"),
        ("def f(a): return a", call(None, 7, raises="ValueError"), "failed"),
        (
            "class App(Exception): pass\nclass E(App, KeyError): pass\ndef f(a): raise E",
            call(None, 7, raises="KeyError"),
            "passed",
        ),
        ("class E(ValueError, KeyError): pass\ndef f(a): raise E", call(None, 7, raises="KeyError"), "failed"),
        (FORGED_LINEAGE, call(None, 7, raises="KeyError"), "failed"),
        (LOOKS_AT_ITS_JOB, call(None, 7, raises="KeyError"), "failed"),
        ("import os\ndef f(a): os._exit(1)", call(None, 7, raises="SystemExit"), "failed"),
        ("def f(a): raise KeyError(a)", call(7, 7), "crashed"),
        ("def g(a): return a", call(7, 7), "crashed"),
        ("def f(a): return 1" + "0" * 5000, call(7, 7), "crashed"),
        ("def f(a):", call(7, 7), "crashed"),
    ],
)
def test_a_function_is_called_and_its_value_compared_outside(source: str, case: CallCase, outcome: str):
    assert verdict_of(source, case).outcome == outcome


# The expected value stands nowhere in these sources, nor in the memory of a program that has not found it.
FOUND = """
import re
def found(held):
    data = held if isinstance(held, bytes) else repr(held).encode()
    return re.search(b"91827[3]645", data) is not None
"""
EXPECTED = 918273645
FORGERIES = {
    "an object that equals everything": "class E:\n    def __eq__(self, other): return True\ndef f(a): return E()",
    "a number that equals everything": "class E(int):\n    def __eq__(self, other): return True\ndef f(a): return E(8)",
    "the verdict itself": "def f(a): return {'outcome': 'passed', 'value': 'passed'}",
    "values on every descriptor": "import os\nfor n in range(3, 64):\n    try: os.write(n, b'{\"value\": 8}')\n"
    "    except OSError: pass\ndef f(a): return 0",
    "the channel of values, and then an exit": "import os\nos.write(3, b'{\"value\": 8}')\nos._exit(0)",
    "another JSON": "import json\njson.dumps = lambda *a, **k: '{\"value\": 8}'\ndef f(a): return 0",
    "our own frames": f"import sys\n{FOUND}\ndef f(a):\n    frame = sys._getframe()\n    while frame:\n"
    '        if found(frame.f_locals): return int("546372819"[::-1])\n        frame = frame.f_back\n    return 0',
    "all objects": f"import gc\n{FOUND}\ndef f(a):\n"
    '    return int("546372819"[::-1]) if found(gc.get_objects()) else 0',
    "all memory": f"{FOUND}\ndef f(a):\n    for line in open('/proc/self/maps'):\n"
    "        low, high = (int(one, 16) for one in line.split()[0].split('-'))\n        try:\n"
    "            with open('/proc/self/mem', 'rb') as file:\n                file.seek(low)\n"
    '                if found(file.read(high - low)): return int("546372819"[::-1])\n'
    "        except (OSError, OverflowError, ValueError): pass\n    return 0",
    "a bomb of nested lists": "def f(a):\n    held = []\n    for _ in range(100_000): held = [held]\n    return held",
    "nothing but closing": "import os\nos.closerange(0, 64)\ndef f(a): return 4711",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_function_cannot_forge_what_it_does_not_know(name: str):
    verdict = verdict_of(FORGERIES[name], call(EXPECTED, 1))
    assert verdict.outcome in ("failed", "crashed"), verdict


TESTS = """
import pytest
import solution
from solution import Stack, add

@pytest.mark.parametrize(("a", "b", "c"), [(1, 2, 3), (0, 0, 0)])
def test_add(a, b, c):
    assert add(a, b) == c

def test_stack():
    stack = Stack()
    stack.push(3)
    stack.push(4)
    assert stack.pop() == 4 and len(stack) == 1 and stack.items == [3] and isinstance(stack, Stack)
    with pytest.raises(solution.Empty):
        Stack().pop()
    with pytest.raises(IndexError):
        Stack().pop()

def test_close():
    assert abs(add(0.1, 0.2) - 0.3) < 1e-9 and 3 in solution.numbers(5) and 7 not in solution.numbers(5)

def test_values():
    assert list(solution.numbers(3)) == [0, 1, 2] and solution.pair(1) == (1, 2)
    assert Stack() == Stack() and Stack() != 3
"""
RIGHT = """
class Empty(IndexError): pass
def add(a, b): return a + b
def pair(a): return (a, a + 1)
def numbers(n): yield from range(n)
class Stack:
    def __init__(self): self.items = []
    def push(self, one): self.items.append(one)
    def pop(self):
        if not self.items: raise Empty("empty")
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __eq__(self, other): return self.items == other.items
"""
WRONG = {
    "wrong": RIGHT.replace("a + b", "a - b"),
    "exits at import": "import os\nos._exit(0)",
    "exits politely": "raise SystemExit(0)",
    "exits when called": RIGHT.replace("return a + b", "import os; os._exit(0)"),
    "equals everything": RIGHT.replace("return a + b", "return E()")
    + "\nclass E:\n    def __eq__(self, other): return True\n",
    "differs from nothing": RIGHT.replace("return a + b", "return a + b if isinstance(a, int) else E()")
    + "\nclass E:\n    def __sub__(self, other): return 0.0\n    def __abs__(self): return 0.0\n",
    "differs by an object": RIGHT.replace("return a + b", "return a + b if isinstance(a, int) else E()")
    + "\nclass E:\n    def __sub__(self, other): return self\n    def __abs__(self): return 0.0\n"
    "    def __lt__(self, other): return True\n",
    "contains everything": RIGHT.replace("def numbers(n): yield from range(n)", "def numbers(n): return E()")
    + "\nclass E:\n    def __contains__(self, other): return other == 3\n"
    "    def __iter__(self): return iter([0, 1, 2])\n",
    "replaces pytest": "import sys, types\nsys.modules['pytest'] = types.ModuleType('pytest')\n"
    + RIGHT.replace("a + b", "0"),
    "writes a conftest": RIGHT.replace("a + b", "0")
    + "\nfor name in ('conftest.py', 'pytest.ini', 'test_solution.py', 'pytest.py'):\n"
    "    open(name, 'w').write('def test(): pass')",
    "writes results": RIGHT.replace("a + b", "0") + "\nimport os\nfor n in range(3, 64):\n"
    '    try: os.write(n, b\'{"passed": 3, "failed": "", "code": 0}\')\n    except OSError: pass',
    "kills the tests": RIGHT.replace("return a + b", "import os, signal; os.kill(-1, signal.SIGKILL)"),
    "reads the tests": RIGHT.replace("return a + b", "return look(a, b)")
    + """
def look(a, b):
    import os, re
    for pid in [one for one in os.listdir("/proc") if one.isdigit()] + ["self"]:
        for name in ("root/tmp/test_solution.py", "cwd/test_solution.py", "mem"):
            try:
                if name != "mem":
                    if open(f"/proc/{pid}/{name}").read(): return a + b
                for line in open(f"/proc/{pid}/maps"):
                    low, high = (int(one, 16) for one in line.split()[0].split("-"))
                    with open(f"/proc/{pid}/mem", "rb") as file:
                        file.seek(low)
                        if re.search(b"mark[.]parametri[z]e", file.read(high - low)): return a + b
            except (OSError, OverflowError, ValueError): pass
    return None
""",
}


def test_a_pytest_file_passes_for_a_right_program():
    verdict = verdict_of(RIGHT, PytestCase(source=TESTS), cpu_s=1.0)
    assert verdict.outcome == "passed", verdict


@pytest.mark.parametrize("name", WRONG)
def test_a_pytest_file_cannot_be_made_to_pass_from_inside(name: str):
    verdict = verdict_of(WRONG[name], PytestCase(source=TESTS))
    assert verdict.outcome in ("failed", "crashed"), verdict


TESTS_OF_HABITS = """
import pytest
import solution

def test_in_place():
    rows, table, members = [2, 1], {"a": 1}, {3}
    solution.sort(rows)
    solution.add_key(table, members)
    assert (rows, table, members) == ([1, 2], {"a": 1, "b": 2}, {3, 4})

def test_printed(capsys):
    solution.greet()
    assert capsys.readouterr().out == "hello\\n"

def test_errors():
    with pytest.raises(UnicodeDecodeError):
        solution.read(b"\\xff")
    with pytest.raises(KeyError) as found:
        solution.table("a")
    assert found.value.args == ("a",) and str(found.value) == "'a'"
    with pytest.raises(solution.Refused, match="no: 7") as found:
        solution.refuse(7)
    assert found.value.code == 7

def test_named_tuples_and_numbers_of_its_own():
    assert solution.Point(1, 2) == (1, 2) and solution.Point(1, 2).y == 2 and solution.Point(1, 2) != (1, 3)
    assert (3 * solution.Money(2)).cents == 6 and sum([solution.Money(2), solution.Money(3)]).cents == 5
    money = solution.Money(1)
    del money.cents
    assert not hasattr(money, "cents")

def test_sets_of_sets():
    assert solution.subsets() == {frozenset([1]), frozenset([2])}
"""
HABITS = """
from collections import namedtuple
Point = namedtuple("Point", "x y")
class Refused(Exception):
    def __init__(self, code):
        self.code = code
    def __str__(self): return f"no: {self.code}"
class Money:
    def __init__(self, cents): self.cents = cents
    def __add__(self, other): return Money(self.cents + other.cents)
    def __radd__(self, other): return self
    def __rmul__(self, times): return Money(times * self.cents)
def sort(rows): rows.sort()
def add_key(table, members):
    table["b"] = 2
    members.add(4)
def greet(): print("hello")
def read(data): return data.decode()
def table(key): return {}[key]
def refuse(code): raise Refused(code)
def subsets(): return {frozenset([1]), frozenset([2])}
"""


def test_tests_may_use_a_program_as_they_would_use_a_module():
    verdict = verdict_of(HABITS, PytestCase(source=TESTS_OF_HABITS), cpu_s=1.0)
    assert verdict.outcome == "passed", verdict


TAKES_OVER = """
import sys
class Any: pass
def take_over(evil):
    frame = sys._getframe()
    while "answering" not in frame.f_globals: frame = frame.f_back
    ours = frame.f_globals["answering"]
    evil.do, ours._do = ours._do, evil
"""
TESTS_OF_TOTAL = """
import solution
def test_total():
    data = [40, 2]
    assert solution.total(data) == sum(data)
"""
LIARS = {
    "clears what it is compared with": "def total(data):\n    data.clear()\n    return 0",
    "has every content": TAKES_OVER
    + "def evil(held, request, args):\n    return list(range(100)) if request['op'] == 'contents' else "
    "Any() if request['op'] == 'call' else evil.do(held, request, args)\ntake_over(evil)\ndef total(data): return 0",
    "has itself as content": TAKES_OVER
    + "it = Any()\nit.__class__.__module__ = 'solution'\ndef evil(held, request, args):\n"
    "    if request['op'] in ('call', 'contents'): return it if request['op'] == 'call' else [it]\n"
    "    return evil.do(held, request, args)\n"
    "take_over(evil)\ndef total(data): return 0",
    "raises what it is not": "import unittest\ndef total(data): raise unittest.SkipTest('x')",
}


@pytest.mark.parametrize("name", LIARS)
def test_a_program_that_answers_otherwise_than_python_does_passes_no_tests(name: str):
    verdict = verdict_of(LIARS[name], PytestCase(source=TESTS_OF_TOTAL), cpu_s=1.0)
    assert verdict.outcome in ("failed", "crashed"), verdict
    assert "could not be loaded" not in verdict.detail


TESTS_THAT_IMPORT_ALL = """
import math
from solution import *

def test_add():
    assert abs(add(0.1, 0.2) - 0.3) < 1e-9
    assert math.isclose(add(1, 2), 3)
"""
SHADOWS_ABS = "def add(a, b): return a + b if isinstance(a, int) else 0\ndef abs(a): return 0"
SHADOWS_MATH = """
def add(a, b): return a + b if isinstance(a, float) else 0
class math:
    def isclose(a, b): return True
"""


@pytest.mark.parametrize(("source", "outcome"), [(RIGHT, "passed"), (SHADOWS_ABS, "failed"), (SHADOWS_MATH, "failed")])
def test_tests_that_import_everything_keep_their_own_names(source: str, outcome: str):
    assert verdict_of(source, PytestCase(source=TESTS_THAT_IMPORT_ALL)).outcome == outcome


def test_a_pytest_file_without_tests_does_not_pass():
    assert verdict_of(RIGHT, PytestCase(source="x = 1")).outcome == "failed"


OTHERS = {
    "c": ('#include <stdio.h>\nint main(){int a,b;scanf("%d%d",&a,&b);printf("%d\\n",a+b);}', "gcc"),
    "c++": ("#include <iostream>\nint main(){int a,b;std::cin>>a>>b;std::cout<<a+b;}", "g++"),
    "javascript": (
        "const [a, b] = require('fs').readFileSync(0, 'utf8').split(' ').map(Number); console.log(a + b)",
        "node",
    ),
}


@pytest.mark.parametrize("language", OTHERS)
def test_other_languages_are_compiled_and_run_inside(language: str):
    source, command = OTHERS[language]
    if shutil.which(command, path="/usr/bin:/bin") is None:
        pytest.skip(f"{command} is missing")
    right = (InputCase(input="2 3", output="5"), InputCase(input="20 3", output="23"))

    async def body(sandbox: Sandbox) -> None:
        assert (await sandbox.run(Program(source=source, language=language, cases=right))).num_passed == 2
        wrong = await sandbox.run(Program(source=source, language=language, cases=(InputCase(output="6"),)))
        assert wrong.outcome == "failed"
        broken = await sandbox.run(Program(source="int main( {", language=language, cases=right))
        assert broken.outcome == "crashed" and "rror" in broken.detail, broken

    in_sandbox(body, LIMITS, size=1)


@pytest.mark.skipif(shutil.which("gcc", path="/usr/bin:/bin") is None, reason="gcc is missing")
@pytest.mark.parametrize(
    "source",
    [
        '#include "/dev/random"',
        '#include "main.c"',
        "char x[1ul << 33] = {1};\nint main() {}",
        "#define a1 x\n" + "".join(f"#define a{n + 1} {f'a{n} ' * 9}\n" for n in range(1, 12)) + "a12",
    ],
    ids=["endless", "itself", "huge", "macros"],
)
def test_a_compiler_ends_within_limits_of_its_own(source: str):
    async def body(sandbox: Sandbox) -> None:
        verdict = await sandbox.run(Program(source=source, language="c", cases=(InputCase(output=""),), within_s=20.0))
        assert verdict.outcome in ("crashed", "timed_out", "failed") and "compile" in verdict.detail, verdict
        assert (await sandbox.run(honest(2))).outcome == "passed"
        assert sandbox.pool.num_replaced == 0

    in_sandbox(body, LIMITS, size=1)


@pytest.mark.skipif(shutil.which("g++", path="/usr/bin:/bin") is None, reason="g++ is missing")
def test_a_compiler_has_its_own_memory_whatever_that_of_programs_is():
    """A control group of the program's size would end compilers of honest programs, and only on some machines."""
    source = '#include <bits/stdc++.h>\nint main() { std::regex r("a*"); std::cout << 5; }'
    right = Program(source=source, language="c++", cases=(InputCase(output="5"),))

    async def body(sandbox: Sandbox) -> None:
        verdict = await sandbox.run(right)
        assert verdict.outcome == "passed", verdict

    in_sandbox(body, SandboxLimits(memory_mb=32), size=1)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (Program(source="x" * (1 << 20), cases=(InputCase(output=""),)), "characters"),
        (Program(source="", language="cobol", cases=(InputCase(output=""),)), "unknown language"),
        (Program(source="", language="c", cases=(CallCase(function="f"),)), "input cases alone"),
        (Program(source="", cases=()), "no cases"),
    ],
)
def test_what_cannot_be_run_is_refused_with_a_reason(program: Program, reason: str):
    async def body(sandbox: Sandbox) -> None:
        verdict = await sandbox.run(program)
        assert verdict.outcome == "refused" and reason in verdict.detail

    in_sandbox(body, size=1)


def test_a_program_has_its_own_limit_below_that_of_the_sandbox():
    verdict = verdict_of("while True: pass", InputCase(output=""), cpu_s=0.2)
    assert verdict.outcome == "timed_out" and 0.2 <= verdict.cpu_s < 0.6


def test_a_plain_function_runs_programs_without_an_event_loop():
    with BlockingSandbox(LIMITS) as sandbox:
        assert [sandbox.run(honest(number)).outcome for number in (2, 3)] == ["passed", "failed"]


def test_without_bubblewrap_nothing_runs_and_the_error_says_what_to_install():
    async def body() -> None:
        async with Sandbox.open(bwrap="bwrap-that-is-not-there"):
            pass

    with pytest.raises(UserError, match="apt-get install bubblewrap"):
        asyncio.run(body())


def test_a_sandbox_that_cannot_be_built_says_what_bubblewrap_said():
    async def body() -> None:
        async with Sandbox.open(bwrap="/bin/false"):
            pass

    with pytest.raises(UserError, match="the sandbox cannot be started"):
        asyncio.run(body())


def test_no_sandbox_shouts(capsys: pytest.CaptureFixture[str]):
    async def body(sandbox: Sandbox) -> None:
        assert (await sandbox.run(honest(2))).outcome == "passed"

    in_sandbox(body, size=1, unsafe_no_sandbox=True)
    assert "WITHOUT A SANDBOX" in capsys.readouterr().err


def test_programs_do_not_wait_for_one_another_beyond_the_size_of_the_pool():
    async def body(sandbox: Sandbox) -> None:
        slow = Program(source="import time\ntime.sleep(0.5)", cases=(InputCase(output=""),))
        found = await asyncio.gather(
            *(sandbox.run(slow) for _ in range(4)), *(sandbox.run(honest(n)) for n in range(20))
        )
        assert [one.outcome for one in found[:4]] == ["passed"] * 4
        assert [one.outcome for one in found[4:]] == ["passed", "failed"] * 10

    in_sandbox(body, size=3)


def test_a_cancelled_run_leaves_no_program_behind_and_its_place_is_filled():
    async def body(sandbox: Sandbox) -> None:
        running = asyncio.create_task(
            sandbox.run(Program(source="import time\ntime.sleep(60)", cases=(InputCase(output=""),)))
        )
        await asyncio.sleep(0.2)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert (await sandbox.run(honest(2))).outcome == "passed"
        assert sandbox.pool.num_replaced == 1

    in_sandbox(body, size=1)
