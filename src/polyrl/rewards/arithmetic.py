"""The reward of the arithmetic task: 1 if the number after the last equals sign is the sum, otherwise 0."""

from polyrl.data.arithmetic import is_correct
from polyrl.rewards.reward import RewardInput


def score(given: RewardInput) -> float:
    return 1.0 if is_correct(given.answer, given.expected) else 0.0
