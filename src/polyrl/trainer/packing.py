"""Packs samples into micro-batches by tokens: no padding, every sample whole, no attention across samples.

A sample here is a training sequence (batch.py). A sequence that is longer than a pack gets a pack of its own. Tokens
that an environment gave have rows, which later tokens attend to, and nothing is predicted for them.

Several ranks run passes together. In each pass every rank has one pack, all with about the same number of tokens, since
each layer waits for the slowest rank. A rank left without a pack gets a *spare* one, of the shortest sample, which
counts for nothing: the ranks meet in every pass, so all must run the same number of passes.
"""

import heapq
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from polyrl.trainer.batch import TrainSample

Ints = np.ndarray[Any, np.dtype[np.int64]]


class Pack(NamedTuple):
    """The rows of several sequences, one row per token, and which rows predict drawn tokens."""

    samples: tuple[int, ...]
    """The indices of the packed samples among those given, in the order of their rows."""
    tokens: Ints
    positions: Ints
    lengths: tuple[int, ...]
    """The number of rows of each sample."""
    predicting: Ints
    """The rows whose next token was drawn."""
    targets: Ints
    """The drawn token that each of these rows predicts."""
    sample: Ints
    """The index, within the pack, of the sequence that each target belongs to."""
    num_drawn_tokens: Ints
    """The number of drawn tokens of each sequence."""


class RankWork(NamedTuple):
    """The work of one rank in one pass."""

    pack: Pack
    is_spare: bool = False
    """Whether the pack counts for nothing: another rank trains its sample."""


Passes = list[list[list[int]]]
"""For each pass and each rank, the indices of the samples in its pack. An empty list becomes a spare pack."""


def plan_packs(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Return the sample indices of each pack: longest first, each into the first pack with room for it."""
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


def plan_passes(lengths: Sequence[int], max_tokens: int, num_ranks: int) -> Passes:
    """Plan as few passes as the longest-first rule can fit the samples into, with packs of about equal size in each."""
    if num_ranks == 1:
        return [[members] for members in plan_packs(lengths, max_tokens)]
    if not lengths:
        return []
    num_passes = max(1, math.ceil(sum(lengths) / (max_tokens * num_ranks)))
    while True:
        packs = _spread(lengths, num_passes * num_ranks)
        if all(len(one) < 2 or sum(lengths[number] for number in one) <= max_tokens for one in packs):
            break
        num_passes += 1
    packs.sort(key=lambda one: -sum(lengths[number] for number in one))
    passes = [packs[at : at + num_ranks] for at in range(0, len(packs), num_ranks)]
    return [pass_ if number % 2 == 0 else pass_[::-1] for number, pass_ in enumerate(passes) if any(pass_)]


def _spread(lengths: Sequence[int], num_packs: int) -> list[list[int]]:
    """Distribute the samples, longest first, each into the pack with the fewest tokens."""
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    loads = [(0, number) for number in range(num_packs)]
    for number in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        load, at = heapq.heappop(loads)
        packs[at].append(number)
        heapq.heappush(loads, (load + lengths[number], at))
    return packs


def pack(samples: Sequence[TrainSample], members: Sequence[int]) -> Pack:
    """Lay out one pack. The last token of an answer is predicted but predicts nothing, so it gets no row."""
    tokens: list[np.ndarray[Any, Any]] = []
    positions: list[Ints] = []
    predicting: list[Ints] = []
    targets: list[np.ndarray[Any, Any]] = []
    lengths: list[int] = []
    first = 0
    for member in members:
        prompt, answer, drawn = samples[member].prompt, samples[member].answer, samples[member].drawn
        num = len(prompt) + len(answer) - 1
        tokens += [prompt, answer[:-1]]
        positions.append(np.arange(num))
        if drawn is None:
            predicting.append(np.arange(first + len(prompt) - 1, first + num))
            targets.append(answer)
        else:
            predicting.append(drawn.astype(np.int64) + (first + len(prompt) - 1))
            targets.append(answer[drawn])
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


def num_rows(samples: Sequence[TrainSample]) -> list[int]:
    """Return the number of rows that each sample takes in a pack."""
    return [one.num_tokens - 1 for one in samples]


def make_packs(samples: Sequence[TrainSample], max_tokens: int) -> list[Pack]:
    return [pack(samples, members) for members in plan_packs(num_rows(samples), max_tokens)]


def make_parts(samples: Sequence[TrainSample], passes: Passes, rank: int) -> list[RankWork]:
    """Return the work of one rank, pass by pass."""
    rows = num_rows(samples)
    parts: list[RankWork] = []
    for pass_ in passes:
        members = pass_[rank]
        spare = [] if members else [min(range(len(rows)), key=rows.__getitem__)]
        parts.append(RankWork(pack(samples, members or spare), is_spare=not members))
    return parts
