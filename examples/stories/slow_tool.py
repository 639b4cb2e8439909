"""A calculator behind an overloaded service: the environment of the story of a slow tool."""

import time

from polyrl.hosts.own import Turn
from polyrl.starters.environments import Calculator


class SlowCalculator(Calculator):
    def step(self, text: str) -> Turn:
        time.sleep(1.0)
        return super().step(text)
