"""The code of a person's own that a recipe names: found, and held against its arguments, before a run starts.

Rewards and data are looked at where they are opened (tasks.py), engines with their settings (workers.py).
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from polyrl.config.plugins import find, with_arguments
from polyrl.config.recipe import Recipe, TrackSection
from polyrl.telemetry.trackers import Own
from polyrl.trainer.objectives.registry import check_algorithm
from polyrl.trainer.own_optimizer import find_optimizer


def check_plugins(recipe: Recipe) -> None:
    """Raise ConfigError, which begins with the setting, for a name or an argument that cannot be used."""
    check_algorithm(recipe.algorithm)
    if recipe.optimizer.is_own:
        find_optimizer(recipe.optimizer)
    own_trackers(recipe.track, Path(), 0)


def own_trackers(track: TrackSection, run_dir: Path, first_step: int) -> list[Own]:
    """Return each tracker's name and what makes it. Raises ConfigError."""
    found: list[Own] = []
    for number, one in enumerate(track.trackers):
        key = f"track.trackers.{number}"
        own = find(one.tracker, f"{key}.tracker", {}, what="Class", methods=("log", "close"))
        make: Callable[..., Any] = with_arguments(own, one.args, f"{key}.args", 2)
        found.append((one.tracker, partial(make, run_dir, first_step)))
    return found
