"""The rows and rewards of a run, watched: rows that keep failing are quarantined, and metrics are counted.

Rules kept here: a failure counts against a row only if another row of its domain was scored since the last one that
counted. A judge that is away for an hour fails all rows, and is no reason to lose any of them. A score clears a row.
"""

import logging
from collections.abc import Hashable

from polyrl.rewards.reward import Reward, RewardInput

log = logging.getLogger("polyrl.rewards")

_MAX_ROWS = 65_536


class RewardWatch:
    """`row_failures` is the number of failures after which a row is quarantined."""

    def __init__(self, row_failures: int) -> None:
        self._row_failures = row_failures
        self._num_scored: dict[Hashable, int] = {}
        """The number of scores, by domain and kind of function."""
        self._failed: dict[Hashable, tuple[int, int]] = {}
        """By row: failures that counted, and the scores of its domain at the last of them."""
        self.quarantined: dict[Hashable, str] = {}
        """By row, the reason of its last failure."""
        self._limits: list[float] = []
        self._outcomes: list[str] = []

    def scored(self, domain: Hashable, row: Hashable, given: RewardInput, reward: Reward) -> None:
        self._num_scored[domain] = self._num_scored.get(domain, 0) + 1
        self._failed.pop(row, None)
        self._outcomes.append(reward.outcome)
        if given.limit_s:
            self._limits.append(given.limit_s)

    def failed(self, domain: Hashable, row: Hashable, name: str, reason: str) -> None:
        """Count a failure of a row; `name` is what the log calls it."""
        num_scored = self._num_scored.get(domain, 0)
        num, at = self._failed.get(row, (0, -1))
        if row in self.quarantined or num_scored == at:
            return
        if num + 1 < self._row_failures:
            if len(self._failed) >= _MAX_ROWS:
                self._failed.pop(next(iter(self._failed)))
            self._failed[row] = (num + 1, num_scored)
            return
        self._failed.pop(row, None)
        self.quarantined[row] = reason
        log.warning("%s is quarantined: its reward failed %d times; the last: %s", name, num + 1, reason)

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        outcomes, limits = self._outcomes, self._limits
        self._outcomes, self._limits = [], []
        found: dict[str, float] = {"reward/quarantined_rows": len(self.quarantined)}
        if outcomes:
            found["reward/timed_out"] = outcomes.count("timed_out") / len(outcomes)
            found["reward/crashed"] = outcomes.count("crashed") / len(outcomes)
        if limits:
            found["reward/limit_s/mean"] = sum(limits) / len(limits)
        return found
