"""A run's models, as a new run begins with them or as a run that is resumed left them.

Before a run continues with other settings, the steps that are only in the log are trained again with the old ones.
"""

import asyncio
import contextlib
import gc
import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import NamedTuple

from polyrl.client import Fleet
from polyrl.config.recipe import Recipe
from polyrl.errors import UserError
from polyrl.run import changes, checkpoints, connecting, local_worker, models, nodes, ranks
from polyrl.run.checkpoints import ResumePoint
from polyrl.run.encryption import Encryption
from polyrl.run.event_loop import run_loop
from polyrl.run.plan import fit
from polyrl.run.processes import ManagerAddress
from polyrl.run.ranks import OtherRanks
from polyrl.run.settings import serves_from_every_node
from polyrl.run.supervising import first_of, until_interrupted
from polyrl.trainer.devices import Devices
from polyrl.trainer.leading import Learner
from polyrl.trainer.local_engine import LocalEngine
from polyrl.trainer.publishing import Publishing
from polyrl.trainer.replicas import EveryReplica, Replicas
from polyrl.trainer.state import checkpoint
from polyrl.trainer.state.checkpoint import TrainerState
from polyrl.trainer.state.saving import Saver, tidy
from polyrl.trainer.step_stats import Steps
from polyrl.weights.server import WeightServer
from polyrl.weights.shares import ServingNodes
from polyrl.wire.credentials import read_token_file

log = logging.getLogger("polyrl.train")

_STOP_S = 5.0
"""How long other replicas are waited for when the run is over."""


class Resumed(NamedTuple):
    recipe: Recipe
    """The recipe with the changes; `before` is the recipe without them."""
    before: Recipe
    point: ResumePoint | None
    """None: the run was killed before anything was trained, and begins."""


def reopen(run_dir: Path, overrides: list[str]) -> Resumed:
    """Read the state from which a run resumes. Raises UserError if the run cannot resume, or is done."""
    read = ranks.with_ranks(
        lambda given: checkpoints.read_recipe(run_dir, given)[1], overrides, ranks.rank_info(os.environ)
    )
    before, _ = checkpoints.read_recipe(run_dir, [])
    checkpoints.wait_for_manager_to_end(run_dir)
    if not checkpoint.found(run_dir) and not checkpoints.has_begun(run_dir):  # killed before it had written more
        return Resumed(read, before, None)
    point = checkpoints.read_resume_point(run_dir)
    with contextlib.suppress(OSError):  # the next one to write there says what is wrong
        tidy(run_dir, checkpoints.keep_of(read))
    checkpoints.check_that_something_is_left(point, read, run_dir)
    return Resumed(read, before, point)


def finish_logged_steps(before: Recipe, after: Recipe, run_dir: Path, point: ResumePoint) -> ResumePoint:
    """Return the point with what is trained otherwise from there on; steps of the log are trained as they were first.

    Raises UserError; and Interrupted, then the log is as it was.
    """
    changed = tuple(changes.breaks(before, after, point.next_step)) if point.next_step else ()
    if changed and point.log:
        if ranks.rank_info(os.environ) is not None or nodes.remembered(os.environ) is not None:
            raise UserError(
                f"{changed[0].key}: the last {len(point.log)} steps are in the log alone, and are first trained again "
                "as they were, which ranks of torchrun or of several nodes cannot do: use --ranks alone, or go on once "
                "without the change"
            )
        _train_log_to_a_checkpoint(fit(before), run_dir, point)
        point = checkpoints.read_resume_point(run_dir)
    return point._replace(breaks=changed)


