"""A reward: a function of one answer, named in the recipe, plain or async, that returns a finite number.

    def shorter_is_better(given: RewardInput) -> float:
        return 1.0 / (1 + given.num_tokens)

A recipe says `reward = "my_module:shorter_is_better"`, or names one of ours (config/plugins.py). A function may also
return named parts: a dict, whose sum is the score unless it has a `score` of its own, or a Reward.

Rules kept here: every fault (an exception, NaN, a text instead of a number) is a RewardFailed. It is never a zero: a
zero would teach the policy something false. Parts are few and their names short, because they travel with the sample.
Left out: where functions run and for how long (pool.py), and several of them for one answer (weighing.py).
"""

import inspect
import math
import numbers
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, cast

from polyrl.config.plugins import check_arguments, find
from polyrl.errors import NoReward, shorten

OURS = {"arithmetic": "polyrl.rewards.arithmetic:score", "math": "polyrl.rewards.math_answers:score"}
SCORE = "score"
"""The key of the reward itself in a dict of parts, if it is not the sum of the parts."""
MAX_PARTS = 32
_PART_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class RewardInput(NamedTuple):
    """The facts about an answer that a reward function gets."""

    prompt: str
    """The prompt as the model saw it."""
    answer: str
    """The text of the answer, without the token that ends it."""
    expected: str
    """The row's answer, as text; empty if it has none."""
    row: dict[str, Any]
    """All columns of the row."""
    finish: str
    """`stop`, or `length` if the answer was cut off."""
    num_tokens: int
    """The number of answer tokens, the end token included."""


class Reward(NamedTuple):
    """The score of an answer, and the parts that it is made of."""

    score: float
    parts: Mapping[str, float] = {}


RewardFunction = Callable[..., float | Mapping[str, float] | Reward | Awaitable[Any]]
"""Called with a RewardInput, and with the arguments that the recipe gives by name."""


class RewardFailed(NoReward):
    """There is no reward for this answer. The message is one line."""


class RewardTimedOut(RewardFailed):
    """There is no reward because scoring took too long."""


def find_reward(name: str, key: str = "reward") -> RewardFunction:
    """Return the function of that name. Raises ConfigError, which starts with `key`, the setting that names it."""
    return cast("RewardFunction", find(name, key, OURS))


def check_reward(function: RewardFunction, arguments: Mapping[str, Any], key: str) -> None:
    """Raise ConfigError for arguments that the function does not take; `key` is the setting that names the function."""
    check_arguments(function, arguments, f"{key.removesuffix('.function')}.args", 1)


def is_async(function: RewardFunction) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def check_value(value: Any) -> Reward:
    """Convert a function's return value to a Reward. Raises RewardFailed if it is not valid."""
    if inspect.isawaitable(value):
        raise RewardFailed("returned an awaitable; a function that waits is to be an `async def`")
    if isinstance(value, Reward):
        return Reward(_number(value.score, "score"), _parts(value.parts))
    if isinstance(value, Mapping):
        parts = _parts(value)
        if not parts:
            raise RewardFailed("returned an empty dict, expected at least one part, or `score`")
        score = parts.pop(SCORE, None)
        return Reward(math.fsum(parts.values()) if score is None else score, parts)
    return Reward(_number(value, ""))


def _parts(parts: Any) -> dict[str, float]:
    if not isinstance(parts, Mapping):
        raise RewardFailed(f"returned parts of {shorten(repr(parts))}, expected a dict")
    if len(parts) > MAX_PARTS:
        raise RewardFailed(f"returned {len(parts)} parts, expected at most {MAX_PARTS}")
    for name in parts:
        if not is_part_name(name):
            raise RewardFailed(f"returned a part called {shorten(repr(name))}, expected letters, digits, _ . or -")
    return {name: _number(value, name) for name, value in parts.items()}


def is_part_name(name: Any) -> bool:
    return isinstance(name, str) and _PART_NAME.fullmatch(name) is not None


def _number(value: Any, part: str) -> float:
    what = f"{part} = " if part else ""
    if not isinstance(value, numbers.Real):
        raise RewardFailed(f"returned {what}{shorten(repr(value))}, expected a number")
    number = float(value)
    if not math.isfinite(number):
        raise RewardFailed(f"returned {what}{number}, expected a finite number")
    return number
