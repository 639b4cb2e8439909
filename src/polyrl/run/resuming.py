"""Before a run goes on with other settings, steps that only the log has are trained again as they were, and kept."""

import asyncio
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polyrl.config.recipe import Recipe
from polyrl.run import checkpoints, models, ranks
from polyrl.run.checkpoints import ResumePoint
from polyrl.run.event_loop import run_loop
from polyrl.run.ranks import OtherRanks
from polyrl.run.training import first_of, until_interrupted
from polyrl.trainer.leading import Learner


def settle(before: Recipe, run_dir: Path, past: ResumePoint) -> None:
    """Ends with a checkpoint of the last logged step. `before` is the recipe that the steps were trained with.

    Raises UserError; and Interrupted, then the log is as it was.
    """
    with restored(before, run_dir, past) as (learner, other_ranks):
        run_loop(until_interrupted(_train_again(before, run_dir, past, learner, other_ranks)))
    if other_ranks is not None:
        other_ranks.ranks.close()  # this process meets those of the run next
    del learner, other_ranks
    gc.collect()  # the models that come next need the room
    models.free_device()


async def _train_again(
    recipe: Recipe, run_dir: Path, past: ResumePoint, learner: Learner, other_ranks: OtherRanks | None
) -> str:
    leader = None if other_ranks is None else other_ranks.lead(learner)
    gather = (learner if leader is None else leader).whole_state
    saver = await asyncio.to_thread(checkpoints.make_saver, recipe, run_dir, past.state, gather, past)
    try:
        again = checkpoints.train_again(past, learner.steps if leader is None else leader, saver, run_dir)
        await first_of(again, [one.failed() for one in (other_ranks, saver) if one is not None], None)
        await saver.finish()
    finally:
        await saver.stop()
    return "settled"


@contextmanager
def restored(recipe: Recipe, run_dir: Path, past: ResumePoint | None) -> Iterator[tuple[Learner, OtherRanks | None]]:
    """`past` is what the run goes on from; none: it begins. Raises UserError."""
    folder = None if past is None else past.folder
    with ranks.assembled(recipe, run_dir, ranks.rank_info(os.environ), folder) as other_ranks:
        learner = models.load_learner(recipe, None if other_ranks is None else other_ranks.ranks)
        if other_ranks is not None:
            other_ranks.check()
        if past is not None:
            checkpoints.check_resume_point(past, recipe, learner.policy)
            if past.tensors:
                learner.restore(past.tensors)
                past.tensors.clear()  # they lie in the file, which would stay on the disk for as long as they do
        yield learner, other_ranks
