"""The servers that a run has started, as wide as the plan for the next round wants them (`[parallelism]`).

    scheduler: Reshape -> manager -> WidthPlanned -> here -> keeper: end the old workers, start those of the new width

Rules kept here: devices have one owner. The old workers have handed over what they wrote, and ended, before new ones
start on their devices; until these have joined, others go on with the round. A worker that is started anew has a new
name: one that was drained may not join again.
"""

import logging
from collections.abc import Callable

from rich.text import Text

from polyrl.client import Fleet
from polyrl.run.keeping import FleetKeeper

log = logging.getLogger("polyrl.train")


class Pool:
    """Worker processes that divide the devices of `[fleet]`."""

    def __init__(self, keeper: FleetKeeper) -> None:
        self._keeper = keeper

    async def follow(self, fleet: Fleet, say: Callable[[str | Text], None]) -> None:
        """Reshape whenever the scheduler has planned another width, until cancelled."""
        while True:
            plan = await fleet.until_planned(self._keeper.width)
            say(Text(f"engines: {plan.num_engines} of {plan.tensor_parallel} devices each: {plan.why}"))
            await self._keeper.reshape(plan.tensor_parallel)
            log.info("%d workers of %d devices each are started", len(self._keeper.names), plan.tensor_parallel)
