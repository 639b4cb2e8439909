"""A training run, put together from top to bottom, and taken apart.

    train()        check the recipe, load the models, run; returns why the run ended
    Training.run() manager -> steps of the log again -> engine -> client -> weights -> workers -> loop

    manager (a process) <- client <- loop -> steps -> policy
       ^                                              ^ shared
       +---- local worker (in this process) -> engine-+
       +---- workers of [fleet] (processes), and workers from elsewhere; weights come from here

Rules kept here: what was started is ended, in the opposite order, however the run ends (supervising.py).
"""

import asyncio
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
    models,
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
from polyrl.run.ranks import OtherRanks
from polyrl.run.reporting import Watch, reporting
from polyrl.run.settings import serves_from_every_node
from polyrl.run.supervising import first_of, leaving, meanwhile, until_interrupted
from polyrl.run.task_contract import Tasks
from polyrl.run.validation import validator
from polyrl.trainer.devices import Devices
from polyrl.trainer.leading import Learner
from polyrl.trainer.local_engine import LocalEngine
from polyrl.trainer.loop import Loop, NothingCameError
from polyrl.trainer.publishing import Publishing
from polyrl.trainer.replicas import EveryReplica, Replicas
from polyrl.trainer.state.saving import Saver
from polyrl.trainer.step_stats import Steps
from polyrl.weights.server import WeightServer
from polyrl.weights.shares import ServingNodes
from polyrl.wire.credentials import read_token_file

log = logging.getLogger("polyrl.train")

_STOP_S = 5.0
"""How long other replicas are waited for when the run is over."""


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

    async def run(learner: Learner, other_ranks: OtherRanks | None, point: ResumePoint | None) -> str:
        training = Training(
            checked.recipe, run_dir, learner, checked.tasks, tls=checked.tls, point=point, other_ranks=other_ranks,
            companion=companion, watch=watch,
        )  # fmt: skip
        try:
            return await until_interrupted(training.run(), leaving(checked.recipe, run_dir))
        finally:
            await checked.tasks.close()

    with preflight.logging_to(run_dir, logging.WARNING if quiet else logging.INFO):
        if resumed is not None and point is not None:
            point = resuming.finish_logged_steps(resumed.before, checked.recipe, run_dir, point)
        with resuming.restored(checked.recipe, run_dir, point) as (learner, other_ranks):
            return run_loop(run(learner, other_ranks, point))


