"""The arithmetic task: sums worked out one term at a time, generated here, with answers that can be checked.

    a3b5c4d2=           the prompt: terms, each after its letter
    b5=8c4=12d2=14      the answer: each further term is copied, and the running sum follows its equals sign

The number after the last equals sign is checked. An answer has about five characters per term, and there are more
problems with few terms than with many: most answers are short and some are long.

Rules kept here: a problem is a function of (task, seed, split, index), on every machine. The terms alone decide whether
a problem belongs to training or to validation, so the splits never overlap, whatever seeds, sizes and numbers of terms
they are drawn with.
Left out: tokens (data/characters.py), and the model that learns the task (starters/arithmetic.py).
"""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from polyrl.config.recipe import ArithmeticTask
from polyrl.errors import UserError
from polyrl.scheduling.rules.order import mix64, unit

Split = Literal["train", "validation"]

LETTERS = "abcdefghijklmnopqrstuvwxyz"
NUM_TRAIN = 100_000
"""The number of problems in an epoch, unless the recipe sets it."""
NUM_VALIDATION = 1_000
_VALIDATION_SHARE = 0.1
_SPLIT_KEY = 0x5B117
_MAX_DRAWS = 10_000


class Problem(NamedTuple):
    terms: tuple[int, ...]

    @property
    def prompt(self) -> str:
        return "".join(f"{letter}{term}" for letter, term in zip(LETTERS, self.terms, strict=False)) + "="

    @property
    def as_written(self) -> str:
        """The sum in the usual notation, for pretrained models."""
        return " + ".join(map(str, self.terms))

    @property
    def answer(self) -> str:
        return str(sum(self.terms))

    @property
    def solution(self) -> str:
        return "".join(self.working(len(self.terms) - 1))

    def working(self, num_steps: int) -> Sequence[str]:
        """Return the first steps of the solution: each copies a term and writes the running sum."""
        return [
            f"{LETTERS[place]}{self.terms[place]}={sum(self.terms[: place + 1])}" for place in range(1, num_steps + 1)
        ]


def draw_problem(task: ArithmeticTask, seed: int, split: Split, index: int) -> Problem:
    """Return the problem at this index of the split. Raises UserError if the task has no problem for the split."""
    for problem in draw_problems(task, seed, split, index):
        return problem
    raise UserError(f"data.arithmetic: no {split} problem was found; expected more terms, or a larger max_term")


def draw_problems(task: ArithmeticTask, seed: int, split: Split, index: int) -> Iterator[Problem]:
    """Yield candidate problems for this index of the split, so that a caller can skip one. There are finitely many."""
    num_lengths = task.max_terms - task.min_terms + 1
    key = mix64(seed, index, 1 if split == "validation" else 0)
    for attempt in range(_MAX_DRAWS):
        draw = mix64(key, attempt)
        num_terms = task.min_terms + int(num_lengths * unit(draw, 0) ** 2)  # squared: few terms more often than many
        terms = tuple(1 + mix64(draw, place + 1) % task.max_term for place in range(num_terms))
        if split_of(terms) == split:
            yield Problem(terms)


def split_of(terms: tuple[int, ...]) -> Split:
    return "validation" if unit(_SPLIT_KEY, *terms) < _VALIDATION_SHARE else "train"


def is_correct(answer_text: str, expected: str) -> bool:
    """Return whether the text after the last equals sign is the expected number, ignoring spaces and a full stop."""
    return answer_text.rpartition("=")[2].strip().removesuffix(".") == expected
