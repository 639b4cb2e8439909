"""What a step trains on: scored samples, whole groups of them; and what an algorithm does with their ends and rewards.

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
    """So many tokens of an answer, by one worker with one version."""

    version: int
    num_tokens: int
    engine: str = ""
    """What kind the worker's engine is."""
    worker: str = ""


class TrainSample(NamedTuple):
    prompt: TokenIds
    answer: TokenIds
    """At least one token; the one that ended it is its last."""
    logprobs: Logprobs
    """Of the answer's tokens, from the engine that drew them: the behaviour policy."""
    reward: float
    group: int = 0
    finish: str = "stop"
    """stop, or length: cut off at the cap."""
    written_by: tuple[TrainSegment, ...] = ()
    """The turns at it, in order."""
    old_logprobs: Logprobs | None = None
    """Of the weights at the step's start, where they were computed beforehand; the ratio's denominator."""
    parts: Mapping[str, float] = {}
    """What the reward is made of, by name."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.answer)


TrainGroup = Sequence[TrainSample]
"""Samples of one prompt. Advantages compare them with each other: a group is never divided between two calls."""


def without(groups: Sequence[TrainGroup], numbers: Container[int], first: int = 0) -> list[list[TrainSample]]:
    """Groups without the samples of these numbers, and without those that have none left. Samples are numbered through,
    from `first` on."""
    number = count(first)
    kept = [[sample for sample in group if next(number) not in numbers] for group in groups]
    return [group for group in kept if group]


def check_samples(groups: Sequence[TrainGroup]) -> None:
    """Raise ValueError for a sample that no step can be made of."""
    for one in (sample for group in groups for sample in group):
        if len(one.prompt) == 0 or len(one.answer) == 0 or len(one.logprobs) != len(one.answer):
            raise ValueError(
                f"a sample of group {one.group} has {len(one.prompt)} prompt tokens, {len(one.answer)} answer tokens "
                f"and {len(one.logprobs)} log-probabilities"
            )
        if not math.isfinite(one.reward):
            raise ValueError(f"a sample of group {one.group} has reward {one.reward}")


def is_zero_variance(rewards: Sequence[float]) -> bool:
    """Whether all rewards are equal, so that group advantages are zero and there is nothing to learn."""
    return max(rewards) - min(rewards) < _SAME_REWARD


def is_masked(sample: TrainSample, config: AlgorithmConfig) -> bool:
    """Whether a sample counts in its group's advantages but is not trained on itself."""
    return config.overlong == "mask" and sample.finish == "length"


def shaped_reward(reward: float, num_tokens: int, config: AlgorithmConfig, max_new_tokens: int) -> float:
    """The reward of an answer, less the soft penalty for one that comes close to the cap."""
    if config.overlong != "penalty":
        return reward
    buffer = config.overlong_buffer_tokens
    assert buffer is not None, "the config checks it"
    return reward - overlong_penalty(num_tokens, max_new_tokens, buffer) * config.overlong_penalty


def overlong_penalty(num_tokens: int, max_new_tokens: int, buffer_tokens: int) -> float:
    """Zero up to the buffer before the cap, one at the cap, a straight line between."""
    return min(1.0, max(0.0, (num_tokens - (max_new_tokens - buffer_tokens)) / buffer_tokens))


# As bytes, for other ranks and for the redo log: arrays are their type, three letters of numpy's, and what they hold.

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
