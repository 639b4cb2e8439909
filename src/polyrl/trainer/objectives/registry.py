"""Advantages and losses by name: built in, registered by a program, or `module:function` directly from a recipe.

A function of your own is called with its input and the algorithm's settings, and with the keyword arguments that the
recipe has for it (`advantage_args`, `loss_args`).

    from polyrl.trainer.objectives.registry import advantage

    @advantage("best_of")
    def best_of(rewards, config):
        return (rewards == rewards.max()).float() - 1 / len(rewards)

A recipe then says `algorithm.advantage = "my_module:best_of"`. `@batch_advantage` marks an advantage of a whole step.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from polyrl.config.plugins import find, with_arguments
from polyrl.config.recipe import AlgorithmConfig
from polyrl.errors import ConfigError, UserError

Tensor = torch.Tensor


class TokenBatch(NamedTuple):
    """The input of a loss: the drawn tokens of whole training sequences, one after the other. All are trained on. A
    sample is one sequence; an episode of several calls may be several, which need not be in the same batch."""

    logprobs: Tensor
    """(tokens,) float32, by the current weights; the only field with a gradient."""
    old_logprobs: Tensor
    """Log-probabilities by the weights at the step's start, or by the engine: `algorithm.old_logprobs`."""
    behaviour_logprobs: Tensor
    """Log-probabilities by the engine that drew the tokens."""
    advantages: Tensor
    """The advantage of each token."""
    sample: Tensor
    """(tokens,) int64: the index of each token's sequence, from 0."""
    num_tokens: Tensor
    """(sequences,) int64: the number of drawn tokens of each sequence."""


class RewardBatch(NamedTuple):
    """The input of a batch advantage: all samples of the step, group by group. An episode of several calls is one."""

    rewards: Tensor
    """(samples,) float64: the reward, minus the KL of all drawn tokens if the reward pays for it."""
    group: Tensor
    """(samples,) int64: the index of each sample's group, from 0."""
    num_tokens: Tensor
    """(samples,) int64: the number of trained tokens; 0 for a masked sample, which only its siblings use."""
    to_come: Tensor
    """(tokens,) float64, for all drawn tokens, sample by sample and call by call: the reward, minus the KL of this
    token and the later ones."""
    is_trained: Tensor
    """(tokens,) int64: 1, or 0 for the tokens of a masked sample."""


AdvantageFunction = Callable[[Tensor, AlgorithmConfig], Tensor]
"""Maps the rewards of one group, (n,) float64, to its advantages."""
BatchAdvantageFunction = Callable[[RewardBatch, AlgorithmConfig], Tensor]
"""Maps the rewards of a step to its advantages, (samples,) or (tokens,). Nothing is trained before the last sample."""
LossFunction = Callable[[TokenBatch, AlgorithmConfig], tuple[Tensor, dict[str, Tensor]]]
"""Returns the loss of each token, (tokens,), and numbers whose means over tokens become metrics under `actor/`."""

BY_CRITIC = "gae"
"""The advantage that needs a critic's values besides the rewards."""
ADVANTAGES: dict[str, AdvantageFunction] = {}
BATCH_ADVANTAGES: dict[str, BatchAdvantageFunction] = {}
LOSSES: dict[str, LossFunction] = {}

_F = TypeVar("_F", bound=Callable[..., Any])
_NONE: Mapping[str, Any] = {}


def advantage(name: str) -> Callable[[_F], _F]:
    return _register(ADVANTAGES, name)


def batch_advantage(name: str) -> Callable[[_F], _F]:
    return _register(BATCH_ADVANTAGES, name)


def loss(name: str) -> Callable[[_F], _F]:
    return _register(LOSSES, name)


def checked_loss(found: Any, num_tokens: int, name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the result of the loss `name`, checked. Raises UserError unless it has a number for each token."""
    match found:
        case (Tensor() as losses, dict() as told) if all(isinstance(one, Tensor) for one in told.values()):
            if losses.shape == (num_tokens,):
                return losses, told
            gave = f"shape {list(losses.shape)}"
        case tuple():
            gave = f"({', '.join(type(one).__name__ for one in found)})"
        case _:
            gave = f"one {type(found).__name__}"
    raise UserError(
        f"algorithm.loss: {name} gave {gave}; expected a pair: a tensor with one number for each of {num_tokens} "
        "tokens, and a dict of such tensors for the metrics, which may be empty"
    )


def checked_advantages(found: Any, num_samples: int, name: str, what: str, num_tokens: int | None = None) -> Tensor:
    """Return the result of the advantage `name`, checked and detached. `what` is "a group" or "a step".

    Raises UserError unless it has a number for each sample or, if `num_tokens` is given, for each token.
    """
    if isinstance(found, Tensor) and found.shape in ((num_samples,), (num_tokens,)):
        return found.detach()
    gave = f"shape {list(found.shape)}" if isinstance(found, Tensor) else f"one {type(found).__name__}"
    or_tokens = "" if num_tokens is None else f" or [{num_tokens}], one for each token"
    raise UserError(
        f"algorithm.advantage: {name} gave {gave} for {what} of {num_samples} samples; expected a tensor of shape "
        f"[{num_samples}]{or_tokens}"
    )


def _register(known: dict[str, Any], name: str) -> Callable[[_F], _F]:
    def keep(function: _F) -> _F:
        if known.get(name, function) is not function:
            raise ValueError(f"{name} is registered already")
        known[name] = function
        return function

    return keep


def find_advantage(name: str, args: Mapping[str, Any] = _NONE) -> AdvantageFunction:
    """Return the advantage of one group by name, with its arguments. Raises ConfigError."""
    return with_arguments(_find_any_advantage(name), args, "algorithm.advantage_args", 2)


def find_batch_advantage(name: str, args: Mapping[str, Any] = _NONE) -> BatchAdvantageFunction | None:
    """Return the advantage of a step by name, with its arguments; None if it is one of a group. Raises ConfigError."""
    found = _find_any_advantage(name)
    if not any(found is one for one in BATCH_ADVANTAGES.values()):
        return None
    return with_arguments(found, args, "algorithm.advantage_args", 2)


def _find_any_advantage(name: str) -> Any:
    return find(name, "algorithm.advantage", {**ADVANTAGES, **BATCH_ADVANTAGES}, also=(BY_CRITIC,))


def find_loss(name: str, args: Mapping[str, Any] = _NONE) -> LossFunction:
    """Return the loss by name, with its arguments. Raises ConfigError."""
    return with_arguments(find(name, "algorithm.loss", LOSSES), args, "algorithm.loss_args", 2)


def check_algorithm(config: AlgorithmConfig) -> None:
    """Raise ConfigError for a loss or an advantage that does not exist, or does not take its arguments."""
    find_loss(config.loss, config.loss_args)
    if config.advantage != BY_CRITIC:
        find_advantage(config.advantage, config.advantage_args)
    elif config.advantage_args:
        raise ConfigError(f'algorithm.advantage_args: is for an advantage of your own, not for "{BY_CRITIC}"')
