"""What a reward is: a function of one answer, named in the recipe, plain or async, that returns a finite number.

    def shorter_is_better(given: RewardInput) -> float:
        return 1.0 / (1 + given.num_tokens)

A recipe says `reward = "my_module:shorter_is_better"`, or names one of ours (config/functions.py).

Rules kept here: whatever goes wrong (an exception, NaN, a text where a number belongs) is a RewardFailed. It is never a
zero: a zero would teach the policy something false.
Left out: where functions run and for how long (pool.py).
"""

import inspect
import math
import numbers
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, cast

from polyrl.config.functions import find_function
from polyrl.errors import PolyrlError, shorten

OURS = {"arithmetic": "polyrl.rewards.arithmetic:score", "math": "polyrl.rewards.math_answers:score"}


class RewardInput(NamedTuple):
    """What a reward is told of an answer."""

    prompt: str
    """As the model saw it."""
    answer: str
    """The text, without the token that ends it."""
    expected: str
    """The row's answer, as text; empty where it has none."""
    row: dict[str, Any]
    """All columns of the row."""
    finish: str
    """stop, or length: it was cut off."""
    num_tokens: int
    """Of the answer, with the token that ends it."""


RewardFunction = Callable[[RewardInput], float | Awaitable[float]]


class RewardFailed(PolyrlError):
    """There is no reward for this answer. The message is one line."""


class RewardTimedOut(RewardFailed):
    """There is none because it took too long."""


def find_reward(name: str, key: str = "reward") -> RewardFunction:
    """The function of that name. Raises ConfigError, which starts with `key`, the setting that names it."""
    return cast("RewardFunction", find_function(name, key, OURS))


def is_async(function: RewardFunction) -> bool:
    return inspect.iscoroutinefunction(function)


def check_value(value: Any) -> float:
    """What a function returned, as a number. Raises RewardFailed."""
    if inspect.isawaitable(value):
        raise RewardFailed("returned an awaitable; a function that waits is to be an `async def`")
    if not isinstance(value, numbers.Real):
        raise RewardFailed(f"returned {shorten(repr(value))}, expected a number")
    number = float(value)
    if not math.isfinite(number):
        raise RewardFailed(f"returned {number}, expected a finite number")
    return number
