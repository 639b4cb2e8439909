"""A small model for programming exercises, to start reinforcement learning from. About 30 s on one core.

It is taught twice: first the solutions, then programs by somebody careless, who at every step may leave it out, read
another step or number than the prompt has, or name a variable that is not there. The model can write the right
program, and mostly does not: at temperature 1 about three programs in ten pass their tests. Care is what reinforcement
learning then has to find, by running them.

Rules kept here: training exercises only, so that validation means something.
Left out: reinforcement learning, the exercises (data/exercises.py), and lessons as such (teaching.py).
"""

import random
import re
from pathlib import Path

from polyrl.data import characters
from polyrl.data.exercises import KINDS, LETTERS, MAX_NUMBER, RESULTS, Exercise, ExerciseStep, draw_exercise
from polyrl.starters import teaching
from polyrl.starters.teaching import Demonstration, Show

NUM_STEPS = 1800
_CLEAN_SHARE = 0.85
"""Of the steps, before carelessness is taught."""
CARELESSNESS = 0.35
"""The probability of a mistake at each step of a program."""
_FIRST_LINE, _INDENT = "def f(x):\n", "    "


def _pieces(words: str) -> list[str]:
    """Split what a prompt or a program says of a step into words; numbers and names are words of their own."""
    return [one for one in re.split(r"\{[kx]\}", words) if one]


_WORDS = (
    *dict.fromkeys(
        [piece for kind in KINDS for words in (kind.words, kind.code) for piece in _pieces(words)]
        + [piece for kind in RESULTS for words in (kind.words, kind.code) for piece in _pieces(words)]
    ),
    *LETTERS,
    *map(str, range(1, MAX_NUMBER + 1)),
    "x",
    ": ",
    "; ",
    " = ",
    "\n",
    _INDENT,
    "return ",
    _FIRST_LINE,
)
VOCABULARY = (characters.PAD, characters.END, characters.UNKNOWN, *_WORDS)
_ID_OF = {word: number for number, word in enumerate(VOCABULARY)}
_PATTERN = "|".join(re.escape(word) for word in sorted(_WORDS, key=len, reverse=True))
"""A longer word before those that it begins with."""


def encode(text: str) -> list[int]:
    parts = [part for part in re.split(f"({_PATTERN})", text) if part]
    return [_ID_OF.get(part, characters.UNKNOWN_ID) for part in parts]


def save_tokenizer(folder: Path) -> None:
    characters.save_words(folder, VOCABULARY, {"Regex": _PATTERN})


def make_model(folder: Path, *, seed: int, num_steps: int = NUM_STEPS, show: Show | None = None) -> None:
    """Make the model in a new or empty directory. Raises UserError if it cannot be written."""

    def show_one(number: int, share: float, draws: random.Random) -> Demonstration:
        carelessness = CARELESSNESS if share >= _CLEAN_SHARE else 0.0
        return demonstrate(draw_exercise("train", number), carelessness, draws)

    teaching.make_model(
        folder,
        show_one,
        seed=seed,
        num_steps=num_steps,
        show=show,
        save_tokenizer=save_tokenizer,
        num_words=len(VOCABULARY),
    )


def demonstrate(exercise: Exercise, carelessness: float, draws: random.Random) -> Demonstration:
    prompt, answer = encode(exercise.prompt), [*encode(write(exercise, carelessness, draws)), characters.END_ID]
    return Demonstration([*prompt, *answer], [False] * len(prompt) + [True] * len(answer))


def write(exercise: Exercise, carelessness: float, draws: random.Random) -> str:
    """Write a program: right, but for a mistake with this probability at each step."""
    lines, before = [_FIRST_LINE], "x"
    for name, step in zip(LETTERS, exercise.steps, strict=False):
        mistake = draws.choice(("left out", "misread", "misnamed")) if draws.random() < carelessness else ""
        if mistake == "left out":
            continue
        source = draws.choice([one for one in ("x", *LETTERS) if one != before]) if mistake == "misnamed" else before
        lines.append((_misread(step, draws) if mistake == "misread" else step).line(name, source))
        before = name
    return "".join(lines) + f"{_INDENT}return {exercise.result.code.format(x=before)}"


def _misread(step: ExerciseStep, draws: random.Random) -> ExerciseStep:
    if step.kind.has_number and draws.random() < 0.5:
        return step._replace(number=draws.choice([one for one in range(1, MAX_NUMBER + 1) if one != step.number]))
    kind = draws.choice([one for one in KINDS if one is not step.kind])
    return ExerciseStep(kind, draws.randint(1, MAX_NUMBER) if kind.has_number else 0)
