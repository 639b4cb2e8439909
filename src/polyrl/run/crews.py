"""A run's models in memory, on all of its ranks, as its newest checkpoint has them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polyrl.config.recipe import Recipe
from polyrl.run import checkpoints, models, ranks
from polyrl.run.checkpoints import Past
from polyrl.run.ranks import Team
from polyrl.trainer.leading import Crew


@contextmanager
def restored(recipe: Recipe, run_dir: Path, past: Past | None) -> Iterator[tuple[Crew, Team | None]]:
    """`past` is what the run goes on from; none: it begins. Raises UserError."""
    folder = None if past is None else past.folder
    with ranks.assembled(recipe, run_dir, ranks.seat_of(os.environ), folder) as team:
        crew = models.load_crew(recipe, None if team is None else team.ranks)
        if team is not None:
            team.check()
        if past is not None:
            checkpoints.check_past(past, recipe, crew.policy)
            if past.tensors:
                crew.restore(past.tensors)
                past.tensors.clear()  # they lie in the file, which would stay on the disk for as long as they do
        yield crew, team
