"""The names of things. Each id is a distinct type, so that a lease cannot be passed for a sample.

Samples are numbered inside their group: a sample's id holds its group's, and either can be read from it. That takes one
integer per sample in memory and on the wire, and lets a person write `12/3` for the fourth sample of group 12.
"""

from typing import NewType

WorkerName = NewType("WorkerName", str)
"""The name that a person gave a worker. It outlives restarts; together with an incarnation it names one process."""

Incarnation = NewType("Incarnation", int)
"""The number of a worker's life: it grows each time a worker of that name joins."""

HostName = NewType("HostName", str)
"""The name of a host, which plays an environment's episodes. It outlives restarts, as a worker's does."""

PromptId = NewType("PromptId", int)
"""A row of a domain's data set."""

GroupId = NewType("GroupId", int)
"""One prompt's attempts in one round."""

SampleId = NewType("SampleId", int)
"""One attempt at one prompt."""

LeaseId = NewType("LeaseId", int)
"""One sample in one worker's hands; never reused."""

Step = NewType("Step", int)
"""One trainer update. Step t trains on the round of the same number and makes version t + 1."""

Version = NewType("Version", int)
"""A weight version. The run starts from version 0."""

Seconds = float
"""A moment or a duration, in seconds. Moments count from the start of the driver's clock."""

MAX_SAMPLES_PER_GROUP = 1024


def sample_id(group: GroupId, index: int) -> SampleId:
    return SampleId(group * MAX_SAMPLES_PER_GROUP + index)


def group_of(sample: SampleId) -> GroupId:
    return GroupId(sample // MAX_SAMPLES_PER_GROUP)


def index_of(sample: SampleId) -> int:
    return sample % MAX_SAMPLES_PER_GROUP


def show_sample(sample: SampleId) -> str:
    return f"{group_of(sample)}/{index_of(sample)}"


def parse_sample(text: str) -> SampleId:
    """Parse a sample's id, written `12/3`. Raises ValueError for any other text."""
    group, slash, index = text.partition("/")
    if not slash or not group.isdecimal() or not index.isdecimal() or int(index) >= MAX_SAMPLES_PER_GROUP:
        raise ValueError(f"a sample is written GROUP/INDEX, for example 12/3; got {text!r}")
    return sample_id(GroupId(int(group)), int(index))
