"""How a recipe wants answers drawn, as engines are told."""

from polyrl.config.recipe import Recipe
from polyrl.telemetry.metric_names import IMPOSED_LENGTHS
from polyrl.wire.frames import Sampling
from polyrl.wire.imposed import ImposedLengths


def sampling_of(recipe: Recipe) -> Sampling:
    rollout = recipe.rollout
    wanted = rollout.impose_lengths
    imposed = None
    if wanted.kind != "off":
        quantiles = wanted.quantiles if wanted.kind == "quantiles" else ()
        imposed = ImposedLengths(wanted.median, wanted.sigma, quantiles, wanted.correlation)
    return Sampling(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop=rollout.stop,
        imposed=imposed,
    )


def caveat_of(recipe: Recipe) -> str:
    """What every output on the run repeats; mostly nothing."""
    kind = recipe.rollout.impose_lengths.kind
    return "" if kind == "off" else f"{IMPOSED_LENGTHS} ({kind})"
