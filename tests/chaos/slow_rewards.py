"""A reward that takes a while, so that a run lasts as long as what is done to it."""

import time

from polyrl.rewards.reward import RewardInput


def slow(given: RewardInput, pause_s: float) -> float:
    time.sleep(pause_s)
    return len(given.answer) % 5 / 4
