"""PolyRL: RL post-training for language models that you can pull the plug on.

    polyrl.load      a recipe, by the name of one that ships, by a path, or as a tree
    polyrl.start     a run of it, in a process of its own: watch it by `for step in run.steps()`
    polyrl.resume    a run that was stopped or killed
    polyrl.export    a run's weights as a Hugging Face directory
    polyrl.Reward    what a reward function may return, and polyrl.RewardInput what it is called with;
                     polyrl.RewardGroup, for a function of all answers to a prompt, and polyrl.RewardEpisode, for
                     one of episodes

docs/guides/python.md shows them. `import polyrl` imports nothing else; the rest comes when it is first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyrl.config.recipe import Recipe
    from polyrl.errors import ConfigError, PolyrlError, RunFailed, UserError
    from polyrl.rewards.groups import RewardGroup
    from polyrl.rewards.reward import Reward, RewardEpisode, RewardFailed, RewardInput, RewardUnavailable
    from polyrl.run.api import Exported, TrainedStep, TrainingRun, export, load, resume, start

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "Exported",
    "PolyrlError",
    "Recipe",
    "Reward",
    "RewardEpisode",
    "RewardFailed",
    "RewardGroup",
    "RewardInput",
    "RewardUnavailable",
    "RunFailed",
    "TrainedStep",
    "TrainingRun",
    "UserError",
    "export",
    "load",
    "resume",
    "start",
]

_PLACES = {
    "polyrl.config.recipe": ("Recipe",),
    "polyrl.errors": ("ConfigError", "PolyrlError", "RunFailed", "UserError"),
    "polyrl.rewards.groups": ("RewardGroup",),
    "polyrl.rewards.reward": ("Reward", "RewardEpisode", "RewardFailed", "RewardInput", "RewardUnavailable"),
    "polyrl.run.api": ("Exported", "TrainingRun", "TrainedStep", "export", "load", "resume", "start"),
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    for module, names in _PLACES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
