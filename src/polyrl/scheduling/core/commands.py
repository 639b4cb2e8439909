"""Wishes, imperative: all that the scheduler ever asks for. Each says why.

A driver carries them out in order. Every command ends in an event, also when it fails, but for those whose docstring
says that no event answers them. A command that names a sample's tokens names their number only: payload lives in the
driver.
"""

from typing import Literal

from msgspec import Struct

from polyrl.ids import GroupId, HostName, LeaseId, PromptId, SampleId, Seconds, Step, Version, WorkerName
from polyrl.scheduling.core.ledger import DiscardCause, StepLine

RoundKind = Literal["short", "long"]


class CommandStruct(Struct, frozen=True, tag_field="command", gc=False):
    """The base of all commands: how they are written down."""


class Generate(CommandStruct, frozen=True, tag=True):
    """Ends in SampleFinished or LeaseEnded."""

    worker: WorkerName
    lease: LeaseId
    sample: SampleId
    from_token: int
    """Resume after this many tokens; 0 is a fresh start."""
    max_tokens: int
    """The sample ends at this many tokens in all."""
    why: str


class Abort(CommandStruct, frozen=True, tag=True):
    """Stop it. The lease is over when this is said; nothing need be answered.

    A driver that holds more tokens of a discarded sample than it has told says so (TokensDiscarded).
    """

    worker: WorkerName
    lease: LeaseId
    why: str
    sample: SampleId
    num_tokens: int
    """The tokens that the scheduler has been told of."""
    discarded_for: DiscardCause | None = None
    """None: it goes on elsewhere."""


class ForgetTokens(CommandStruct, frozen=True, tag=True):
    """Throw all tokens of a sample away, from every worker: it begins anew. Only informs."""

    sample: SampleId
    lease: LeaseId
    """The last one that it had. It is over."""
    why: str


class HandOver(CommandStruct, frozen=True, tag=True):
    """Stop it at its current token and deliver all of them. Ends in LeaseEnded, or SampleFinished if that was first."""

    worker: WorkerName
    lease: LeaseId
    why: str


class PullWeights(CommandStruct, frozen=True, tag=True):
    """Ends in WeightsInstalled or WeightsFailed. A pull that is under way is replaced."""

    worker: WorkerName
    version: Version
    source: WorkerName | None
    """A peer that holds it, or None for the trainer."""
    held: Version | None
    """The version that it holds now: a delta from there may be enough."""
    why: str


class ReleaseWorker(CommandStruct, frozen=True, tag=True):
    """A drained worker owes nothing more: let it go. Ends in WorkerLeft."""

    worker: WorkerName
    why: str


class ForgetWorker(CommandStruct, frozen=True, tag=True, omit_defaults=True):
    """A worker is given up: close its connection, refuse its news. No event answers it."""

    worker: WorkerName
    why: str
    rejoin: bool = True
    """It may join again. Not so when it was drained, or fails what others can do: it would fail it again."""
    drained: bool = False
    """It was asked to leave, and is not blamed."""


class StartTraining(CommandStruct, frozen=True, tag=True):
    """Give a local worker's devices to the trainer. Ends in DutyChanged."""

    worker: WorkerName
    why: str


class StartGenerating(CommandStruct, frozen=True, tag=True):
    """Give a local worker's devices back to its engine. Ends in DutyChanged."""

    worker: WorkerName
    why: str


class PlannedGroup(Struct, frozen=True, gc=False):
    group: GroupId
    domain: int
    prompt: PromptId
    epoch: int
    num_samples: int


class OpenRound(CommandStruct, frozen=True, tag=True):
    """A round begins with these prompts. No event answers it: the driver fetches what they say."""

    step: Step
    kind: RoundKind
    groups: tuple[PlannedGroup, ...]
    why: str


class AddGroup(CommandStruct, frozen=True, tag=True):
    """A round gets one more prompt, in place of a lost one. No event answers it."""

    step: Step
    group: PlannedGroup
    why: str


