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
from polyrl.config.recipe import Recipe
from polyrl.run.keeping import FleetKeeper

log = logging.getLogger("polyrl.train")


class Pool:
    """Worker processes on `num_devices` devices, `width` for each."""

    def __init__(self, recipe: Recipe, keeper: FleetKeeper) -> None:
        self._recipe, self._keeper = recipe, keeper

    async def follow(self, fleet: Fleet, say: Callable[[str | Text], None]) -> None:
        """Reshape whenever the scheduler has planned another width, until cancelled."""
        while True:
            plan = await fleet.until_planned(self._keeper.width)
            say(Text(f"engines: {plan.num_engines} of {plan.tensor_parallel} devices each: {plan.why}"))
            num = self._recipe.fleet.num_devices // plan.tensor_parallel
            await self._keeper.reshape(plan.tensor_parallel, num)
            log.info("%d workers of %d devices each are started", num, plan.tensor_parallel)
