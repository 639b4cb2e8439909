"""Several rewards for one answer: the weighted sum of the functions' scores, each also reported under its name.

Rules kept here: if one function fails, the answer has no reward, whatever the others return. A function that is the
only one, and has no name in the recipe, is the reward itself: its parts keep their own names. Otherwise a function's
unweighted score is the part with its name, and its own parts are called `name/part`. CPU time, and whether an answer is
right, are those of the function that took longest: time limits are learned from them.
"""

import asyncio
import math
from collections.abc import Sequence
from functools import partial

from polyrl.config.rewards import WeightedReward
from polyrl.errors import ConfigError
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
)

_WORST_LAST: tuple[ScoreOutcome, ...] = ("scored", "crashed", "timed_out", "infrastructure_failed")


async def score(
    pool: RewardPool,
    functions: Sequence[WeightedReward],
    given: RewardInput,
    solved_above: float = 0.5,
    once: ScoredOnce | None = None,
) -> Reward:
    """Call all functions on one answer, and combine their scores. Raises RewardFailed, RewardUnavailable, RewardStops.

    An answer is right with a score above `solved_above`, unless its function says otherwise. `once` knows answers that
    were scored before.
    """
    if len(functions) == 1:
        found = [await _score_one(pool, functions[0], given, once)]
    else:
        found = await asyncio.gather(*(_score_one(pool, one, given, once) for one in functions))
    return weigh(functions, found, solved_above)


def weigh(functions: Sequence[WeightedReward], found: Sequence[Reward], solved_above: float = 0.5) -> Reward:
    outcome = _WORST_LAST[max(_WORST_LAST.index(one.outcome) for one in found)]
    longest = max(found, key=lambda one: -1.0 if one.cpu_s is None else one.cpu_s)
    correct = longest.correct
    if correct is None and longest.cpu_s is not None:
        correct = longest.score > solved_above
    if len(functions) == 1 and not functions[0].name:
        return Reward(functions[0].weight * found[0].score, found[0].parts, outcome, longest.cpu_s, correct)
    parts: dict[str, float] = {}
    for function, reward in zip(functions, found, strict=True):
        parts[function.title] = reward.score
        parts |= {f"{function.title}/{name}": value for name, value in reward.parts.items()}
    total = math.fsum(one.weight * its.score for one, its in zip(functions, found, strict=True))
    return Reward(total, parts, outcome, longest.cpu_s, correct)


async def _score_one(pool: RewardPool, one: WeightedReward, given: RewardInput, once: ScoredOnce | None) -> Reward:
    try:
        if once is None or not one.cache or one.function in QUICK:
            return await pool.score(one.function, given, one.args)
        make = partial(pool.score, one.function, given, one.args)
        return await once.score(one.function, one.args, given, make)
    except RewardTimedOut as error:
        is_wrong = bool(error.cpu_s) or one.timeout_score is not None
        if is_wrong:  # the answer's doing, as far as anybody can tell
            return Reward(one.timeout_score or 0.0, outcome="timed_out", cpu_s=error.cpu_s or None)
        raise RewardTimedOut(f"{one.function}: {error}") from error
    except (RewardFailed, RewardUnavailable, RewardStops) as error:
        raise type(error)(f"{one.function}: {error}") from error
    except ConfigError as error:  # the function existed when the run began
        raise RewardFailed(str(error)) from error
