"""Before a run goes on with other settings, steps that only the log has are trained again as they were, and kept."""

import asyncio
import gc
from pathlib import Path

from polyrl.config.recipe import Recipe
from polyrl.run import checkpoints, crews, models
from polyrl.run.checkpoints import Past
from polyrl.run.event_loop import run_loop
from polyrl.run.ranks import Team
from polyrl.run.run import first_of, until_interrupted
from polyrl.trainer.leading import Crew


def settle(before: Recipe, run_dir: Path, past: Past) -> None:
    """Ends with a checkpoint of the last logged step. `before` is the recipe that the steps were trained with.

    Raises UserError; and Interrupted, then the log is as it was.
    """
    with crews.restored(before, run_dir, past) as (crew, team):
        run_loop(until_interrupted(_train_again(before, run_dir, past, crew, team)))
    if team is not None:
        team.ranks.close()  # this process meets those of the run next
    del crew, team
    gc.collect()  # the models that come next need the room
    models.free_device()


async def _train_again(recipe: Recipe, run_dir: Path, past: Past, crew: Crew, team: Team | None) -> str:
    leader = None if team is None else team.lead(crew)
    gather = (crew if leader is None else leader).whole_state
    saver = await asyncio.to_thread(checkpoints.make_saver, recipe, run_dir, past.state, gather, past)
    try:
        again = checkpoints.train_again(past, crew.steps if leader is None else leader, saver, run_dir)
        await first_of(again, [one.failed() for one in (team, saver) if one is not None], None)
        await saver.finish()
    finally:
        await saver.stop()
    return "settled"
