"""A reward function for the stories of docs/guides/stories.md: the arithmetic reward, behind a slow service."""

import time

from polyrl.rewards.arithmetic import score
from polyrl.rewards.reward import RewardInput


def slow(given: RewardInput, seconds: float = 1.0) -> float:
    """Score as `arithmetic` does, after as long as an overloaded service takes."""
    time.sleep(seconds)
    return score(given)
