"""Several rewards for one answer: the weighted sum of the functions' scores, each also reported under its name.

Rules kept here: if one function fails, the answer has no reward, whatever the others return. A function that is the
only one, and has no name in the recipe, is the reward itself: its parts keep their own names. Otherwise a function's
unweighted score is the part with its name, and its own parts are called `name/part`. CPU time is that of the function
that took longest, since the limits that are learned from it hold for all of them. A function that says whether the
answer is right is believed; where none does, the score of the one that took longest tells. Functions of whole groups
score later (`score_group`); their scores are added, and named as if all had scored at once.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from polyrl.config.rewards import ENVIRONMENT, WeightedReward
from polyrl.errors import ConfigError
from polyrl.rewards.groups import RewardGroup
from polyrl.rewards.once import ScoredOnce
from polyrl.rewards.pool import QUICK, RewardPool
from polyrl.rewards.reward import (
    Reward,
    RewardFailed,
    RewardInput,
    RewardStops,
    RewardTimedOut,
    RewardUnavailable,
    ScoreOutcome,
    in_range,
)

_Score = TypeVar("_Score", Reward, list[Reward | None])
_WORST_LAST: tuple[ScoreOutcome, ...] = ("scored", "crashed", "timed_out", "infrastructure_failed")


async def score(
    pool: RewardPool,
    functions: Sequence[WeightedReward],
    given: RewardInput,
    solved_above: float = 0.5,
    once: ScoredOnce | None = None,
) -> Reward:
    """Call all functions of one answer, and combine their scores. Raises RewardFailed, RewardUnavailable, RewardStops.

    An answer is right with a score above `solved_above`, unless its function says otherwise. `once` knows answers that
    were scored before. Functions of whole groups are left out; where there are no others, the reward is nothing.
    """
    own = [one for one in functions if not one.whole_group]
    if not own:
        return Reward()
    if len(own) == 1:
        found = [await _score_one(pool, own[0], given, once)]
    else:
        found = await asyncio.gather(*(_score_one(pool, one, given, once) for one in own))
    return weigh(own, found, solved_above, is_only=len(functions) == 1)


async def score_group(
    pool: RewardPool, functions: Sequence[WeightedReward], group: RewardGroup, once: ScoredOnce | None = None
) -> list[Reward | None]:
    """Call the functions of whole groups, and return what they add to the reward of each answer. Raises as `score`.

    None: the infrastructure of one of them failed for that answer.
    """
    own = [one for one in functions if one.whole_group]
    if not own:
        return [Reward()] * len(group.answers)
    found = await asyncio.gather(*(_score_group_by(pool, one, group, once) for one in own))
    added: list[Reward | None] = []
    for each in zip(*found, strict=True):
        known = [one for one in each if one is not None]
        is_whole = len(known) == len(own)
        added.append(weigh(own, known, is_only=len(functions) == 1) if is_whole else None)
    return added


def weigh(
    functions: Sequence[WeightedReward],
    found: Sequence[Reward],
    solved_above: float = 0.5,
    *,
    is_only: bool,
) -> Reward:
    """Combine the scores of an answer. `is_only`: the recipe has no other function that scores it.

    Raises RewardFailed for a sum that is too large.
    """
    outcome, longest, correct = found[0].outcome, found[0], found[0].correct
    if len(found) > 1:
        outcome = _WORST_LAST[max(_WORST_LAST.index(one.outcome) for one in found)]
        longest = _longest(found)
        correct = _longest([one for one in found if one.correct is not None] or found).correct
    if correct is None and longest.cpu_s is not None:
        correct = longest.score > solved_above
    total = math.fsum(one.weight * its.score for one, its in zip(functions, found, strict=True))
    total = in_range(total, "adds up to ")
    if is_only and not functions[0].name:
        return Reward(total, found[0].parts, outcome, longest.cpu_s, correct)
    parts: dict[str, float] = {}
    for function, reward in zip(functions, found, strict=True):
        parts[function.title] = reward.score
        parts |= {f"{function.title}/{name}": value for name, value in reward.parts.items()}
    return Reward(total, parts, outcome, longest.cpu_s, correct)


def _longest(found: Sequence[Reward]) -> Reward:
    return max(found, key=lambda one: -1.0 if one.cpu_s is None else one.cpu_s)


async def _score_one(pool: RewardPool, one: WeightedReward, given: RewardInput, once: ScoredOnce | None) -> Reward:
    if one.function == ENVIRONMENT:
        assert given.episode is not None, "the recipe has it for episodes alone"
        return Reward(given.episode.reward, given.episode.parts)
    make = partial(pool.score, one.function, given, one.args)
    return _by_rule(
        one, await _scored(one, given, make, None if one.function in QUICK else once, lambda reward: reward)
    )


async def _score_group_by(
    pool: RewardPool, one: WeightedReward, group: RewardGroup, once: ScoredOnce | None
) -> list[Reward | None]:
    make = partial(pool.score_group, one.function, group, one.args)
    found = await _scored(one, group, make, once, lambda reward: [reward] * len(group.answers))
    return [None if reward is None else _by_rule(one, reward) for reward in found]


def _by_rule(one: WeightedReward, reward: Reward) -> Reward:
    """Return the reward with the score that the recipe gives to answers that took too long, if it gives one."""
    if reward.outcome != "timed_out" or one.timeout_score is None:
        return reward
    return reward._replace(score=one.timeout_score)


async def _scored(
    one: WeightedReward,
    given: RewardInput | RewardGroup,
    make: Callable[[], Coroutine[Any, Any, _Score]],
    once: ScoredOnce | None,
    for_all: Callable[[Reward], _Score],
) -> _Score:
    """Return what `make` or the cache has; at a time limit, what the recipe says, `for_all` answers. Raises as `score`,
    with the function's name."""
    try:
        if once is None or not one.cache:
            return await make()
        return await once.score(one.function, one.args, given, make)
    except RewardTimedOut as error:
        is_wrong = bool(error.cpu_s) or one.timeout_score is not None
        if is_wrong:  # the answer's doing, as far as anybody can tell
            return for_all(Reward(outcome="timed_out", cpu_s=error.cpu_s or None))
        raise RewardTimedOut(f"{one.function}: {error}") from error
    except (RewardFailed, RewardUnavailable, RewardStops) as error:
        raise type(error)(f"{one.function}: {error}") from error
    except ConfigError as error:  # the function existed when the run began
        raise RewardFailed(str(error)) from error