class Training:
    """A run whose models are in memory."""

    def __init__(
        self,
        recipe: Recipe,
        run_dir: Path,
        learner: Learner,
        tasks: Tasks,
        *,
        tls: Encryption | None = None,
        point: ResumePoint | None = None,
        other_ranks: OtherRanks | None = None,
        companion: Companion | None = None,
        watch: Watch | None = None,
    ) -> None:
        """`point` is where the run is resumed; None: it begins."""
        self._recipe, self._run_dir, self._learner, self._tasks, self._tls = recipe, run_dir, learner, tasks, tls
        self._point, self._other_ranks, self._companion, self._watch = point, other_ranks, companion, watch
        self._leader = None if other_ranks is None else other_ranks.lead(learner)
        self._steps: Steps = learner.steps if self._leader is None else self._leader
        self._far = [] if other_ranks is None else other_ranks.far_replicas()
        self._first_step = 0 if point is None else point.next_step
        self._stack = AsyncExitStack()

    async def run(self) -> str:
        """Train to the end, or until cancelled. Returns why it ended."""
        recipe, run_dir, policy = self._recipe, self._run_dir, self._learner.policy
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
            nodes = self._serving_nodes()
            server = stack.enter_context(connecting.weight_server(recipe, fleet, self._tls, policy.device.type, nodes))
            devices = stack.enter_context(
                contextlib.closing(Devices(engine, generates=bool(recipe.train.local_generation)))
            )
            own = await stack.enter_async_context(local_worker.joined(recipe, dial(), fleet, engine, devices))
            replicas = Replicas(self._steps, devices, self._far, local_worker.NAME if self._far else "")
            stack.push_async_callback(replicas.stop, _STOP_S)
            await replicas.join_run(address.url, read_token_file(run_dir / "admin.token"))
            keeper = await stack.enter_async_context(keeping.started(recipe, run_dir, address))
            playing = await stack.enter_async_context(hosts.started(recipe, run_dir, address))
            reporter = await stack.enter_async_context(
                reporting(recipe, run_dir, address, dial(), self._point, self._watch)
            )
            say, rules = reporter.display.say, connecting.answer_rules(policy.loaded)
            desks = await stack.enter_async_context(validation_hosts.started(recipe, run_dir, engine, rules, say))
            publishing = self._make_publishing(server, engine, fleet, None if nodes is None else replicas)
            validate = validator(recipe, engine, devices, self._tasks, reporter, fleet, saver, desks)
            prompts = self._tasks.tokens
            loop = Loop(recipe, fleet, replicas, publishing, prompts, reporter, validate, saver)
            reporter.begin(fleet)
            if self._point is not None:  # the next --resume begins with what fits now
                checkpoints.write_recipe(run_dir, recipe)
            if self._companion is not None:
                live = LiveRun(recipe, run_dir, address, keeper, playing, fleet, say)
                await stack.enter_async_context(meanwhile(self._companion(live)))
            failing = [one for one in (manager, self._other_ranks, saver, self._tasks) if one is not None]
            news = [*reporter.news(fleet, keeper, playing, self._tasks)]
            if recipe.parallelism.enabled:
                news.append(Pool(recipe, keeper).follow(fleet, say))
            async with connecting.dismissed_at_the_end(recipe, fleet, dial()), meanwhile(*news):
                await keeping.until_joined(recipe, fleet, keeper)
                return await first_of(self._train(loop), [one.failed() for one in failing], own)

    def _serving_nodes(self) -> ServingNodes | None:
        """Return the nodes that each serve a share of a version; None if this one serves all."""
        if self._other_ranks is None or self._other_ranks.heads is None:
            return None
        if not serves_from_every_node(self._recipe):
            log.info("this node serves every version alone, and holds two whole copies of the weights in main memory")
            return None
        return self._other_ranks.heads

    def _make_publishing(
        self, server: WeightServer, engine: LocalEngine | None, fleet: Fleet, sharing: Replicas | None
    ) -> Publishing:
        """`sharing`: the replicas whose nodes serve shares too."""
        return Publishing(
            self._learner.policy,
            server,
            engine,
            {version: digests[-1] for version, digests in fleet.digests.items()},
            None if self._leader is None else self._leader.weights,
            encodes=self._recipe.weights.encode_on == "device",
            as_in_files=models.is_served(self._recipe),
            key=None if sharing is None else connecting.key_of_weights(fleet),
            tell=None if sharing is None else sharing.serve_shares,
        )

    async def _make_saver(self) -> Saver | None:
        recipe, run_dir, point = self._recipe, self._run_dir, self._point
        if not recipe.checkpoint.enabled:
            return None
        gather = (self._learner if self._leader is None else self._leader).whole_state
        begun = (
            checkpoints.describe(recipe, self._learner.policy, self._tasks.digests) if point is None else point.state
        )
        shards = None if self._other_ranks is None else self._other_ranks.shards
        saver = await asyncio.to_thread(checkpoints.make_saver, recipe, run_dir, begun, gather, point, shards)
        self._stack.push_async_callback(saver.stop)
        return saver

    async def _train_logged_steps(self, saver: Saver | None, manager: ManagerProcess) -> None:
        """Train the steps of the log before an engine takes memory. Workers reconnect meanwhile."""
        if self._point is None:
            return
        assert saver is not None, "a run that keeps no checkpoints has none to resume from"
        steps = EveryReplica(self._steps, self._far) if self._far else self._steps
        again = checkpoints.train_again(self._point, steps, saver, self._run_dir)
        await first_of(again, [one.failed() for one in (manager, self._other_ranks, saver) if one is not None])

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
            return await loop.run(self._first_step, point.last, is_told=point.is_told)
        except NothingCameError as error:
            raise UserError(self._tasks.why_none_scored() or self._why_nothing_came(error)) from error

    def _why_nothing_came(self, error: NothingCameError) -> str:
        failure = hosts.last_failure(self._run_dir)
        return f"{failure}. {error}" if failure else str(error)
