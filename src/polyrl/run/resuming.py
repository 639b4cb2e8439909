"""Resume a run: read its recipe and its changes, and load its models from the newest checkpoint.

Before a run continues with other settings, the steps that are only in the log are trained again with the old ones.
"""

import asyncio
import contextlib
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from polyrl.config.recipe import Recipe
from polyrl.errors import UserError
from polyrl.run import changes, checkpoints, models, nodes, ranks
from polyrl.run.checkpoints import ResumePoint
from polyrl.run.event_loop import run_loop
from polyrl.run.plan import fit
from polyrl.run.ranks import OtherRanks
from polyrl.run.supervising import first_of, until_interrupted
from polyrl.trainer.leading import Learner
from polyrl.trainer.replicas import EveryReplica
from polyrl.trainer.state import checkpoint
from polyrl.trainer.state.saving import tidy
from polyrl.trainer.step_stats import Steps


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


def _train_log_to_a_checkpoint(before: Recipe, run_dir: Path, point: ResumePoint) -> None:
    with restored(before, run_dir, point) as (learner, other_ranks):
        run_loop(until_interrupted(_train_again(before, run_dir, point, learner, other_ranks)))
    if other_ranks is not None:
        other_ranks.ranks.close()  # this process meets those of the run next
    del learner, other_ranks
    gc.collect()  # the models that come next need the room
    models.free_device()


async def _train_again(
    recipe: Recipe, run_dir: Path, point: ResumePoint, learner: Learner, other_ranks: OtherRanks | None
) -> str:
    leader = None if other_ranks is None else other_ranks.lead(learner)
    gather = (learner if leader is None else leader).whole_state
    shards = None if other_ranks is None else other_ranks.shards
    saver = await asyncio.to_thread(checkpoints.make_saver, recipe, run_dir, point.state, gather, point, shards)
    try:
        steps: Steps = learner.steps if leader is None else leader
        far = [] if other_ranks is None else other_ranks.far_replicas()
        again = checkpoints.train_again(point, EveryReplica(steps, far) if far else steps, saver, run_dir)
        await first_of(again, [one.failed() for one in (other_ranks, saver) if one is not None])
        await saver.finish()
    finally:
        await saver.stop()
    return "the steps of the log are in a checkpoint"


@contextmanager
def restored(recipe: Recipe, run_dir: Path, point: ResumePoint | None) -> Iterator[tuple[Learner, OtherRanks | None]]:
    """The run's models in memory, on all of its ranks, as they were at `point`; None: as a run begins with them.

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
        yield learner, other_ranks
