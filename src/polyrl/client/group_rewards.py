"""Rewards of whole groups: asked for when a group is delivered, beside the groups that still come.

Rules kept here: a failure never counts as a zero. A call that could not be answered is tried again; samples that have
no reward after the last attempt leave their group, and a group that has too few left has no reward. At most
`rewards.slots` groups are under way at once, and the deadline of a call begins when it is its turn.
Left out: what becomes of a group without a reward. The fleet rejects it (fleet.py).
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from polyrl.errors import NoReward, PolyrlError
from polyrl.scheduling.core.parameters import RewardConfig

log = logging.getLogger("polyrl.client")

AGAIN_AFTER_S = 0.5
"""A reward that could not be had is tried again after this, and after twice as long each time; its place is held."""


class AddedReward(Protocol):
    """The part that is added to the reward of a sample (`fleet.RewardResult`)."""

    @property
    def value(self) -> float: ...

    @property
    def parts(self) -> Mapping[str, float]: ...


_Group = TypeVar("_Group")
_Added = TypeVar("_Added", bound=AddedReward)


def wait_s(attempt: int) -> float:
    """Return how long the next attempt waits; the first attempt is 1."""
    return AGAIN_AFTER_S * 2 ** min(attempt - 1, 4)


class GroupRewards:
    """Asks for the rewards of groups. `least` is the number of samples below which a group is not trained."""

    def __init__(self, rules: RewardConfig, least: int) -> None:
        self._rules, self._least = rules, least
        self._places = asyncio.Semaphore(rules.slots)

    async def rewards_of(
        self, score: Callable[[_Group], Awaitable[Sequence[_Added | None]]], group: _Group, num_samples: int
    ) -> list[_Added | None]:
        """Return what is added to the reward of each sample; None: the sample leaves the group. Raises NoReward."""
        async with self._places:
            found: list[_Added | None] = []
            why = "infrastructure_failed"
            for attempt in range(1, self._rules.max_attempts + 1):
                try:
                    found = await self._try_once(score, group, num_samples)
                    if all(one is not None for one in found):
                        break
                except NoReward:
                    raise
                except PolyrlError as error:
                    why = str(error)
                except Exception as error:
                    log.exception("the reward of a group failed")
                    why = f"{type(error).__name__}: {error}"
                if attempt < self._rules.max_attempts:
                    await asyncio.sleep(wait_s(attempt))
        num = sum(one is not None for one in found)
        if num < min(self._least, num_samples):
            raise NoReward(f"{num} of {num_samples} samples have a reward, expected {self._least}: {why}")
        return found

    async def _try_once(
        self, score: Callable[[_Group], Awaitable[Sequence[_Added | None]]], group: _Group, num_samples: int
    ) -> list[_Added | None]:
        limit_s = max(self._rules.t_max_s, self._rules.wall_s)
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                found = list(await score(group))
        except TimeoutError as error:
            if limit.expired():
                raise NoReward(f"none in {limit_s:g} s") from error
            raise
        if len(found) != num_samples:
            raise NoReward(f"{len(found)} rewards for {num_samples} samples")
        for one in found:
            if one is not None and not all(map(math.isfinite, (one.value, *one.parts.values()))):
                raise NoReward(f"a reward of {one.value}, expected finite numbers")
        return found
