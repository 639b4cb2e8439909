"""Several attempts at one request to another service: exponential pauses with jitter, within a deadline.

Rules kept here: a service that says when to come back (Retry-After) is believed, up to a bound. An attempt that cannot
begin before the deadline is not waited for. If no attempt succeeds there is no score: RewardUnavailable, or
RewardFailed for a request that would be refused again.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

from polyrl.rewards.reward import RewardFailed, RewardUnavailable

Result = TypeVar("Result")


class TryAgain(Exception):
    """An attempt failed, and another may not. `after_s`: the service said when; None: it did not."""

    def __init__(self, reason: str, after_s: float | None = None) -> None:
        super().__init__(reason)
        self.after_s = after_s


class BadQuestion(Exception):
    """The service refuses this request, and would refuse it again. One line."""


class Attempts(NamedTuple):
    """The rules: how many attempts there are, and how long the pauses between them."""

    num: int = 5
    first_pause_s: float = 0.5
    longest_pause_s: float = 8.0
    longest_asked_s: float = 60.0
    """The longest pause that a service may ask for; one that asks for more gets this one."""

    def pause_s(self, num_failed: int, after_s: float | None, draw: float) -> float:
        """Return the pause after so many failed attempts; `draw` is a random number from 0 to 1."""
        if after_s is not None:
            return min(after_s, self.longest_asked_s) + 0.1 * draw * self.first_pause_s
        longest = min(self.longest_pause_s, self.first_pause_s * 2.0 ** min(num_failed - 1, 30))
        return longest * (0.5 + 0.5 * draw)


async def with_attempts(
    attempt: Callable[[int, float], Awaitable[Result]], rules: Attempts, patience_s: float, what: str, hint: str = ""
) -> Result:
    """Call `attempt` until it succeeds, with its number, 0 for the first, and the deadline of all attempts together.

    Raises RewardUnavailable, and RewardFailed for a request that is refused. `what` begins the error's line; `hint`
    ends that of a deadline that passed.
    """
    deadline = asyncio.get_running_loop().time() + patience_s
    try:
        async with asyncio.timeout_at(deadline):
            return await _until_one_succeeds(attempt, rules, deadline, what)
    except BadQuestion as error:
        raise RewardFailed(f"{what} {error}") from error
    except TimeoutError as error:
        raise RewardUnavailable(f"{what}: no score within {patience_s:g} s of rewards.timeout_s{hint}") from error


async def _until_one_succeeds(
    attempt: Callable[[int, float], Awaitable[Result]], rules: Attempts, deadline: float, what: str
) -> Result:
    loop = asyncio.get_running_loop()
    for number in range(rules.num):
        try:
            return await attempt(number, deadline)
        except TryAgain as trouble:
            pause_s = rules.pause_s(number + 1, trouble.after_s, random.random())
            said = f"{what}: {trouble} (attempt {number + 1} of {rules.num})"
            if number + 1 == rules.num:
                raise RewardUnavailable(said) from trouble
            if loop.time() + pause_s >= deadline:
                raise RewardUnavailable(f"{said}; no time is left for another") from trouble
        await asyncio.sleep(pause_s)
    raise AssertionError("there is at least one attempt")