class RestoredModels:
    """A run's models in memory, and all that trains them: this process, and the other ranks if there are any."""

    def __init__(self, learner: Learner, other_ranks: OtherRanks | None = None) -> None:
        self.learner, self.other_ranks = learner, other_ranks
        self.leader = None if other_ranks is None else other_ranks.lead(learner)
        self.steps: Steps = learner.steps if self.leader is None else self.leader
        """The accumulator that trains this replica's share of a step."""
        self.far = [] if other_ranks is None else other_ranks.far_replicas()

    async def make_saver(self, recipe: Recipe, run_dir: Path, about: TrainerState, point: ResumePoint | None) -> Saver:
        gather = (self.learner if self.leader is None else self.leader).whole_state
        shards = None if self.other_ranks is None else self.other_ranks.shards
        return await asyncio.to_thread(checkpoints.make_saver, recipe, run_dir, about, gather, point, shards)

    async def train_again(self, point: ResumePoint, saver: Saver, run_dir: Path) -> None:
        """Train the steps of the log again, in all replicas. Raises UserError."""
        steps = EveryReplica(self.steps, self.far) if self.far else self.steps
        await checkpoints.train_again(point, steps, saver, run_dir)

    def weight_server(
        self, recipe: Recipe, fleet: Fleet, tls: Encryption | None
    ) -> AbstractContextManager[WeightServer]:
        nodes = self._serving_nodes(recipe)
        if nodes is None and self.other_ranks is not None and self.other_ranks.heads is not None:
            log.info("this node serves every version alone, and holds two whole copies of the weights in main memory")
        return connecting.weight_server(recipe, fleet, tls, self.learner.policy.device.type, nodes)

    def _serving_nodes(self, recipe: Recipe) -> ServingNodes | None:
        """Return the nodes that each serve a share of a version; None if this one serves all."""
        return self.other_ranks.heads if self.other_ranks is not None and serves_from_every_node(recipe) else None

    def publishing(
        self, recipe: Recipe, server: WeightServer, engine: LocalEngine | None, fleet: Fleet, replicas: Replicas
    ) -> Publishing:
        is_shared = self._serving_nodes(recipe) is not None
        return Publishing(
            self.learner.policy,
            server,
            engine,
            {version: digests[-1] for version, digests in fleet.digests.items()},
            None if self.leader is None else self.leader.weights,
            encodes=recipe.weights.encode_on == "device",
            as_in_files=models.is_served(recipe),
            key=connecting.key_of_weights(fleet) if is_shared else None,
            tell=replicas.serve_shares if is_shared else None,
        )

    @asynccontextmanager
    async def replicas(self, devices: Devices, run_dir: Path, address: ManagerAddress) -> AsyncIterator[Replicas]:
        """Start all replicas, in the fleet of the run's manager. The other ones end with it."""
        replicas = Replicas(self.steps, devices, self.far, local_worker.NAME if self.far else "")
        try:
            await replicas.join_run(address.url, read_token_file(run_dir / "admin.token"))
            yield replicas
        finally:
            await replicas.stop(_STOP_S)


def _train_log_to_a_checkpoint(before: Recipe, run_dir: Path, point: ResumePoint) -> None:
    with restored(before, run_dir, point) as found:
        run_loop(until_interrupted(_train_again(before, run_dir, point, found)))
    if found.other_ranks is not None:
        found.other_ranks.ranks.close()  # this process meets those of the run next
    del found
    gc.collect()  # the models that come next need the room
    models.free_device()


async def _train_again(recipe: Recipe, run_dir: Path, point: ResumePoint, found: RestoredModels) -> str:
    saver = await found.make_saver(recipe, run_dir, point.state, point)
    try:
        again = found.train_again(point, saver, run_dir)
        await first_of(again, [one.failed() for one in (found.other_ranks, saver) if one is not None])
        await saver.finish()
    finally:
        await saver.stop()
    return "the steps of the log are in a checkpoint"


@contextmanager
def restored(recipe: Recipe, run_dir: Path, point: ResumePoint | None) -> Iterator[RestoredModels]:
    """Load the run's models on all of its ranks, as they were at `point`; None: as a run begins with them.

    Raises UserError.
    """
    folder = None if point is None else point.folder
    with ranks.assembled(recipe, run_dir, ranks.rank_info(os.environ), folder) as other_ranks:
        learner = models.load_learner(recipe, None if other_ranks is None else other_ranks.ranks)
        if other_ranks is not None:
            other_ranks.check()
        if point is not None:
            checkpoints.check_resume_point(point, recipe, learner.policy)
            if other_ranks is not None:
                other_ranks.restore(learner, point.folder, point.tensors)
            elif point.tensors:
                learner.restore(point.tensors)
            if isinstance(point.tensors, dict):
                point.tensors.clear()  # they lie in the file, which would stay on the disk for as long as they do
        yield RestoredModels(learner, other_ranks)
