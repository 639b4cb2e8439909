"""The input of a step: scored samples in whole groups; and how an algorithm treats truncated answers and rewards.

Plain values: numpy in, numbers out. Nothing here knows a model.
"""

import math
from collections.abc import Container, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import msgspec
import numpy as np

from polyrl.config.recipe import AlgorithmConfig

TokenIds = np.ndarray[Any, np.dtype[np.int32]]
Logprobs = np.ndarray[Any, np.dtype[np.float32]]

_SAME_REWARD = 1e-8


class TrainSegment(NamedTuple):
    """Consecutive answer tokens that one worker wrote with one version."""

    version: int
    num_tokens: int
    engine: str = ""
    """The kind of the worker's engine."""
    worker: str = ""


class TrainSample(NamedTuple):
    prompt: TokenIds
    answer: TokenIds
    """At least one token. The end token is included."""
    logprobs: Logprobs
    """The log-probabilities of the answer tokens by the engine that drew them: the behaviour policy."""
    reward: float
    group: int = 0
    finish: str = "stop"
    """"stop", or "length" for an answer cut off at the cap."""
    written_by: tuple[TrainSegment, ...] = ()
    """The segments of the answer, in order."""
    old_logprobs: Logprobs | None = None
    """Log-probabilities by the step's starting weights, if scored already: the denominator of the importance ratio."""
    parts: Mapping[str, float] = {}
    """The named parts that make up the reward."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.answer)


TrainGroup = Sequence[TrainSample]
"""The samples of one prompt. Advantages compare them with each other, so one group is never split between two calls."""


def without(groups: Sequence[TrainGroup], numbers: Container[int], first: int = 0) -> list[list[TrainSample]]:
    """Return the groups without the samples of these numbers, and without groups that become empty. Samples are
    numbered consecutively, starting at `first`."""
    number = count(first)
    kept = [[sample for sample in group if next(number) not in numbers] for group in groups]
    return [group for group in kept if group]


def check_samples(groups: Sequence[TrainGroup]) -> None:
    """Raise ValueError for a sample that cannot be trained on."""
    for one in (sample for group in groups for sample in group):
        if len(one.prompt) == 0 or len(one.answer) == 0 or len(one.logprobs) != len(one.answer):
            raise ValueError(
                f"a sample of group {one.group} has {len(one.prompt)} prompt tokens, {len(one.answer)} answer tokens "
                f"and {len(one.logprobs)} log-probabilities"
            )
        if not math.isfinite(one.reward):
            raise ValueError(f"a sample of group {one.group} has reward {one.reward}")


def is_zero_variance(rewards: Sequence[float]) -> bool:
    """Return whether all rewards are equal, so that group advantages are zero and there is nothing to learn."""
    return max(rewards) - min(rewards) < _SAME_REWARD


def is_masked(sample: TrainSample, config: AlgorithmConfig) -> bool:
    """Return whether a sample counts in its group's advantages but is not trained on itself."""
    return config.overlong == "mask" and sample.finish == "length"


def shaped_reward(reward: float, num_tokens: int, config: AlgorithmConfig, max_new_tokens: int) -> float:
    """Return the reward of an answer, minus the soft penalty for a length close to the cap."""
    if config.overlong != "penalty":
        return reward
    buffer = config.overlong_buffer_tokens
    assert buffer is not None, "the config checks it"
    return reward - overlong_penalty(num_tokens, max_new_tokens, buffer) * config.overlong_penalty


def overlong_penalty(num_tokens: int, max_new_tokens: int, buffer_tokens: int) -> float:
    """Return 0 until `buffer_tokens` before the cap, then rise linearly to 1 at the cap."""
    return min(1.0, max(0.0, (num_tokens - (max_new_tokens - buffer_tokens)) / buffer_tokens))


# The encoding for other ranks and for the redo log: an array is its dtype, three letters in numpy, and its bytes.

_ARRAY = 1
_KIND_BYTES = 3


def encode_groups(groups: Sequence[TrainGroup]) -> bytes:
    return msgspec.msgpack.encode([[tuple(sample) for sample in group] for group in groups], enc_hook=_array_to_bytes)


def decode_groups(data: bytes) -> list[list[TrainSample]]:
    groups = msgspec.msgpack.decode(data, ext_hook=_array_from_bytes)
    return [[_sample(*sample) for sample in group] for group in groups]


def _sample(*fields: Any) -> TrainSample:
    sample = TrainSample(*fields)
    return sample._replace(written_by=tuple(TrainSegment(*one) for one in sample.written_by))


def _array_to_bytes(value: Any) -> msgspec.msgpack.Ext:
    if not isinstance(value, np.ndarray) or value.ndim != 1:
        raise TypeError(f"{type(value).__name__} has no bytes here; expected numbers, text, or flat arrays")
    return msgspec.msgpack.Ext(_ARRAY, value.dtype.str.encode() + value.tobytes())


def _array_from_bytes(_: int, data: memoryview) -> "np.ndarray[Any, Any]":
    return np.frombuffer(bytearray(data[_KIND_BYTES:]), np.dtype(bytes(data[:_KIND_BYTES]).decode()))
