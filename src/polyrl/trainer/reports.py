"""The report of a step: all that is known when it is over, as numbers of its samples.

A sample that is an episode counts once, with its own reward and the drawn tokens of all of its calls, however many
training sequences it has.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from polyrl.scheduling.core.ledger import StepLine
from polyrl.trainer.batch import TrainGroup, TrainSample, first_sequences, number_episodes
from polyrl.trainer.step_stats import StepStats

RejectedGroups = dict[int, list[float]]
"""The rewards of groups rejected because all their rewards are equal, by group id."""


class StepReport(NamedTuple):
    """Everything known about a step when it is over."""

    step: int
    stats: StepStats
    line: StepLine | None
    """The manager's account of the step. None before it arrives, or when the manager no longer has it."""
    rewards: list[float]
    """The rewards of all samples that arrived, including those of groups rejected for equal rewards."""
    lengths: list[int]
    """The number of drawn tokens of each trained sample, in the same order as `prompt_lengths`."""
    prompt_lengths: list[int]
    """The number of tokens before the first drawn one."""
    tokens_by_age: dict[int, int]
    """Trained tokens, by the number of versions between the weights that wrote them and the step's own."""
    num_mixed: int
    """The number of trained samples that more than one version wrote."""
    num_filtered: int
    """The number of groups rejected because all their rewards are equal."""
    seconds: dict[str, float]
    """Keys: total, generate, train, idle (devices on duty to train, with nothing to train); save and publish once
    known."""
    parts: Mapping[str, float] = {}
    """The mean of each named part of the reward, over the samples that reached this process and have that part."""
    num_sequences: int = 0
    """The number of training sequences that the trained samples are: more than samples where episodes have branches."""

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self, enc_hook=float)  # some numbers are numpy scalars

    @staticmethod
    def decode(data: bytes) -> "StepReport":
        return msgspec.msgpack.decode(data, type=StepReport)


def make_report(
    stats: StepStats,
    batches: Sequence[Sequence[TrainGroup]],
    filtered: RejectedGroups,
    rejected: Sequence[TrainGroup],
    seconds: dict[str, float],
) -> StepReport:
    """Return the report of a step that was trained on `batches`, before the manager's account of it is there."""
    groups = [group for batch in batches for group in batch]
    trained = first_sequences(groups)
    rewards = [one.reward for one, _ in trained]
    rewards += [reward for group in sorted(filtered) for reward in filtered[group]]  # whatever their order of arrival
    return StepReport(
        stats.step,
        stats,
        None,
        rewards,
        [num_tokens for _, num_tokens in trained],
        [len(one.prompt) for one, _ in trained],
        _tokens_by_age(stats.step, groups),
        _num_mixed(groups),
        len(filtered),
        seconds,
        _means_of_parts(one for one, _ in [*trained, *first_sequences(rejected)]),
        sum(map(len, groups)),
    )


def _means_of_parts(samples: Iterable[TrainSample]) -> dict[str, float]:
    """Return the mean of each part over the samples that have it, those that most have first."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.parts.items():
            found.setdefault(name, []).append(value)
    by_number = sorted(found.items(), key=lambda one: -len(one[1]))
    return {name: math.fsum(values) / len(values) for name, values in by_number}


def _tokens_by_age(step: int, groups: Sequence[TrainGroup]) -> dict[int, int]:
    ages: Counter[int] = Counter()
    for sample in (one for group in groups for one in group):
        for each in sample.written_by:
            ages[step - each.version] += each.num_tokens
    return dict(sorted(ages.items()))


def _num_mixed(groups: Sequence[TrainGroup]) -> int:
    """Return the number of samples that more than one version wrote."""
    versions: dict[int, set[int]] = {}
    for group, numbers in zip(groups, number_episodes(groups), strict=True):
        for one, number in zip(group, numbers, strict=True):
            if one.episode is not None or len(one.written_by) > 1:
                versions.setdefault(number, set()).update(each.version for each in one.written_by)
    return sum(len(found) > 1 for found in versions.values())
