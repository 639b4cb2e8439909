"""What a reward is: a function of one answer, named in the recipe, plain or async, that returns a finite number.

    def shorter_is_better(given: RewardInput) -> float:
        return 1.0 / (1 + given.num_tokens)

A recipe says `reward = "my_module:shorter_is_better"`, or names one of ours. Modules are looked up where Python looks,
and then in the current folder.

Rules kept here: whatever goes wrong (an exception, NaN, a text where a number belongs) is a RewardFailed. It is never a
zero: a zero would teach the policy something false.
Left out: where functions run and for how long (pool.py).
"""

import difflib
import importlib
import inspect
import math
import numbers
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, cast

from polyrl.errors import ConfigError, PolyrlError

OURS = {"arithmetic": "polyrl.rewards.arithmetic:score", "math": "polyrl.rewards.math_answers:score"}
_SHOWN_CHARACTERS = 300


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
    module_name, colon, function_name = OURS.get(name, name).partition(":")
    if not colon:
        near = difflib.get_close_matches(name, OURS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f'{key}: unknown name "{name}"; expected {", ".join(OURS)}, or module:function{hint}')
    look_in(os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name, None)
    except Exception as error:  # whatever a module of the person's own raises while it is imported
        raise ConfigError(f'{key}: "{name}": {module_name} cannot be imported: {one_line(error)}') from error
    if not callable(function):
        raise ConfigError(f'{key}: "{name}": {module_name} has no function {function_name}')
    return cast("RewardFunction", function)


def look_in(folder: str) -> None:
    """Let modules be found in this folder too, after all other places: no file in it hides a library."""
    if folder not in sys.path:
        sys.path.append(folder)


def is_async(function: RewardFunction) -> bool:
    return inspect.iscoroutinefunction(function)


def check_value(value: Any) -> float:
    """What a function returned, as a number. Raises RewardFailed."""
    if inspect.isawaitable(value):
        raise RewardFailed("returned an awaitable; a function that waits is to be an `async def`")
    if not isinstance(value, numbers.Real):
        raise RewardFailed(f"returned {_shown(repr(value))}, expected a number")
    number = float(value)
    if not math.isfinite(number):
        raise RewardFailed(f"returned {number}, expected a finite number")
    return number


def one_line(error: BaseException) -> str:
    """`TypeName: what it says`, cut where it is long."""
    text = " ".join(str(error).split())
    return _shown(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."
