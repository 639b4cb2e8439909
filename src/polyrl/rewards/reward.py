"""A reward: a function of one answer, named in the recipe, plain or async, that returns a finite number.

    def shorter_is_better(given: RewardInput) -> float:
        return 1.0 / (1 + given.num_tokens)

A recipe says `reward = "my_module:shorter_is_better"`, or names one of ours (config/plugins.py). A function may also
return named parts: a dict, whose sum is the score unless it has a `score` of its own, or a Reward. A class is called
once in each process, with the arguments of the recipe; the object that it makes is then called with every answer, after
its `start` and before its `close`, where it has them. Its static method `check_args`, where it has one, is called with
the same arguments before the run starts, and raises ValueError: `key: what is wrong`.

Rules kept here: every fault (an exception, NaN, a text instead of a number) is a RewardFailed. It is never a zero: a
zero would teach the policy something false. A program in the answer that loops or crashes is no fault: it is a wrong
answer, and the function scores it. Parts are few and their names short, because they travel with the sample.
Left out: where functions run and for how long (pool.py), and several of them for one answer (weighing.py).
"""

import inspect
import math
import numbers
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast, get_args

from polyrl.config.plugins import check_arguments, find
from polyrl.config.rewards import COMPARING, WeightedReward
from polyrl.errors import ConfigError, NoReward, PolyrlError, shorten
from polyrl.scheduling.core.bounds import MAX_REWARD

OURS = {
    "arithmetic": "polyrl.rewards.arithmetic:score",
    "math": "polyrl.rewards.math_answers:score",
    "code": "polyrl.rewards.code:CodeReward",
    "judge": "polyrl.rewards.judge:Judge",
    "reward_model": "polyrl.rewards.reward_model:RewardModel",
}
SCORE = "score"
"""The key of the reward itself in a dict of parts, if it is not the sum of the parts."""
MAX_PARTS = 32
_MAX_PART = 1e15
"""The most that a part may say, which need not be a reward: bytes, for example."""
_PART_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class ToolUse(NamedTuple):
    """A tool call that the policy wrote."""

    name: str
    arguments: str
    """As JSON, if that is what the policy wrote."""


class CallText(NamedTuple):
    """One call of an episode: the environment gave a prompt, and the policy drew an answer."""

    given: str
    """The text that is new in its prompt: all of it, or what follows the call that it goes on from. Special tokens are
    written out."""
    drawn: str
    """The text that the policy drew, without the token that ends it."""
    tool_calls: Sequence[ToolUse] = ()
    finish: str = "stop"
    """`stop`, or `length` if the answer was cut off."""
    after: int = -1
    """The number of the earlier call that its prompt goes on from; -1: the prompt begins anew."""


class RewardEpisode(NamedTuple):
    """An episode as a reward function sees it."""

    calls: list[CallText]
    reward: float
    """The reward that the environment gave."""
    parts: Mapping[str, float] = {}
    """The parts of that reward, by name."""


class RewardInput(NamedTuple):
    """The facts about an answer that a reward function gets."""

    prompt: str
    """The prompt as the model saw it; of an episode, that of its first call."""
    answer: str
    """The text of the answer, without the token that ends it; of an episode, the answer to its last call."""
    expected: str
    """The row's answer, as text; empty if it has none."""
    row: dict[str, Any]
    """All columns of the row."""
    finish: str
    """`stop`, or `length` if the answer was cut off."""
    num_tokens: int
    """The number of answer tokens, the end token included; of an episode, all that the policy drew."""
    limit_s: float = 0.0
    """The CPU time that a program in the answer may take, with `rewards.adaptive`; 0: no limit was learned."""
    episode: RewardEpisode | None = None
    """All calls of an episode, and its environment's reward; None for a single answer."""

    @property
    def conversation(self) -> str:
        """The answer; of an episode, all that follows its first prompt, drawn and given texts in turn."""
        if self.episode is None:
            return self.answer
        texts = [text for call in self.episode.calls for text in (call.given, call.drawn)]
        return "".join(texts[1:])


ScoreOutcome = Literal["scored", "timed_out", "crashed", "infrastructure_failed"]


class Reward(NamedTuple):
    """The score of an answer, the parts that it is made of, and the way it came about."""

    score: float = 0.0
    parts: Mapping[str, float] = {}
    outcome: ScoreOutcome = "scored"
    """`timed_out`, `crashed`: what the answer's program did; its score counts. `infrastructure_failed`: there is no
    score, through no fault of the answer's; it is tried again, and then the sample is dropped."""
    cpu_s: float | None = None
    """The CPU time that the answer took, from which limits are learned; None: unknown."""
    correct: bool | None = None
    """Whether the answer is right; None: if its score is above `validation.solved_above`."""


