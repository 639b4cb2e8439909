"""Reward functions of whole groups: good ones, and every way to go wrong."""

import asyncio
import os
import time

from polyrl import Reward, RewardGroup, RewardInput, RewardUnavailable


def rank(given: RewardGroup) -> list[float]:
    """The shortest answer gets 1, the longest 0."""
    order = sorted(range(len(given.answers)), key=lambda at: (len(given.answers[at].answer), at))
    return [1.0 - order.index(at) / (len(order) - 1) for at in range(len(order))]


def told(given: RewardGroup) -> list[dict[str, float]]:
    """All that a group has, as parts."""
    assert all(one.prompt == given.prompt and one.row == given.row for one in given.answers)
    assert all(one.expected == given.expected and one.limit_s == 0.0 for one in given.answers)
    return [
        {"score": given.row["number"], "length": len(one.answer), "tokens": one.num_tokens, "cut": one.finish != "stop"}
        for one in given.answers
    ]


async def waits(given: RewardGroup) -> list[Reward]:
    await asyncio.sleep(0.05)
    return [Reward(float(at), {"at": at}, "crashed") for at in range(len(given.answers))]


async def own_process(given: RewardGroup) -> list[float]:
    await asyncio.sleep(0.1)
    return [float(os.getpid())] * len(given.answers)


class Judge:
    """A class with a life of its own."""

    def __init__(self, notes: str, bonus: float = 0.0) -> None:
        self.notes, self.bonus = notes, bonus

    def _note(self, word: str) -> None:
        with open(self.notes, "a") as file:
            file.write(f"{word}\n")

    async def start(self) -> None:
        self._note("started")

    async def __call__(self, given: RewardGroup) -> list[float]:
        self._note("asked")
        return [self.bonus + len(one.answer) for one in given.answers]

    async def close(self) -> None:
        self._note("closed")


def one_too_few(given: RewardGroup) -> list[float]:
    return [1.0] * (len(given.answers) - 1)


def one_is_none(given: RewardGroup) -> list[float]:
    return [1.0, float("nan"), *(1.0 for _ in given.answers[2:])]


def a_number(given: RewardGroup) -> float:
    return 1.0


def a_reward(given: RewardGroup) -> Reward:
    return Reward(1.0)


def raises(given: RewardGroup) -> list[float]:
    raise KeyError("no such thing")


def sleeps(given: RewardGroup) -> list[float]:
    time.sleep(3600)
    return []


def away(given: RewardGroup) -> list[float]:
    raise RewardUnavailable("the judge said 503")


def away_for_all(given: RewardGroup) -> list[Reward]:
    return [Reward(outcome="infrastructure_failed")] * len(given.answers)


def away_for_the_second(given: RewardGroup) -> list[Reward]:
    return [
        Reward(float(at), outcome="infrastructure_failed" if at == 1 else "scored") for at in range(len(given.answers))
    ]


def many_parts(given: RewardGroup) -> list[dict[str, float]]:
    return [{f"{'long' * 12}{number}": 1.0 for number in range(32)} for _ in given.answers]


def one_answer(given: RewardInput) -> float:
    return 1.0
