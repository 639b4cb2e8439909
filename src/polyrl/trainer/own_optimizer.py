"""An optimizer of your own, `optimizer.kind = "module:Class"`: any torch optimizer, with its state in checkpoints.

It is called with two groups of float32 parameters, matrices and all others, each with its `weight_decay`; with `lr =
optimizer.lr`; and with optimizer.args. The schedule sets each group's `lr` before every step.

Rules kept here: the state of each parameter, and the numbers of the groups, go into the checkpoint; all of it must be
tensors and numbers. Gradients arrive divided and clipped. The optimizer must not change a parameter's shape.
"""

from collections.abc import Mapping
from typing import Any

import torch

from polyrl.config.plugins import check_arguments, find
from polyrl.config.recipe import OptimizerConfig
from polyrl.errors import ConfigError, UserError

Tensor = torch.Tensor

_KEY = "optimizer.kind"
_OF_GROUPS = ("params", "lr", "weight_decay")
"""Entries of a group that the recipe sets at every start."""


def find_optimizer(config: OptimizerConfig) -> Any:
    """Return the optimizer class that the recipe names. Raises ConfigError."""
    found = find(config.kind, _KEY, {}, also=("adamw", "adamw8bit"), what="Class", methods=("step",))
    if "lr" in config.args:
        raise ConfigError("optimizer.args.lr: is set by the schedule; expected optimizer.lr")
    check_arguments(found, {**config.args, "lr": config.lr}, "optimizer.args", 1)
    return found


def make(groups: list[dict[str, Any]], config: OptimizerConfig) -> Any:
    made = find_optimizer(config)(groups, lr=config.lr, **config.args)
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(f'{_KEY}: "{config.kind}" made {type(made).__name__}, expected a torch.optim.Optimizer')
    return made


def state_of(optimizer: Any, masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state, not copied. Keys are `state/KEY/NAME` for a parameter's tensors, `number/KEY/NAME` for its
    numbers, and `group/INDEX/KEY` for the numbers of a group. Raises UserError for any other kind of state."""
    state: dict[str, Tensor] = {}
    for name, master in masters.items():
        for key, value in optimizer.state.get(master, {}).items():
            if isinstance(value, Tensor):
                state[f"state/{key}/{name}"] = value
            elif isinstance(value, int | float):
                state[f"number/{key}/{name}"] = _as_tensor(value)
            elif value is not None:
                raise UserError(f"{_KEY}: it keeps {key} as {type(value).__name__}, expected tensors and numbers alone")
    for index, group in enumerate(optimizer.param_groups):
        numbers = {key: one for key, one in group.items() if key not in _OF_GROUPS and type(one) in (int, float)}
        state |= {f"group/{index}/{key}": _as_tensor(one) for key, one in numbers.items()}
    return state


def restore(optimizer: Any, masters: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copy a state into the optimizer. Raises UserError for state that does not belong to these parameters."""
    for one in masters.values():
        optimizer.state.pop(one, None)
    for place, value in state.items():
        kind, key, name = place.split("/", 2)
        if kind == "group" and int(key) < len(optimizer.param_groups):
            optimizer.param_groups[int(key)][name] = value.item()
        elif kind in ("state", "number") and name in masters:
            device = masters[name].device if value.dim() else value.device
            kept = value.item() if kind == "number" else value.to(device, copy=True)
            optimizer.state[masters[name]][key] = kept
        else:
            raise UserError(f"the optimizer's state does not fit the model: {place} is not in it")


def _as_tensor(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.int64 if isinstance(number, int) else torch.float64)
