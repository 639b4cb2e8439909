"""Samples into packs by tokens: rows without padding, each sample whole, none seeing another.

A sample that is longer than a pack may be gets one of its own.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from polyrl.trainer.batch import TrainSample

Ints = np.ndarray[Any, np.dtype[np.int64]]


class Pack(NamedTuple):
    """Flat rows of samples one after the other, and which of them predict answer tokens."""

    samples: tuple[int, ...]
    """Which of the given ones, in the order of their rows."""
    tokens: Ints
    positions: Ints
    lengths: tuple[int, ...]
    """Rows of each sample."""
    predicting: Ints
    """Rows whose next token is of an answer."""
    targets: Ints
    """That token."""
    sample: Ints
    """Its sample's number within the pack."""
    num_answer_tokens: Ints
    """Of each sample."""


def plan_packs(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Numbers of samples for each pack: longest first, each into the first pack with room for it."""
    packs: list[list[int]] = []
    room: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        length = lengths[number]
        at = next((one for one, left in enumerate(room) if left >= length), None)
        if at is None:
            at = len(packs)
            packs.append([])
            room.append(max_tokens)
        packs[at].append(number)
        room[at] -= length
    return packs


def pack(samples: Sequence[TrainSample], members: Sequence[int]) -> Pack:
    """The last token of an answer is predicted but predicts nothing: it gets no row."""
    tokens: list[np.ndarray[Any, Any]] = []
    positions: list[Ints] = []
    predicting: list[Ints] = []
    targets: list[np.ndarray[Any, Any]] = []
    lengths: list[int] = []
    first = 0
    for member in members:
        prompt, answer = samples[member].prompt, samples[member].answer
        num = len(prompt) + len(answer) - 1
        tokens += [prompt, answer[:-1]]
        positions.append(np.arange(num))
        predicting.append(np.arange(first + len(prompt) - 1, first + num))
        targets.append(answer)
        lengths.append(num)
        first += num
    counts = np.array([len(one) for one in targets], np.int64)
    return Pack(
        tuple(members),
        np.concatenate(tokens).astype(np.int64),
        np.concatenate(positions),
        tuple(lengths),
        np.concatenate(predicting),
        np.concatenate(targets).astype(np.int64),
        np.repeat(np.arange(len(counts)), counts),
        counts,
    )


def make_packs(samples: Sequence[TrainSample], max_tokens: int) -> list[Pack]:
    lengths = [one.num_tokens - 1 for one in samples]
    return [pack(samples, members) for members in plan_packs(lengths, max_tokens)]
