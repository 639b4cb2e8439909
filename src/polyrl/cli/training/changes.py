"""What may be another in a run that goes on, and why the rest may not.

The nearest name decides: a key's own, or its section's. A section of the recipe that is new must be named here; a test
sees to it.
"""

from typing import Any

import msgspec

from polyrl.config.recipe import Recipe
from polyrl.errors import UserError

_FREE = ""
_OPENED = "the manager opened the run with it, and its journal is replayed with that alone"
_TRAINED = "steps since the last checkpoint are trained again, and must come out as they did"
_KEPT = "the checkpoint holds the tensors of what it was"
_HALF_DONE = "the open round is half made with it: its prompts, or what is drawn for them and scored"

WHY_NOT: dict[str, str] = {
    "name": _FREE,
    "about": _FREE,
    "model": _KEPT,
    "lora": _KEPT,
    "train": _TRAINED,
    "train.mode": _OPENED,
    "train.max_staleness": _OPENED,
    "train.price_usd_per_hour": _OPENED,
    "train.run_dir": "the run goes on where it is",
    "train.steps": _FREE,
    "train.stop_at_reward": _FREE,
    "train.micro_batch_tokens": _FREE,
    "train.min_micro_batch_samples": _FREE,
    "train.mismatch_warning": _FREE,
    "train.ranks": _FREE,
    "algorithm": _TRAINED,
    "algorithm.critic.path": _KEPT,
    "optimizer": _TRAINED,
    "optimizer.kind": _KEPT,
    "optimizer.offload": _FREE,
    "rollout": _HALF_DONE,
    "rollout.max_new_tokens": _OPENED,
    "rollout.temperature": _TRAINED,
    "data": _HALF_DONE,
    "data.prompts_per_step": _OPENED,
    "data.num_prompts": _OPENED,
    "data.num_epochs": _OPENED,
    "data.shuffle_seed": _OPENED,
    "validation": _FREE,
    "rewards": _OPENED,
    "fleet": _FREE,
    "manager": _FREE,
    "weights": _FREE,
    "checkpoint": _FREE,
    "checkpoint.enabled": "nobody could go on from what comes next",
    "track": _FREE,
    "rounds": _OPENED,
    "routing": _OPENED,
    "seeding": _OPENED,
    "hand_back": _OPENED,
    "fleet_rules": _OPENED,
    "weight_delivery": _OPENED,
    "scaling": _OPENED,
}


def check_changes(before: Recipe, after: Recipe) -> None:
    """Raises UserError, by its name, for the first key that may not be another."""
    for key in _differences(msgspec.to_builtins(before), msgspec.to_builtins(after)):
        if why_not := _why_not(key):
            raise UserError(f"{key}: cannot be changed in a run that goes on: {why_not}; put it back, or begin anew")


def _why_not(key: str) -> str:
    while key not in WHY_NOT:
        key = key.rpartition(".")[0]
    return WHY_NOT[key]


def _differences(before: Any, after: Any, path: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        keys = {**before, **after}
        return [
            one for key in keys for one in _differences(before.get(key), after.get(key), f"{path}.{key}".lstrip("."))
        ]
    return [] if before == after else [path]
