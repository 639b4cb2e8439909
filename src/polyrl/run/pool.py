"""The servers that a run has started, as wide as the plan for the next round wants them (`[parallelism]`).

    scheduler: Reshape -> manager -> WidthPlanned -> here: drain the old workers, start those of the new width

Rules kept here: devices have one owner. The old workers have handed over what they wrote, and ended, before new ones
start on their devices; until these have joined, others go on with the round. A worker that is started anew has a new
name: one that was drained may not join again.
"""

import asyncio
import logging
from asyncio.subprocess import Process
from collections.abc import Callable
from itertools import count
from pathlib import Path

from rich.text import Text

from polyrl.client import Fleet
from polyrl.config.recipe import Recipe
from polyrl.run import processes, workers
from polyrl.run.processes import ManagerAddress
from polyrl.wire.frames import WidthPlanned

log = logging.getLogger("polyrl.train")

_DRAIN_S = 60.0
"""How long a worker may take to hand over and end its server, before it is killed."""


class Pool:
    """Worker processes on `num_devices` devices, `width` for each. `started` are those of the run, by name."""

    def __init__(self, recipe: Recipe, run_dir: Path, address: ManagerAddress, started: dict[str, Process]) -> None:
        self._recipe, self._run_dir, self._address, self._started = recipe, run_dir, address, started
        self._names = list(started)
        self._numbers = count(len(started))
        self.width = recipe.fleet.tensor_parallel

    async def follow(self, fleet: Fleet, say: Callable[[str | Text], None]) -> None:
        """Reshape whenever the scheduler has planned another width, until cancelled."""
        while True:
            plan = await fleet.until_planned(self.width)
            say(Text(f"engines: {plan.num_engines} of {plan.tensor_parallel} devices each: {plan.why}"))
            await self._reshape(plan)

    async def _reshape(self, plan: WidthPlanned) -> None:
        old = [(name, self._started.pop(name)) for name in self._names if name in self._started]
        try:
            await asyncio.gather(*(processes.stop(process, timeout_s=_DRAIN_S) for _, process in old))
        except asyncio.CancelledError:
            self._started.update(old)  # they are ended with the run
            raise
        self.width, self._names = plan.tensor_parallel, []
        for number in range(self._recipe.fleet.num_devices // plan.tensor_parallel):
            name = f"worker-{next(self._numbers)}"
            self._names.append(name)
            more = workers.devices_of(self._recipe, self.width, number)
            self._started[name] = await workers.start(
                self._recipe, self._run_dir, self._address, name, width=self.width, more=more
            )
        log.info("%d workers of %d devices each are started", len(self._names), self.width)
