"""A training run, put together from top to bottom, and taken apart.

    train()        check the recipe, load the models, run; returns why the run ended
    Training.run() manager -> steps of the log again -> engine -> client -> weights -> workers -> loop

    manager (a process) <- client <- loop -> steps -> policy
       ^                                              ^ shared
       +---- local worker (in this process) -> engine-+
       +---- workers of [fleet] (processes), and workers from elsewhere; weights come from here

Rules kept here: what was started is ended, in the opposite order, however the run ends (supervising.py).
"""

import contextlib
import logging
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.text import Text

from polyrl.client import Fleet
from polyrl.config.recipe import Recipe
from polyrl.errors import UserError
from polyrl.run import (
    checkpoints,
    connecting,
    hosts,
    keeping,
    local_worker,
    preflight,
    resuming,
    reward_workers,
    validation_hosts,
)
from polyrl.run.checkpoints import ResumePoint
from polyrl.run.encryption import Encryption
from polyrl.run.event_loop import run_loop
from polyrl.run.pool import Pool
from polyrl.run.processes import ManagerAddress, ManagerProcess
from polyrl.run.reporting import Watch, reporting
from polyrl.run.resuming import RestoredModels
from polyrl.run.supervising import ended_from_outside, first_of, leaving, meanwhile, until_interrupted
from polyrl.run.task_contract import Tasks
from polyrl.run.validation import validator
from polyrl.trainer.devices import Devices
from polyrl.trainer.loop import Loop, NothingCameError
from polyrl.trainer.state.saving import Saver


class LiveRun(NamedTuple):
    """The parts of a run that its companion may use: `polyrl demo` has a companion."""

    recipe: Recipe
    run_dir: Path
    address: ManagerAddress
    keeper: keeping.FleetKeeper
    """The workers of `[fleet]`."""
    hosts: dict[str, hosts.HostProcess]
    """The hosts of `[environments]`, by name."""
    fleet: Fleet
    say: Callable[[str | Text], None]


Companion = Callable[[LiveRun], Coroutine[Any, Any, None]]


def train(
    recipe: Recipe,
    run_dir: Path,
    *,
    resumed: resuming.Resumed | None = None,
    quiet: bool = False,
    companion: Companion | None = None,
    watch: Watch | None = None,
) -> str:
    """Train to the end, and return why it ended. Raises UserError, and Interrupted after a signal.

    `resumed` is the run as it was; `companion` runs beside it; `watch` is told of every step.
    """
    point = None if resumed is None else resumed.point
    checked = preflight.check(recipe, run_dir, point)

    async def run(models: RestoredModels, point: ResumePoint | None) -> str:
        training = Training(checked.recipe, run_dir, models, checked.tasks, checked.tls, point, companion, watch)
        try:
            return await until_interrupted(training.run(), leaving(checked.recipe, run_dir))
        finally:
            await checked.tasks.close()

    with preflight.logging_to(run_dir, logging.WARNING if quiet else logging.INFO):
        if resumed is not None and point is not None:
            point = resuming.finish_logged_steps(resumed.before, checked.recipe, run_dir, point)
        with resuming.restored(checked.recipe, run_dir, point) as models, ended_from_outside(checked.recipe, run_dir):
            return run_loop(run(models, point))


