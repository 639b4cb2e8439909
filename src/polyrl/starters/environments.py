"""Two small environments to begin with: a calculator that a model may use, and a search over several turns.

    polyrl env try calculator --human
    polyrl env try treasure style=letters --model models/tiny

Both are made from the task's number alone, so that they are the same in every process. `style = "words"` is for models
that read English; `style = "letters"` says the same in single letters and digits, for a model of characters.
"""

import random
import re
from typing import Any, Literal

from polyrl.hosts.own import Turn

EnvironmentStyle = Literal["words", "letters"]

_CALL = re.compile(r"\s*(?:calc|c)\s*(\d{1,6})\s*(?:\+|p|plus)\s*(\d{1,6})\s*")
_NUMBER = re.compile(r"-?\d{1,9}")


class Calculator:
    """A sum, to be answered in at most two turns: with the calculator's help, or without."""

    max_turns = 2

    def __init__(self, style: EnvironmentStyle = "words", largest: int = 19) -> None:
        """`largest` is the largest term."""
        if not 1 <= largest <= 999_999:
            raise ValueError(f"largest: {largest}; expected a number from 1 to 999999")
        self._in_words = style == "words"
        self._largest = largest
        self._sum = 0
        self._has_called = False

    def begin(self, task: dict[str, Any], seed: int) -> str:
        draws = random.Random(f"calculator {seed} {task['index']}")
        first, second = draws.randint(1, self._largest), draws.randint(1, self._largest)
        self._sum = first + second
        if not self._in_words:
            return f"{first}p{second}q"
        return (
            f"What is {first} + {second}? Answer with the number alone. You may first call the calculator, once, by "
            f"answering for example: calc 3+4"
        )

    def step(self, text: str) -> Turn:
        call = _CALL.fullmatch(text)
        if call is not None and not self._has_called:
            self._has_called = True
            result = int(call[1]) + int(call[2])
            return Turn(
                [{"role": "user", "content": f"The calculator says {result}."}] if self._in_words else f"{result}a"
            )
        numbers = _NUMBER.findall(text)
        is_right = len(numbers) == 1 and call is None and int(numbers[0]) == self._sum
        parts = {"used_calculator": float(self._has_called)}
        return Turn(done=True, reward=1.0 if is_right else 0.0, parts=parts)


class Treasure:
    """A treasure on a line, to the left or to the right. Each step is told to be warmer or colder."""

    max_turns = 8

    def __init__(self, style: EnvironmentStyle = "words", farthest: int = 4, num_moves: int = 6) -> None:
        """`farthest` is the largest distance; after `num_moves` the search is over."""
        if not 1 <= farthest <= 100 or not 1 <= num_moves <= 1000:
            raise ValueError(f"farthest: {farthest}, num_moves: {num_moves}; expected 1 to 100, and 1 to 1000")
        self._in_words = style == "words"
        self._farthest = farthest
        self._num_left = num_moves
        self._distance = 0
        self.max_turns = num_moves

    def begin(self, task: dict[str, Any], seed: int) -> str:
        draws = random.Random(f"treasure {seed} {task['index']}")
        self._distance = draws.choice((-1, 1)) * draws.randint(1, self._farthest)
        if not self._in_words:
            return "s"
        return (
            "A treasure is to your left or to your right. Answer left or right, one step at a time, until it is found."
        )

    def step(self, text: str) -> Turn:
        self._num_left -= 1
        move = {"l": 1, "r": -1}.get(text.strip().lower()[:1])
        if move is None:
            return Turn(done=True, reward=0.0, why="neither left nor right")
        before = abs(self._distance)
        self._distance += move
        if self._distance == 0:
            return Turn(done=True, reward=1.0, why="found")
        if self._num_left == 0:
            return Turn(done=True, reward=0.0, why="not found")
        is_warmer = abs(self._distance) < before
        if self._in_words:
            return Turn("warmer" if is_warmer else "colder")
        return Turn("w" if is_warmer else "c")
