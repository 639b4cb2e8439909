"""Reward functions of a person: good ones, and every way to go wrong."""

import asyncio
import os
import sys
import time

from polyrl.rewards.reward import RewardInput


def length(given: RewardInput) -> float:
    return len(given.answer)


def echo_row(given: RewardInput) -> float:
    return given.row["values"][1] + given.num_tokens


def is_true(given: RewardInput) -> bool:
    return given.answer == given.expected


def loaded_modules(given: RewardInput) -> float:
    return sum(name in sys.modules for name in ("torch", "transformers", "numpy"))


def own_pid(given: RewardInput) -> float:
    return os.getpid()


def raises(given: RewardInput) -> float:
    raise KeyError("no such thing\nin two lines")


def exits(given: RewardInput) -> float:
    sys.exit(3)


def not_a_number(given: RewardInput) -> float:
    return float("nan")


def a_text(given: RewardInput) -> str:
    return "1.0"


def nothing(given: RewardInput) -> None:
    return None


def sleeps(given: RewardInput) -> float:
    time.sleep(3600)
    return 1.0


def dies(given: RewardInput) -> float:
    os._exit(1)


def prints_a_lot(given: RewardInput) -> float:
    for _ in range(200):
        print("x" * 10_000)
        print("y" * 10_000, file=sys.stderr)
    os.write(1, b"z" * 100_000)
    return 1.0


def forks_and_returns(given: RewardInput) -> float:
    """The child sleeps on; its pid is the reward."""
    child = os.fork()
    if child == 0:
        time.sleep(3600)
    return float(child)


def forks_and_dies(given: RewardInput) -> float:
    child = os.fork()
    if child == 0:
        time.sleep(3600)
    with open(given.row["pid_file"], "w") as file:
        file.write(str(child))
    os._exit(1)


def both_return(given: RewardInput) -> float:
    """The child comes back as well, and would answer for its parent."""
    return 1.0 if os.fork() else 2.0


async def waits(given: RewardInput) -> float:
    await asyncio.sleep(0.01)
    return 0.5


async def waits_for_ever(given: RewardInput) -> float:
    await asyncio.sleep(3600)
    return 1.0


async def async_raises(given: RewardInput) -> float:
    raise TimeoutError("its own")


async def async_text(given: RewardInput) -> str:
    return "good"


some_value = 3
