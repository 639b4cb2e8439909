"""Answers without a reward, counted: a reward that has failed often, and never succeeded, is given up.

Rules kept here: functions of one answer and functions of whole groups are counted apart. The success of one says
nothing about the other, and a run in which one of them always fails has nothing to train on.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping

from polyrl.errors import UserError

HOPELESS = 32
"""The number of answers after which a reward that has only failed is given up."""
FailureKey = tuple[int, bool]
"""A domain, and whether its functions of whole groups are meant."""


class RewardFailures:
    """`names` are the functions of each key, as messages name them."""

    def __init__(self, names: Mapping[FailureKey, str]) -> None:
        self._names = names
        self._num: Counter[FailureKey] = Counter()
        self._proven: set[FailureKey] = set()
        self._last: dict[FailureKey, str] = {}
        self._hopeless = asyncio.Event()
        self._why_hopeless = ""
        self.last_reason = ""

    @property
    def total(self) -> int:
        return self._num.total()

    def scored(self, key: FailureKey) -> None:
        self._proven.add(key)

    def failed(self, key: FailureKey, reason: str, num_answers: int = 1) -> None:
        self._num[key] += num_answers
        self._last[key] = self.last_reason = reason
        if key not in self._proven and self._num[key] >= HOPELESS:
            self.stop(self._why(key))

    def stop(self, why: str) -> None:
        """End the run with this line, unless it ends already."""
        if not self._hopeless.is_set():
            self._why_hopeless = why
            self._hopeless.set()

    async def until_hopeless(self) -> None:
        """Wait for as long as all is well. Raises UserError for a reward that always fails."""
        await self._hopeless.wait()
        raise UserError(self._why_hopeless)

    def why_none_scored(self) -> str:
        """Return why a reward has failed for all answers so far; empty if none has."""
        unproven = [key for key in self._last if key not in self._proven]
        return self._why(max(unproven, key=self._num.__getitem__)) if unproven else ""

    def _why(self, key: FailureKey) -> str:
        return f"the reward {self._names[key]} failed for all of {self._num[key]} answers: {self._last[key]}"