RewardFunction = Callable[..., float | Mapping[str, float] | Reward | Awaitable[Any]]
"""Called with a RewardInput, and with the arguments that the recipe gives by name."""


class RewardFailed(NoReward):
    """There is no reward for this answer. The message is one line."""


class RewardTimedOut(RewardFailed):
    """There is no reward because scoring took too long. `cpu_s`: the CPU time at which it was ended; 0: wall time."""

    def __init__(self, message: str, cpu_s: float = 0.0) -> None:
        super().__init__(message)
        self.cpu_s = cpu_s


class RewardUnavailable(PolyrlError):
    """There is no reward now, through no fault of the answer's; a later attempt may have one. One line."""


class RewardStops(PolyrlError):
    """No answer can have a reward before the user changes something: a wrong key, a budget that is used up. One line,
    with which the run ends."""


def find_reward(name: str, key: str = "reward") -> RewardFunction:
    """Return the function of that name. Raises ConfigError, which starts with `key`, the setting that names it."""
    return cast("RewardFunction", find(name, key, OURS))


def needs_answer(functions: Iterable[WeightedReward]) -> bool | str:
    """Return whether rows need an answer for functions of ours; a text: a row does that lacks the column of this
    name."""
    chosen = list(functions)
    columns = [str(one.args.get("tests", "tests")) for one in chosen if one.function == "code"]
    compares = any(one.function in COMPARING for one in chosen)
    return columns[0] if columns and not compares else compares


def check_reward(function: RewardFunction, arguments: Mapping[str, Any], key: str) -> None:
    """Raise ConfigError for arguments that the function does not take; `key` is the setting that names the function."""
    place = f"{key.removesuffix('.function')}.args"
    if not inspect.isclass(function):
        check_arguments(function, arguments, place, 1)
        return
    if "__call__" not in dir(function):
        raise ConfigError(f"{key}: {function.__qualname__} has no method __call__, which is called with every answer")
    check_arguments(function, arguments, place, 0)
    if isinstance(inspect.getattr_static(function, "check_args", None), staticmethod):
        try:
            function.check_args(**arguments)  # type: ignore[attr-defined]
        except (ConfigError, ValueError) as error:
            raise ConfigError(f"{place}.{error}") from error


def is_async(function: RewardFunction) -> bool:
    called = function if inspect.isclass(function) else type(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called.__call__)


def check_value(value: Any) -> Reward:
    """Convert a function's return value to a Reward. Raises RewardFailed if it is not valid."""
    if inspect.isawaitable(value):
        raise RewardFailed("returned an awaitable; a function that waits is to be an `async def`")
    if isinstance(value, Reward):
        return _checked(value)
    if isinstance(value, Mapping):
        parts = _parts(value)
        if not parts:
            raise RewardFailed("returned an empty dict, expected at least one part, or `score`")
        score = parts.pop(SCORE, None)
        return Reward(_number(math.fsum(parts.values()), "") if score is None else score, parts)
    return Reward(_number(value, ""))


def _checked(reward: Reward) -> Reward:
    if reward.outcome not in get_args(ScoreOutcome):
        expected = ", ".join(get_args(ScoreOutcome))
        raise RewardFailed(f"returned an outcome of {shorten(repr(reward.outcome))}, expected one of {expected}")
    if reward.outcome == "infrastructure_failed":
        raise RewardUnavailable("returned infrastructure_failed")
    cpu_s = None if reward.cpu_s is None else _number(reward.cpu_s, "cpu_s")
    if cpu_s is not None and cpu_s < 0:
        raise RewardFailed(f"returned cpu_s = {cpu_s:g}, expected seconds")
    correct = None if reward.correct is None else bool(reward.correct)
    return Reward(_number(reward.score, "score"), _parts(reward.parts), reward.outcome, cpu_s, correct)


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
    return in_range(float(value), f"returned {what}", MAX_REWARD if part in ("", SCORE) else _MAX_PART)


def in_range(number: float, before: str, most: float = MAX_REWARD) -> float:
    """Return a score or a part. Raises RewardFailed for one that is too large to be compared or added up, or none."""
    if not abs(number) <= most:  # so written, NaN is refused too
        expected = f"a number of at most {most:g}" if math.isfinite(number) else "a finite number"
        raise RewardFailed(f"{before}{number:g}, expected {expected}")
    return number
