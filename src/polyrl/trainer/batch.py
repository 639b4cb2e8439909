"""The input of a step: scored samples in whole groups; and how an algorithm treats truncated answers and rewards.

A sample is trained as one or several *training sequences* (sequences.py): one if it is an answer to a prompt, as many
as needed if it is an episode of several calls. Groups are lists of sequences. Rewards, ends and lengths are the
episode's.

Plain values: numpy in, numbers out. Nothing here knows a model.
"""

import math
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from polyrl.config.recipe import AlgorithmConfig

TokenIds = np.ndarray[Any, np.dtype[np.int32]]
Logprobs = np.ndarray[Any, np.dtype[np.float32]]
Positions = np.ndarray[Any, np.dtype[np.int32]]

_SAME_REWARD = 1e-8


class TrainSegment(NamedTuple):
    """Consecutive drawn tokens that one worker wrote with one version."""

    version: int
    num_tokens: int
    engine: str = ""
    """The kind of the worker's engine."""
    worker: str = ""


class TrainSample(NamedTuple):
    """A training sequence. Its lists have an entry for each drawn token, and none for given ones."""

    prompt: TokenIds
    answer: TokenIds
    """All that follows the prompt, up to the last drawn token. The end token is included."""
    logprobs: Logprobs
    """The log-probabilities of the drawn tokens by the engine that drew them: the behaviour policy."""
    reward: float
    group: int = 0
    finish: str = "stop"
    """"stop", or "length" for an answer cut off at the cap; of an episode, the end of its last call."""
    written_by: tuple[TrainSegment, ...] = ()
    """The segments of the drawn tokens, in order."""
    old_logprobs: Logprobs | None = None
    """Log-probabilities by the step's starting weights, if scored already: the denominator of the importance ratio."""
    parts: Mapping[str, float] = {}
    """The named parts that make up the reward."""
    drawn: Positions | None = None
    """The positions of the drawn tokens within `answer`; the others were given. None: all were drawn."""
    episode: int | None = None
    """The index of the episode within the group. None: the sequence is an episode by itself."""
    order: Positions | None = None
    """The index of each drawn token among those of the whole episode, which follow one another call by call. None: the
    sequence has all of them."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.answer)

    @property
    def num_drawn(self) -> int:
        return len(self.logprobs)


TrainGroup = Sequence[TrainSample]
"""The sequences of one prompt. Advantages compare them with each other, so one group is never split between two
calls."""


def number_episodes(groups: Sequence[TrainGroup], first: int = 0) -> list[list[int]]:
    """Return the number of each sequence's episode. Episodes are numbered consecutively, starting at `first`."""
    numbers: list[list[int]] = []
    for group in groups:
        known: dict[int, int] = {}
        its: list[int] = []
        for one in group:
            number = first if one.episode is None else known.setdefault(one.episode, first)
            its.append(number)
            if number == first:
                first += 1
        numbers.append(its)
    return numbers


def first_sequences(groups: Sequence[TrainGroup]) -> list[tuple[TrainSample, int]]:
    """Return the first sequence of every episode, with the number of drawn tokens of the whole episode."""
    found: list[tuple[TrainSample, int]] = []
    for group, numbers in zip(groups, number_episodes(groups), strict=True):
        for one, number in zip(group, numbers, strict=True):
            num_drawn = len(one.logprobs)
            if number == len(found):
                found.append((one, num_drawn))
            else:
                first, num_before = found[number]
                found[number] = first, num_before + num_drawn
    return found


def without(groups: Sequence[TrainGroup], episodes: Container[int], first: int = 0) -> list[list[TrainSample]]:
    """Return the groups without the episodes of these numbers (`number_episodes`), and without groups that become
    empty."""
    numbered = zip(groups, number_episodes(groups, first), strict=True)
    kept = [
        [one for one, number in zip(group, numbers, strict=True) if number not in episodes]
        for group, numbers in numbered
    ]
    return [group for group in kept if group]


