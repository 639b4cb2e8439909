"""What a recipe leaves to the machine: the dtype, the threads, and whether one of several ranks also generates.

A run writes down what was chosen, and goes on with that, wherever it is resumed.
"""

import os
from collections.abc import Mapping

from msgspec.structs import replace

from polyrl.config.recipe import Recipe, TrainSection
from polyrl.cores import num_cores
from polyrl.engines.builtin.config import BuiltinConfig, choose_device
from polyrl.run.models import gpu_bytes
from polyrl.run.plan import ModelShape, estimate_memory, read_shape

_FEW_PARAMETERS = 10_000_000
"""With matrices as small as those of fewer, a second thread only waits."""
_FILLED = 0.8
"""Of a GPU's memory, this much is planned at most; the rest is for the engine's cache, and for what nobody planned."""


def fit(recipe: Recipe) -> Recipe:
    """With nothing left open. Raises ConfigError for a model directory that cannot be used."""
    device = choose_device(recipe.model.device)
    if recipe.model.dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
        recipe = replace(recipe, model=replace(recipe.model, dtype=dtype))
    shape = read_shape(recipe.model.path)
    if device == "cpu" and recipe.train.threads is None:
        recipe = _with(recipe, replace(recipe.train, threads=choose_threads(recipe, shape.num_parameters)))
    if recipe.train.local_generation is None:
        has_room = device == "cpu" or fits_beside(recipe, shape, gpu_bytes())
        recipe = _with(recipe, replace(recipe.train, local_generation=has_room))
    if recipe.validation.at_start is None:
        at_start = bool(recipe.train.local_generation)
        recipe = replace(recipe, validation=replace(recipe.validation, at_start=at_start))
    return recipe


def _with(recipe: Recipe, train: TrainSection) -> Recipe:
    return replace(recipe, train=train)


def choose_threads(
    recipe: Recipe, num_parameters: int, cores: int | None = None, environment: Mapping[str, str] = os.environ
) -> int:
    """Of one rank. Two threads for one core have been seen to be 20 times slower than one."""
    said = environment.get("OMP_NUM_THREADS", "")
    if said.isdecimal() and int(said) > 0:
        return int(said)
    if num_parameters < _FEW_PARAMETERS:
        return 1
    others = 1 + recipe.fleet.workers * _worker_threads(recipe)
    return max(1, ((num_cores() if cores is None else cores) - others) // recipe.train.ranks)


def _worker_threads(recipe: Recipe) -> int:
    said = recipe.fleet.settings.get("threads")
    return said if isinstance(said, int) else BuiltinConfig(model="").threads


def fits_beside(recipe: Recipe, shape: ModelShape, num_bytes: int) -> bool:
    """Whether rank zero's GPU, of so many bytes, has room for the engine's whole copy of the model beside its part."""
    generating = _with(recipe, replace(recipe.train, local_generation=True))
    return estimate_memory(generating, shape).total <= _FILLED * num_bytes