class Training:
    """A run whose models are in memory."""

    def __init__(
        self,
        recipe: Recipe,
        run_dir: Path,
        models: RestoredModels,
        tasks: Tasks,
        tls: Encryption | None = None,
        point: ResumePoint | None = None,
        companion: Companion | None = None,
        watch: Watch | None = None,
    ) -> None:
        """`point` is where the run is resumed; None: it begins."""
        self._recipe, self._run_dir, self._models, self._tasks = recipe, run_dir, models, tasks
        self._tls, self._point, self._companion, self._watch = tls, point, companion, watch
        self._stack = AsyncExitStack()

    async def run(self) -> str:
        """Train to the end, or until cancelled. Returns why it ended."""
        recipe, run_dir, policy = self._recipe, self._run_dir, self._models.learner.policy
        async with self._stack as stack:
            manager, address = await stack.enter_async_context(
                connecting.started_manager(recipe, run_dir, self._point, self._tls)
            )
            saver = await self._make_saver()
            await self._train_logged_steps(saver, manager)
            engine = await stack.enter_async_context(local_worker.started_engine(recipe, policy))
            await self._write_down_that_it_begins(saver)
            fleet = await stack.enter_async_context(
                connecting.connected(recipe, run_dir, address, self._tasks, policy.loaded, self._point)
            )
            dial = partial(connecting.dialer, run_dir, address)
            await stack.enter_async_context(reward_workers.dispatched(recipe, dial(), fleet, self._tasks.pool))
            server = stack.enter_context(self._models.weight_server(recipe, fleet, self._tls))
            devices = stack.enter_context(
                contextlib.closing(Devices(engine, generates=bool(recipe.train.local_generation)))
            )
            own = await stack.enter_async_context(local_worker.joined(recipe, dial(), fleet, engine, devices))
            replicas = await stack.enter_async_context(self._models.replicas(devices, run_dir, address))
            keeper = await stack.enter_async_context(keeping.started(recipe, run_dir, address))
            playing = await stack.enter_async_context(hosts.started(recipe, run_dir, address))
            reporter = await stack.enter_async_context(
                reporting(recipe, run_dir, address, dial(), self._point, self._watch)
            )
            say, rules = reporter.display.say, connecting.answer_rules(policy.loaded)
            desks = await stack.enter_async_context(validation_hosts.started(recipe, run_dir, engine, rules, say))
            publishing = self._models.publishing(recipe, server, engine, fleet, replicas)
            validate = validator(recipe, engine, devices, self._tasks, reporter, fleet, saver, desks)
            loop = Loop(recipe, fleet, replicas, publishing, self._tasks.tokens, reporter, validate, saver)
            reporter.begin(fleet)
            if self._point is not None:
                checkpoints.write_recipe(run_dir, recipe)  # the next --resume begins with what fits now
            if self._companion is not None:
                live = LiveRun(recipe, run_dir, address, keeper, playing, fleet, say)
                await stack.enter_async_context(meanwhile(self._companion(live)))
            failing = [one for one in (manager, self._models.other_ranks, saver, self._tasks) if one is not None]
            news = [*reporter.news(fleet, keeper, playing, self._tasks)]
            if recipe.parallelism.enabled:
                news.append(Pool(keeper).follow(fleet, say))
            async with connecting.dismissed_at_the_end(recipe, fleet, dial()), meanwhile(*news):
                await keeping.until_joined(recipe, fleet, keeper)
                return await first_of(self._train(loop), [one.failed() for one in failing], own)

    async def _make_saver(self) -> Saver | None:
        recipe, point = self._recipe, self._point
        if not recipe.checkpoint.enabled:
            return None
        learner = self._models.learner
        begun = checkpoints.describe(recipe, learner.policy, self._tasks.digests) if point is None else point.state
        saver = await self._models.make_saver(recipe, self._run_dir, begun, point)
        self._stack.push_async_callback(saver.stop)
        return saver

    async def _train_logged_steps(self, saver: Saver | None, manager: ManagerProcess) -> None:
        """Train the steps of the log before an engine takes memory. Workers reconnect meanwhile."""
        if self._point is None:
            return
        assert saver is not None, "a run that keeps no checkpoints has none to resume from"
        again = self._models.train_again(self._point, saver, self._run_dir)
        await first_of(again, [one.failed() for one in (manager, self._models.other_ranks, saver) if one is not None])

    async def _write_down_that_it_begins(self, saver: Saver | None) -> None:
        """Record the start before the manager opens the run: from then on no other run may begin in this directory."""
        if self._point is None:
            checkpoints.write_recipe(self._run_dir, self._recipe)
            if saver is not None:
                await saver.begin()

    async def _train(self, loop: Loop) -> str:
        point = self._point
        try:
            if point is None:
                return await loop.run()
            return await loop.run(point.next_step, point.last, is_told=point.is_told)
        except NothingCameError as error:
            told = hosts.told_failure(self._run_dir)
            why = self._tasks.why_none_scored() or (f"{told}. {error}" if told else str(error))
            raise UserError(why) from error
