"""Settings that may change when a run is resumed: freely, as a recorded break in its curve, or not at all.

The rule of a key is its own, or else its section's. A key of `data.domains` has the same rule as in `data`. A test
checks that every section of the recipe has a rule here.

    free        nothing that was trained or is in the journal depends on it
    a break     later steps are trained differently: earlier steps are finished with the old value (resuming.py), and
                the change is recorded by its key in the run's directory and its metrics (telemetry/breaks.py)
    a reason    the change is refused, for this reason
"""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

import msgspec

from polyrl.config.recipe import Recipe
from polyrl.errors import UserError
from polyrl.telemetry.breaks import Break

_FREE = ""
_BREAK = "a break"
_OPENED = "the manager opened the run with it, and its journal is replayed with that alone"
_DRAWN = "what the run draws at random follows from it"
_KEPT = "the checkpoint holds the tensors of what it was"
_HALF_DONE = "the open round is half made with it: its prompts, or what is drawn for them and scored"

_OF_A_DOMAIN = re.compile(r"^data\.domains\.\d+\.")

RULES: dict[str, str] = {
    "name": _FREE,
    "about": _FREE,
    "modules": _FREE,
    "model": _KEPT,
    "lora": _KEPT,
    "train": _FREE,
    "train.mode": _OPENED,
    "train.max_staleness": _OPENED,
    "train.price_usd_per_hour": "the ledger prices all of the run with it",
    "train.run_dir": "the run goes on where it is",
    "train.seed": _DRAWN,
    "algorithm": _BREAK,
    "algorithm.advantage": "with gae the checkpoint holds a critic, and otherwise none",
    "algorithm.critic.path": _KEPT,
    "optimizer": _BREAK,
    "optimizer.kind": _KEPT,
    "optimizer.args": _KEPT,
    "optimizer.offload": _FREE,
    "rollout": _BREAK,
    "rollout.max_new_tokens": _OPENED,
    "rollout.impose_lengths": _HALF_DONE,
    "data": _HALF_DONE,
    "data.validation": _FREE,
    "data.validation_args": _FREE,
    "data.prompts_per_step": _OPENED,
    "data.num_prompts": _OPENED,
    "data.num_epochs": _OPENED,
    "data.shuffle_seed": _OPENED,
    "validation": _FREE,
    "rewards": _FREE,
    "rewards.functions": _HALF_DONE,
    "environments": _FREE,
    "fleet": _FREE,
    "manager": _FREE,
    "weights": _FREE,
    "checkpoint": _FREE,
    "checkpoint.enabled": "the steps that follow could not be resumed",
    "track": _FREE,
    "rounds": _OPENED,
    "routing": _FREE,
    "seeding": _OPENED,
    "hand_back": _FREE,
    "parallelism": _OPENED,
    "fleet_rules": _FREE,
    "fleet_rules.migrate": _OPENED,
    "weight_delivery": _FREE,
    "scaling": _FREE,
    "derived": _FREE,
}


def check_changes(before: Recipe, after: Recipe, run_dir: Path) -> None:
    """Check that every changed key may change. Raises UserError, which names the first that may not."""
    for key in _differences(msgspec.to_builtins(before), msgspec.to_builtins(after)):
        if (rule := _rule(key)) not in (_FREE, _BREAK):
            raise UserError(
                f"{key}: cannot be changed in a run that goes on: {rule}; put it back, or {begin_anew(run_dir)}"
            )


def breaks(before: Recipe, after: Recipe, step: int) -> list[Break]:
    """Return the changed settings that make training differ from this step on."""
    old, new = msgspec.to_builtins(before), msgspec.to_builtins(after)
    keys = [key for key in _differences(old, new) if _rule(key) == _BREAK]
    return [Break(step, key, _at(old, key), _at(new, key)) for key in keys]


def begin_anew(run_dir: Path, *, has_weights: bool = True) -> str:
    """Return how to begin a new run instead, in words that follow an `or`."""
    run = shlex.quote(str(run_dir))
    begin = f"begin anew with `polyrl train {shlex.quote(str(run_dir / 'recipe.toml'))} --run-dir OTHER`"
    return f"{begin}, from its weights with model.path=DIR after `polyrl export {run} DIR`" if has_weights else begin


def _rule(key: str) -> str:
    """Return the rule of a key. The keys of a domain have the rules of `data`."""
    key = _OF_A_DOMAIN.sub("data.", key)
    while key not in RULES:
        key = key.rpartition(".")[0]
    return RULES[key]


def _differences(before: Any, after: Any, path: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        keys = {**before, **after}
        return [
            one for key in keys for one in _differences(before.get(key), after.get(key), f"{path}.{key}".lstrip("."))
        ]
    if _are_tables(before) and _are_tables(after) and len(before) == len(after):
        return _differences(_by_index(before), _by_index(after), path)
    return [] if before == after else [path]


def _are_tables(value: Any) -> TypeGuard[Sequence[dict[str, Any]]]:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(one, dict) for one in value)


def _by_index(tables: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {str(index): one for index, one in enumerate(tables)}


def _at(tree: Any, key: str) -> Any:
    for name in key.split("."):
        tree = _by_index(tree) if _are_tables(tree) else tree
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree
