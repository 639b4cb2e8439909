"""A reward of whole groups: a function of all answers to one prompt, for judges that compare and rank.

    def rank(given: RewardGroup) -> list[float]:
        order = sorted(range(len(given.answers)), key=lambda at: given.answers[at].num_tokens)
        return [1.0 - order.index(at) / len(order) for at in range(len(order))]

A recipe names it in `[[rewards.functions]]` with `whole_group = true`. It is a function or a class like any other
reward (reward.py), and returns one result for each answer, in the order of the answers.

Rules kept here: a wrong number of results, or one that is not valid, is a RewardFailed of the whole group. An answer
with the outcome `infrastructure_failed` has no result, and the others keep theirs. The parts that answers share travel
once.
"""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

from polyrl.errors import ConfigError, shorten
from polyrl.rewards.reward import (
    Reward,
    RewardEpisode,
    RewardFailed,
    RewardFunction,
    RewardInput,
    RewardUnavailable,
    check_value,
)


class AnswerFacts(NamedTuple):
    """The facts that the answers of a group do not share."""

    answer: str
    finish: str
    num_tokens: int
    episode: RewardEpisode | None = None


class RewardGroup(NamedTuple):
    """All answers to one prompt, and what they share."""

    prompt: str
    """The prompt as the model saw it."""
    expected: str
    """The row's answer, as text; empty if it has none."""
    row: dict[str, Any]
    """All columns of the row."""
    answers: list[RewardInput]
    """The answers, each as a function of one answer gets it; `limit_s` is 0."""


def make_group(shared: RewardInput, answers: Sequence[AnswerFacts]) -> RewardGroup:
    """Return the group of these answers; `shared` has the prompt, the expected answer and the row."""
    made = [make_input(shared, one) for one in answers]
    prompt = made[0].prompt if made else shared.prompt
    return RewardGroup(prompt, shared.expected, shared.row, made)


def make_input(shared: RewardInput, one: AnswerFacts, limit_s: float = 0.0) -> RewardInput:
    """Return what a function gets of an answer."""
    answer, finish, num_tokens, episode = one
    prompt = shared.prompt if episode is None else _first_prompt(episode)
    return RewardInput(prompt, answer, shared.expected, shared.row, finish, num_tokens, limit_s, episode)


def _first_prompt(episode: RewardEpisode) -> str:
    return episode.calls[0].given if episode.calls else ""


def take_apart(given: RewardInput | RewardGroup) -> tuple[RewardInput, list[AnswerFacts] | None]:
    """Return what the answers of a group share, and what they do not; None for a single answer."""
    if isinstance(given, RewardInput):
        return given, None
    facts = [AnswerFacts(one.answer, one.finish, one.num_tokens, one.episode) for one in given.answers]
    return RewardInput(given.prompt, "", given.expected, given.row, "", 0), facts


def check_values(value: Any, num: int) -> list[Reward | None]:
    """Convert a function's return value to one Reward an answer; None: its infrastructure failed.

    Raises RewardFailed, and RewardUnavailable if there is no reward at all.
    """
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes | Reward)
    if not is_list and not hasattr(value, "__array__"):
        raise RewardFailed(f"returned {shorten(repr(value))}, expected a list of {num} rewards, one for each answer")
    if len(value) != num:
        raise RewardFailed(f"returned {len(value)} rewards, expected {num}, one for each answer")
    found = [_check_one(one, at) for at, one in enumerate(value)]
    if all(one is None for one in found):
        raise RewardUnavailable("returned infrastructure_failed for every answer")
    return found


def _check_one(value: Any, at: int) -> Reward | None:
    try:
        return check_value(value)
    except RewardUnavailable:
        return None
    except RewardFailed as error:
        raise RewardFailed(f"answer {at} of the group: {error}") from error


def check_annotation(function: RewardFunction, key: str, *, whole_group: bool) -> None:
    """Raise ConfigError if the annotation of what a function is called with contradicts the recipe."""
    called: Any = function.__call__ if inspect.isclass(function) else function
    try:
        parameters = [one for one in inspect.signature(called).parameters.values() if one.name != "self"]
    except (TypeError, ValueError):  # code in C does not always tell
        return
    taken = parameters[0].annotation if parameters else None
    name = taken.rpartition(".")[2] if isinstance(taken, str) else getattr(taken, "__name__", "")
    place = key.removesuffix(".function")
    if name == RewardGroup.__name__ and not whole_group:
        expected = "expected whole_group = true in [[rewards.functions]]"
        raise ConfigError(f"{key}: {function.__qualname__} takes a RewardGroup; {expected}")
    if name == RewardInput.__name__ and whole_group:
        raise ConfigError(f"{place}.whole_group: {function.__qualname__} takes a RewardInput, expected a RewardGroup")
