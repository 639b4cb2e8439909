"""From what the fleet delivers to what is trained: the training sequences of a group's samples.

A sample that answers its group's prompt is one sequence. An episode consists of calls, each of them all tokens that the
policy saw and the tokens that it drew next:

    call 0   P -> A          sequence 0   P  A  T  B         A and B are trained
    call 1   P A T -> B
    call 2   P A U -> C      sequence 1   P  A  U  C         C is trained; A is context here

Rules kept here: a call whose prompt begins with all tokens of an earlier sequence goes on with the longest such one;
any other call begins a sequence. Each drawn token is trained once, after exactly the tokens that the policy saw. A call
without drawn tokens contributes nothing, and neither does one that the environment does not pay for, such as an
opponent's: where a later call saw its answer, that is context. An episode without any call that counts is left out of
its group: the policy did nothing in it.

Tokens are compared as numbers. A harness that renders a conversation anew, and gets other tokens for the same text,
begins another sequence, and never a token in a context that it was not drawn in.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from polyrl.client import EpisodeCall, Group, Sample
from polyrl.trainer.batch import Positions, TokenIds, TrainSample, TrainSegment


class TrainingSequence(NamedTuple):
    tokens: TokenIds
    """All tokens, up to the last drawn one."""
    trained: Positions
    """The positions of the tokens that are trained in this sequence."""
    order: Positions
    """The index of each of them among the drawn tokens of all calls that are trained."""


def make_sequences(calls: Sequence[EpisodeCall], tokens: TokenIds) -> list[TrainingSequence]:
    """Return the sequences of an episode, ordered by their first calls. `tokens` are all tokens that it drew."""
    found: list[TrainingSequence] = []
    num_drawn = 0
    for call in calls:
        drawn = tokens[call.start : call.end].astype(np.int32)
        if not (len(drawn) and call.is_trained):
            continue
        prompt = call.prompt.astype(np.int32)
        trained = np.arange(len(prompt), len(prompt) + len(drawn), dtype=np.int32)
        order = np.arange(num_drawn, num_drawn + len(drawn), dtype=np.int32)
        num_drawn += len(drawn)
        at = find_beginning(prompt, [one.tokens for one in found])
        if at is None:
            found.append(TrainingSequence(np.concatenate([prompt, drawn]), trained, order))
            continue
        earlier = found[at]
        found[at] = TrainingSequence(
            np.concatenate([prompt, drawn]),
            np.concatenate([earlier.trained, trained]),
            np.concatenate([earlier.order, order]),
        )
    return found


def find_beginning(prompt: TokenIds, sequences: Sequence[TokenIds]) -> int | None:
    """Return the index of the longest sequence that the prompt begins with."""
    for at in sorted(range(len(sequences)), key=lambda one: -len(sequences[one])):
        tokens = sequences[at]
        if len(tokens) <= len(prompt) and np.array_equal(prompt[: len(tokens)], tokens):
            return at
    return None


def train_samples(group: Group, prompt: Callable[[], TokenIds]) -> list[TrainSample]:
    """Return the sequences of a group. `prompt` returns the group's; it is not called for episodes."""
    made: list[TrainSample] = []
    shared: TokenIds | None = None
    for index, sample in enumerate(group.samples):
        if sample.calls:
            made += _of_episode(group, sample, index)
        elif len(sample.tokens):
            shared = prompt() if shared is None else shared
            made.append(_of_answer(group, sample, shared))
    return made


def _of_answer(group: Group, sample: Sample, prompt: TokenIds) -> TrainSample:
    return TrainSample(
        prompt=prompt,
        answer=sample.tokens.astype(np.int32, copy=False),
        logprobs=sample.logprobs.astype(np.float32, copy=False),
        reward=sample.reward,
        group=group.id,
        finish=sample.finish,
        written_by=_segments(sample),
        parts=sample.parts,
    )


def _of_episode(group: Group, sample: Sample, index: int) -> list[TrainSample]:
    calls = [call for call in sample.calls if call.is_trained]
    if not calls:
        return []
    places = np.concatenate([np.arange(call.start, call.end) for call in calls])
    """The drawn tokens of these calls, as indices of the sample's tokens."""
    found = make_sequences(calls, sample.tokens)
    made: list[TrainSample] = []
    for one in found:
        num_prompt = int(one.trained[0])
        is_all_drawn = len(one.trained) == len(one.tokens) - num_prompt
        made.append(
            TrainSample(
                prompt=one.tokens[:num_prompt],
                answer=one.tokens[num_prompt:],
                logprobs=sample.logprobs[places[one.order]].astype(np.float32),
                reward=sample.reward,
                group=group.id,
                finish=calls[-1].finish,
                written_by=_segments_at(sample, places[one.order]),
                parts=sample.parts,
                drawn=None if is_all_drawn else one.trained - num_prompt,
                episode=None if len(found) == 1 else index,
                order=None if len(found) == 1 else one.order,
            )
        )
    return made


def _segments(sample: Sample) -> tuple[TrainSegment, ...]:
    if len(sample.segments) == 1:
        (only,) = sample.segments
        return (TrainSegment(only.version, len(sample.tokens) - only.from_token, only.engine, only.worker),)
    ends = [segment.from_token for segment in sample.segments[1:]] + [len(sample.tokens)]
    return tuple(
        TrainSegment(segment.version, end - segment.from_token, segment.engine, segment.worker)
        for segment, end in zip(sample.segments, ends, strict=True)
    )


def _segments_at(sample: Sample, places: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> tuple[TrainSegment, ...]:
    """Return the segments of these tokens of a sample. Calls that one worker answered with one version are joined."""
    starts = [segment.from_token for segment in sample.segments]
    numbers = np.searchsorted(np.array(starts, np.int64), places, side="right") - 1
    if not starts or (numbers < 0).any():
        return ()
    writers = [(one.version, one.engine, one.worker) for one in sample.segments]
    runs = groupby(numbers.tolist(), key=lambda number: writers[number])
    return tuple(TrainSegment(version, sum(1 for _ in run), engine, worker) for (version, engine, worker), run in runs)
