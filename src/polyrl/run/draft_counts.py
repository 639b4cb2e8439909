"""The counts of the engines' drafts: from the manager's status to a step's metrics.

Workers count since their engine started, and report now and then. So a step's figures are what was heard between two
lines of metrics; their sum over a run is right but for what a worker had not reported when it left.
"""

import asyncio
import contextlib
from collections.abc import Sequence

from polyrl.client import Fleet
from polyrl.errors import UserError
from polyrl.telemetry.metrics import MetricValue
from polyrl.wire.control import WorkerStatus

_LOOK_EVERY_S = 5.0

Counts = tuple[int, int, int]
"""Rounds, tokens drafted, tokens accepted."""


class DraftCounts:
    def __init__(self) -> None:
        self._last: dict[str, Counts] = {}
        """The last counts of each worker."""
        self._new: Counts = (0, 0, 0)

    def hear(self, workers: Sequence[WorkerStatus]) -> None:
        for one in workers:
            now: Counts = (one.draft_rounds, one.tokens_drafted, one.tokens_accepted)
            before = self._last.get(one.name, (0, 0, 0))
            if now[0] < before[0]:  # its engine started again
                before = (0, 0, 0)
            self._last[one.name] = now
            rounds, drafted, accepted = (new - old for new, old in zip(now, before, strict=True))
            self._new = (self._new[0] + rounds, self._new[1] + drafted, self._new[2] + accepted)

    def take(self) -> dict[str, MetricValue]:
        """Return what was heard since the last time; nothing where no engine ever verified a draft."""
        if not any(rounds for rounds, _, _ in self._last.values()):
            return {}
        (rounds, drafted, accepted), self._new = self._new, (0, 0, 0)
        return {"fleet/draft_rounds": rounds, "fleet/drafted_tokens": drafted, "fleet/accepted_tokens": accepted}

    async def follow(self, fleet: Fleet) -> None:
        """Look at the manager's status until cancelled, or until the manager is given up, which the run reports."""
        with contextlib.suppress(UserError):
            while True:
                await asyncio.sleep(_LOOK_EVERY_S)
                self.hear((await fleet.status()).workers)
