"""Several rewards for one answer: the weighted sum of the functions' scores, each also reported under its name.

Rules kept here: if one function fails, the answer has no reward, whatever the others return. A function that is the
only one, and has no name in the recipe, is the reward itself: its parts keep their own names. Otherwise a function's
unweighted score is the part with its name, and its own parts are called `name/part`.
"""

import asyncio
import math
from collections.abc import Sequence

from polyrl.config.rewards import WeightedReward
from polyrl.errors import ConfigError
from polyrl.rewards.pool import RewardPool
from polyrl.rewards.reward import Reward, RewardFailed, RewardInput


async def score(pool: RewardPool, functions: Sequence[WeightedReward], given: RewardInput) -> Reward:
    """Call all functions on one answer, and combine their scores. Raises RewardFailed."""
    if len(functions) == 1:
        found = [await _score_one(pool, functions[0], given)]
    else:
        found = await asyncio.gather(*(_score_one(pool, one, given) for one in functions))
    return weigh(functions, found)


def weigh(functions: Sequence[WeightedReward], found: Sequence[Reward]) -> Reward:
    if len(functions) == 1 and not functions[0].name:
        return Reward(functions[0].weight * found[0].score, found[0].parts)
    parts: dict[str, float] = {}
    for function, reward in zip(functions, found, strict=True):
        parts[function.title] = reward.score
        parts |= {f"{function.title}/{name}": value for name, value in reward.parts.items()}
    return Reward(math.fsum(one.weight * its.score for one, its in zip(functions, found, strict=True)), parts)


async def _score_one(pool: RewardPool, one: WeightedReward, given: RewardInput) -> Reward:
    try:
        return await pool.score(one.function, given, one.args)
    except RewardFailed as error:
        raise type(error)(f"{one.function}: {error}") from error
    except ConfigError as error:  # the function existed when the run began
        raise RewardFailed(str(error)) from error