def check_samples(groups: Sequence[TrainGroup]) -> None:
    """Raise ValueError for a sample that cannot be trained on."""
    for one in (sample for group in groups for sample in group):
        num_drawn = len(one.answer) if one.drawn is None else len(one.drawn)
        if len(one.prompt) == 0 or num_drawn == 0 or len(one.logprobs) != num_drawn:
            raise ValueError(
                f"a sample of group {one.group} has {len(one.prompt)} prompt tokens, {num_drawn} answer tokens "
                f"and {len(one.logprobs)} log-probabilities"
            )
        if one.drawn is not None and not _is_rising(one.drawn, len(one.answer)):
            raise ValueError(
                f"a sample of group {one.group} has drawn tokens that do not rise to the last of its "
                f"{len(one.answer)} answer tokens"
            )
        if not math.isfinite(one.reward):
            raise ValueError(f"a sample of group {one.group} has reward {one.reward}")
    for group in groups:
        _check_orders(group)


def _is_rising(positions: Positions, num: int) -> bool:
    """Return whether these are positions among `num`, each above the one before, that end with the last."""
    return int(positions[0]) >= 0 and int(positions[-1]) == num - 1 and bool((np.diff(positions) > 0).all())


def _check_orders(group: TrainGroup) -> None:
    """Raise ValueError unless the sequences of each episode have each of its drawn tokens once, and one reward."""
    episodes: dict[int, list[TrainSample]] = {}
    for one in group:
        if one.episode is not None:
            episodes.setdefault(one.episode, []).append(one)
    for episode, sequences in episodes.items():
        if len({(one.reward, one.finish) for one in sequences}) > 1:
            raise ValueError(f"episode {episode} of group {group[0].group} has several rewards, or several ends")
        if len(sequences) == 1 and sequences[0].order is None:
            continue
        orders = [one.order for one in sequences if one.order is not None and len(one.order) == one.num_drawn]
        found = np.sort(np.concatenate(orders)) if len(orders) == len(sequences) else np.array([-1])
        if (found != np.arange(len(found))).any():
            raise ValueError(f"episode {episode} of group {group[0].group} does not have each drawn token once")


def is_zero_variance(rewards: Sequence[float]) -> bool:
    """Return whether all rewards are equal, so that group advantages are zero and there is nothing to learn."""
    return not rewards or max(rewards) - min(rewards) < _SAME_REWARD


def is_masked(sample: TrainSample, config: AlgorithmConfig) -> bool:
    """Return whether a sample, or its whole episode, counts in its group's advantages but is not trained on."""
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
    return encode_arrays([[tuple(sample) for sample in group] for group in groups])


def decode_groups(data: bytes) -> list[list[TrainSample]]:
    return [[make_sample(*sample) for sample in group] for group in decode_arrays(data)]


def make_sample(*fields: Any) -> TrainSample:
    """Return a sample from its decoded fields."""
    sample = TrainSample(*fields)
    return sample._replace(written_by=tuple(TrainSegment(*one) for one in sample.written_by))


def encode_arrays(value: Any) -> bytes:
    """Encode plain values and flat arrays."""
    return msgspec.msgpack.encode(value, enc_hook=_array_to_bytes)


def decode_arrays(data: bytes) -> Any:
    return msgspec.msgpack.decode(data, ext_hook=_array_from_bytes)


def _array_to_bytes(value: Any) -> msgspec.msgpack.Ext:
    if not isinstance(value, np.ndarray) or value.ndim != 1:
        raise TypeError(f"{type(value).__name__} has no bytes here; expected numbers, text, or flat arrays")
    return msgspec.msgpack.Ext(_ARRAY, value.dtype.str.encode() + value.tobytes())


def _array_from_bytes(_: int, data: memoryview) -> "np.ndarray[Any, Any]":
    return np.frombuffer(bytearray(data[_KIND_BYTES:]), np.dtype(bytes(data[:_KIND_BYTES]).decode()))
