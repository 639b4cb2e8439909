"""Programming exercises, generated here: a function over a list of numbers, described step by step, with test cases.

    a: keep even; b: add 3; c: reverse; return the sum         the prompt: steps, each after its letter

    def f(x):                                                  an answer: a Python function, which is run
        a = [n for n in x if n % 2 == 0]
        b = [n + 3 for n in a]
        c = b[::-1]
        return sum(c)

`rows` is a data source: `source = "polyrl.data.exercises:rows"`. A row has a prompt, a solution that nothing compares
with, and tests: calls of the function, for the reward `code`. Any function that passes them is right.

Rules kept here: an exercise is a function of (split, index), on every machine. Its steps alone decide whether it
belongs to training or to validation, so the splits never overlap. Its tests tell it from every exercise that lacks one
of its steps.
Left out: the model that learns the task, and its tokenizer (starters/programs.py).
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

from polyrl.scheduling.rules.order import mix64, unit

LETTERS = "abcd"
NUM_ROWS = {"train": 8_000, "validation": 500}
MAX_NUMBER = 9
_MIN_STEPS = 2
_NUM_TESTS = 2
_LIST_LENGTH = 7
_SMALLEST, _LARGEST = -9, 12
"""The range of the numbers in the lists of the tests."""
_VALIDATION_SHARE = 0.1
_KEY, _SPLIT_KEY, _TEST_KEY = 0xC0DE, 0xC0DE5, 0xC0DE7


class StepKind(NamedTuple):
    words: str
    """The step in a prompt's words; {k} is its number."""
    code: str
    """The expression that computes it from the list {x}."""
    compute: Callable[[list[int], int], list[int]]

    @property
    def has_number(self) -> bool:
        return "{k}" in self.words


KINDS = (
    StepKind("keep even", "[n for n in {x} if n % 2 == 0]", lambda x, _: [n for n in x if n % 2 == 0]),
    StepKind("keep odd", "[n for n in {x} if n % 2 == 1]", lambda x, _: [n for n in x if n % 2 == 1]),
    StepKind("keep above {k}", "[n for n in {x} if n > {k}]", lambda x, k: [n for n in x if n > k]),
    StepKind("add {k}", "[n + {k} for n in {x}]", lambda x, k: [n + k for n in x]),
    StepKind("multiply by {k}", "[n * {k} for n in {x}]", lambda x, k: [n * k for n in x]),
    StepKind("sort", "sorted({x})", lambda x, _: sorted(x)),
    StepKind("reverse", "{x}[::-1]", lambda x, _: x[::-1]),
)


class ResultKind(NamedTuple):
    words: str
    code: str
    compute: Callable[[list[int]], int | list[int]]


RESULTS = (
    ResultKind("return the sum", "sum({x})", sum),
    ResultKind("return the count", "len({x})", len),
    ResultKind("return the list", "{x}", list),
)


class ExerciseStep(NamedTuple):
    kind: StepKind
    number: int

    @property
    def words(self) -> str:
        return self.kind.words.format(k=self.number)

    def line(self, name: str, before: str) -> str:
        """Return the line of a program that gives the step's list, made from the list `before`, a name."""
        return f"    {name} = {self.kind.code.format(x=before, k=self.number)}\n"


class Exercise(NamedTuple):
    steps: tuple[ExerciseStep, ...]
    result: ResultKind

    @property
    def prompt(self) -> str:
        steps = [f"{name}: {step.words}; " for name, step in zip(LETTERS, self.steps, strict=False)]
        return "".join(steps) + self.result.words + "\n"

    @property
    def solution(self) -> str:
        names = ["x", *LETTERS]
        lines = [step.line(names[place + 1], names[place]) for place, step in enumerate(self.steps)]
        return "def f(x):\n" + "".join(lines) + f"    return {self.result.code.format(x=names[len(lines)])}"

    def value(self, numbers: list[int]) -> int | list[int]:
        for step in self.steps:
            numbers = step.kind.compute(numbers, step.number)
        return self.result.compute(numbers)

    @property
    def key(self) -> tuple[int, ...]:
        steps = [KINDS.index(step.kind) * (MAX_NUMBER + 1) + step.number for step in self.steps]
        return (RESULTS.index(self.result), *steps)

    @property
    def is_for_validation(self) -> bool:
        return unit(_SPLIT_KEY, *self.key) < _VALIDATION_SHARE


def draw_exercise(split: Literal["train", "validation"], index: int) -> Exercise:
    """Return the exercise at this index of the split."""
    attempt = 0
    while True:
        found = _draw(mix64(_KEY, int(split == "validation"), index, attempt))
        if found.is_for_validation == (split == "validation") and _needs_every_step(found):
            return found
        attempt += 1


def _draw(draw: int) -> Exercise:
    num_steps = _MIN_STEPS + mix64(draw, 0) % (len(LETTERS) - _MIN_STEPS + 1)
    steps: list[ExerciseStep] = []
    for place in range(num_steps):
        kind = KINDS[mix64(draw, place, 1) % len(KINDS)]
        steps.append(ExerciseStep(kind, 1 + mix64(draw, place, 2) % MAX_NUMBER if kind.has_number else 0))
    return Exercise(tuple(steps), RESULTS[mix64(draw, 1) % len(RESULTS)])


def _needs_every_step(exercise: Exercise) -> bool:
    lists = _test_lists(exercise)
    shorter = [exercise.steps[:place] + exercise.steps[place + 1 :] for place in range(len(exercise.steps))]
    values = [exercise.value(numbers) for numbers in lists]
    others = [[exercise._replace(steps=steps).value(numbers) for numbers in lists] for steps in shorter]
    return any(values) and values not in others


def _test_lists(exercise: Exercise) -> list[list[int]]:
    draws = [
        [mix64(_TEST_KEY, number, place, *exercise.key) for place in range(_LIST_LENGTH)]
        for number in range(_NUM_TESTS)
    ]
    return [[_SMALLEST + draw % (_LARGEST - _SMALLEST + 1) for draw in one] for one in draws]


def cases_of(exercise: Exercise) -> list[dict[str, Any]]:
    """Return calls of the function with their values, as the reward `code` reads them."""
    lists = _test_lists(exercise)
    return [{"function": "f", "args": [numbers], "value": exercise.value(numbers)} for numbers in lists]


def rows(split: Literal["train", "validation"] = "train") -> Iterator[dict[str, Any]]:
    """Yield the rows of a split."""
    for index in range(NUM_ROWS[split]):
        exercise = draw_exercise(split, index)
        yield {"prompt": exercise.prompt, "tests": cases_of(exercise), "solution": exercise.solution}