class Score(CommandStruct, frozen=True, tag=True):
    """Ends in RewardFinished."""

    sample: SampleId
    attempt: int
    timeout_s: Seconds
    why: str


class CancelScore(CommandStruct, frozen=True, tag=True):
    """Stop scoring: the sample is no longer wanted. No event answers it."""

    sample: SampleId
    attempt: int
    why: str


class DeliverGroup(CommandStruct, frozen=True, tag=True):
    """A group is complete. Ends in GroupsTaken, GroupRejected or GroupUnscored."""

    step: Step
    group: GroupId
    samples: tuple[SampleId, ...]
    why: str


class DropGroup(CommandStruct, frozen=True, tag=True):
    """A prompt leaves the run for a reason, or waits for another round. No event answers it."""

    group: GroupId
    why: str


class CloseRound(CommandStruct, frozen=True, tag=True):
    """The last group of the round has been delivered: the denominators are known. Ends in StepTrained.

    After a GroupRejected, or a GroupUnscored of all samples, it no longer holds; it is said again when the round is
    complete without that group.
    """

    step: Step
    num_groups: int
    why: str


class PlayEpisode(CommandStruct, frozen=True, tag=True):
    """Begin an episode. Ends in EpisodeEnded or HostLeft; each CallMade is answered by AnswerCall."""

    host: HostName
    sample: SampleId
    attempt: int
    why: str


class AnswerCall(CommandStruct, frozen=True, tag=True):
    """All tokens of the episode's present call are there. Ends in CallMade, EpisodeEnded or HostLeft."""

    host: HostName
    sample: SampleId
    attempt: int


class StopEpisode(CommandStruct, frozen=True, tag=True):
    """Its host is to give the episode up. It is over when this is said; nothing need be answered."""

    host: HostName
    sample: SampleId
    attempt: int
    why: str
    num_tokens: int = -1
    """The episode is over time, and scored with these drawn tokens. -1: it is not scored."""


class ReleaseHost(CommandStruct, frozen=True, tag=True):
    """A drained host owes nothing more: let it go. Ends in HostLeft."""

    host: HostName
    why: str


class ForgetHost(CommandStruct, frozen=True, tag=True, omit_defaults=True):
    """A host is given up: close its connection, refuse its news. No event answers it."""

    host: HostName
    why: str
    hangs: bool = False
    """Its process is to end; otherwise it may join again."""


class AddAsked(CommandStruct, frozen=True, tag=True):
    """A group that was asked for has its name now. No event answers it."""

    group: GroupId
    num_samples: int
    why: str


class CloseAsked(CommandStruct, frozen=True, tag=True):
    """An asked group is over: all of it is answered, or none of it will be. No event answers it."""

    group: GroupId
    answered: bool
    why: str


class EndData(CommandStruct, frozen=True, tag=True):
    """There is no prompt left for this step. No event answers it."""

    step: Step
    why: str


class ReportStep(CommandStruct, frozen=True, tag=True):
    """Report a step's line of the ledger. No event answers it."""

    line: StepLine


class AdviseFleet(CommandStruct, frozen=True, tag=True, omit_defaults=True):
    """The number of remote workers worth holding. Only informs."""

    num_workers: int
    why: str
    let_go: tuple[WorkerName, ...] = ()
    """Workers that are too many, the least useful first."""


class Reshape(CommandStruct, frozen=True, tag=True):
    """Run the planned engines with this tensor parallelism. The old ones leave, the new ones join."""

    tensor_parallel: int
    replicas: int
    why: str


Command = (
    Generate
    | Abort
    | ForgetTokens
    | HandOver
    | PullWeights
    | ReleaseWorker
    | ForgetWorker
    | StartTraining
    | StartGenerating
    | OpenRound
    | AddGroup
    | Score
    | CancelScore
    | DeliverGroup
    | DropGroup
    | CloseRound
    | PlayEpisode
    | AnswerCall
    | StopEpisode
    | ReleaseHost
    | ForgetHost
    | AddAsked
    | CloseAsked
    | EndData
    | ReportStep
    | AdviseFleet
    | Reshape
)
