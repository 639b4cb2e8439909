"""A small model for the arithmetic task, to start reinforcement learning from. About 25 s on one core.

It is taught twice: first the solutions, then solutions by somebody impatient, who before every step may stop working
and guess the rest. The model can work a sum out, and mostly does not: at temperature 1 it is right in about three
answers of ten. Patience is what reinforcement learning then has to find, and with it answers become longer.

Rules kept here: training problems only, so that validation means something.
Left out: reinforcement learning, and lessons as such (teaching.py).
"""

import random
from pathlib import Path

from polyrl.config.recipe import ArithmeticTask
from polyrl.data import characters
from polyrl.data.arithmetic import Problem, draw_problem
from polyrl.starters import teaching
from polyrl.starters.teaching import Demonstration, Show

NUM_STEPS = 1700
_CLEAN_SHARE = 0.85
"""Of the steps, before impatience is taught."""
IMPATIENCE = 0.45
"""The probability, before every step of a solution, that the rest is guessed."""
_WORST_GUESS = 9


def make_model(
    folder: Path, *, seed: int, task: ArithmeticTask, num_steps: int = NUM_STEPS, show: Show | None = None
) -> None:
    """Make the model in a new or empty directory. Raises UserError if it cannot be written."""

    def show_one(number: int, share: float, draws: random.Random) -> Demonstration:
        impatience = IMPATIENCE if share >= _CLEAN_SHARE else 0.0
        return demonstrate(draw_problem(task, seed, "train", number), impatience, draws)

    teaching.make_model(folder, show_one, seed=seed, num_steps=num_steps, show=show)


def demonstrate(problem: Problem, impatience: float, draws: random.Random) -> Demonstration:
    """Return a solution, or the start of one and a guess: an equals sign where the next term should be, and a
    number."""
    for num_worked in range(len(problem.terms) - 1):
        if draws.random() < impatience:
            guess = max(1, sum(problem.terms) + draws.randint(-_WORST_GUESS, _WORST_GUESS))
            return _answered(problem, "".join(problem.working(num_worked)) + f"={guess}")
    return _answered(problem, problem.solution)


def _answered(problem: Problem, text: str) -> Demonstration:
    prompt, answer = characters.encode(problem.prompt), [*characters.encode(text), characters.END_ID]
    return Demonstration([*prompt, *answer], [False] * len(prompt) + [True] * len(answer))
