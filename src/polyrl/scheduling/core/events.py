"""Facts, in the past tense: all that the scheduler ever hears.

The union is closed: a driver that forgets one does not type-check. News about a sample carries its lease, news about a
worker its incarnation; so late news of the dead is a dictionary miss. The journal is made of them: tags stay the same.
"""

from typing import Literal

from msgspec import Struct

from polyrl.ids import GroupId, HostName, Incarnation, LeaseId, SampleId, Seconds, Step, Version, WorkerName
from polyrl.scheduling.core.ledger import DiscardCause, EpisodeOutcome
from polyrl.scheduling.core.parameters import SchedulerConfig

LeaseEnd = Literal["handed_over", "engine_failed", "refused"]
RewardOutcome = Literal["scored", "timed_out", "crashed", "refused", "infrastructure_failed", "no_reward"]
"""`no_reward`: there is none, and another attempt would end the same."""
Duty = Literal["generating", "training"]


class EventStruct(Struct, frozen=True, tag_field="event", gc=False):
    """The base of all events: how they are written down."""


# The fleet


class WorkerJoined(EventStruct, frozen=True, tag=True):
    worker: WorkerName
    incarnation: Incarnation
    slots: int
    spot: bool = False
    local: bool = False
    """It runs on the trainer's own devices and holds every version the moment it is published."""
    num_devices: int = 1
    planned: bool = False
    """The run has started it, and plans how wide its engine is."""
    price_usd_per_hour: float = 0.0
    kv_tokens: int = 0
    """Tokens that fit into its cache; 0 when it does not say."""
    version: Version | None = None
    """The version it holds already, if any."""
    starting_s: Seconds = 0.0
    """How long its machine has been paid for already."""
    relays: bool = True
    """Others may fetch weights from it."""
    region: str = ""
    """Workers of one name are near each other, and far from all others; empty: near the trainer."""


class WorkerReported(EventStruct, frozen=True, tag=True):
    """A heartbeat, with the engine's own figures."""

    worker: WorkerName
    incarnation: Incarnation
    num_waiting: int = 0
    """Samples that the engine itself holds back, because its KV cache is full."""
    num_preemptions: int = 0
    """Since it joined: how often the engine threw a running sample's cache away."""


class FleetReported(EventStruct, frozen=True, tag=True):
    """News of all workers since the last such event, at once (hearing.py): as WorkerReported and
    TokensArrived, in as few bytes as it takes. A driver that holds news back tells it so."""

    seats: tuple[int, ...]
    """Rising; each as the difference to the one before."""
    heard_ago: tuple[int, ...]
    """When each was last heard, in hundredths of a second before now; -1: not since that was told."""
    progress: tuple[tuple[int, ...], ...] = ()
    """Which of the seats; its first lease with new tokens; then, run by run, how many lease numbers further and how
    many tokens more than was told each of its leases up to there has."""
    engines: tuple[tuple[int, int, int], ...] = ()
    """Which of the seats; `num_waiting` and `num_preemptions` as in WorkerReported."""


class WorkerLeft(EventStruct, frozen=True, tag=True):
    """The driver knows that it is gone: it said goodbye, or its process was seen to die."""

    worker: WorkerName
    incarnation: Incarnation
    reason: str


class DrainRequested(EventStruct, frozen=True, tag=True):
    """A spot notice, a signal, or a person asked: hand over and go."""

    worker: WorkerName
    incarnation: Incarnation
    reason: str
    notice_s: Seconds = 0.0
    """How long its machine stays; 0: it hands over now."""


class SupplyOffered(EventStruct, frozen=True, tag=True):
    """A provider of workers says how many could be had in all, and what another one costs."""

    num_workers: int
    usd_per_hour: float
    workers: tuple[WorkerName, ...] = ()
    """Workers that cost so much, too, from now on."""


class WeightsInstalled(EventStruct, frozen=True, tag=True):
    worker: WorkerName
    incarnation: Incarnation
    version: Version


class WeightsFailed(EventStruct, frozen=True, tag=True, omit_defaults=True):
    worker: WorkerName
    incarnation: Incarnation
    version: Version
    reason: str
    untried: bool = False
    """It was sent nowhere: its source has no address that it can reach."""


class EngineDown(EventStruct, frozen=True, tag=True):
    """The engine of a worker died, and is being started again. Its leases end by themselves."""

    worker: WorkerName
    incarnation: Incarnation
    reason: str


class EngineBack(EventStruct, frozen=True, tag=True):
    worker: WorkerName
    incarnation: Incarnation
    version: Version | None
    """The version that it runs now, which may be older than before; None: no version."""


class DutyChanged(EventStruct, frozen=True, tag=True):
    """A local worker's devices now do the other thing."""

    worker: WorkerName
    incarnation: Incarnation
    duty: Duty


# Samples and episodes, and those who play and score them


class TokensArrived(EventStruct, frozen=True, tag=True):
    """Progress of one worker: columns of leases and of their samples' token counts, absolute. Every few seconds are
    enough: balance and stalls are judged by it. The end of each lease is exact, also where a driver held some back."""

    worker: WorkerName
    incarnation: Incarnation
    leases: tuple[LeaseId, ...]
    num_tokens: tuple[int, ...]


class SampleFinished(EventStruct, frozen=True, tag=True):
    lease: LeaseId
    num_tokens: int
    """All tokens of the sample, also those of earlier leases."""


class LeaseEnded(EventStruct, frozen=True, tag=True):
    """A lease ended without an end of the answer."""

    lease: LeaseId
    num_tokens: int
    reason: LeaseEnd


class TokensDiscarded(EventStruct, frozen=True, tag=True):
    """A sample that was discarded while it ran had this many more tokens than were reported."""

    cause: DiscardCause
    num_tokens: int


class RewardFinished(EventStruct, frozen=True, tag=True):
    sample: SampleId
    attempt: int
    outcome: RewardOutcome
    correct: bool = False
    cpu_s: Seconds = 0.0


class HostJoined(EventStruct, frozen=True, tag=True):
    """A host joined: a process that plays an environment's episodes."""

    host: HostName
    incarnation: Incarnation
    environment: str
    slots: int
    """Episodes that it plays at once."""
    price_usd_per_hour: float = 0.0


class RewardWorkerJoined(EventStruct, frozen=True, tag=True):
    """A process that scores answers is there. Only the ledger knows of it."""

    worker: str
    life: str
    price_usd_per_hour: float = 0.0


class RewardWorkerReported(EventStruct, frozen=True, tag=True):
    """The work that it has done in this life."""

    worker: str
    life: str
    num_jobs: int
    cpu_s: float


class RewardWorkerLeft(EventStruct, frozen=True, tag=True):
    worker: str
    life: str
    reason: str
    is_lost: bool = False
    """It did not take its leave."""


class HostLeft(EventStruct, frozen=True, tag=True):
    """The driver knows that it is gone, or takes it for gone: its episodes begin again elsewhere."""

    host: HostName
    incarnation: Incarnation
    reason: str


class HostDrainRequested(EventStruct, frozen=True, tag=True):
    """It is to play its episodes to their end, get no others, and go."""

    host: HostName
    incarnation: Incarnation
    reason: str


class CallMade(EventStruct, frozen=True, tag=True):
    """An environment asks the policy. The driver holds no complete answer to it."""

    sample: SampleId
    attempt: int
    start: int
    """Drawn tokens of the episode before it; those beyond are thrown away, unless this very answer begins with them."""
    num_tokens: int
    """The episode's drawn tokens, with the part of this answer that is there already."""
    end: int
    """The call ends at this many tokens of the episode."""


class CallRepeated(EventStruct, frozen=True, tag=True):
    """An environment that was begun again asked what it had asked before; the driver held the answer, and gave it."""

    sample: SampleId
    attempt: int


class EpisodeEnded(EventStruct, frozen=True, tag=True):
    """An environment is done with an episode: it has a reward, or failed."""

    sample: SampleId
    attempt: int
    outcome: EpisodeOutcome
    num_tokens: int
    """Drawn tokens that the environment received. Those of a call that it no longer waited for are thrown away."""


# Asked beside the trainer


class GroupAsked(EventStruct, frozen=True, tag=True):
    """A client asks for a number of answers to a prompt. No step trains on them."""

    num_samples: int


class SampleStopped(EventStruct, frozen=True, tag=True):
    """The asker has enough of this answer: it ends here, and counts."""

    sample: SampleId
    num_tokens: int


class GroupWithdrawn(EventStruct, frozen=True, tag=True):
    """The asker no longer waits for this asked group."""

    group: GroupId
    reason: str


# The trainer


class VersionPublished(EventStruct, frozen=True, tag=True):
    version: Version


class VersionReplaced(EventStruct, frozen=True, tag=True):
    """A trainer that was started again made the version anew, and it is not what it was to the last bit."""

    version: Version


class RoundRequested(EventStruct, frozen=True, tag=True):
    step: Step


class GroupsTaken(EventStruct, frozen=True, tag=True):
    """The trainer starts a micro-batch of these groups: from now on they count as trained with the step."""

    step: Step
    groups: tuple[GroupId, ...]
    worker: WorkerName = WorkerName("")
    """The local worker whose devices train it; empty: all that the trainer has."""


class GroupRejected(EventStruct, frozen=True, tag=True):
    """The trainer will not train on this group (for example: all rewards equal)."""

    group: GroupId
    reason: str
    blamed: tuple[WorkerName, ...] = ()
    """Workers whose tokens it is rejected for."""


class GroupUnscored(EventStruct, frozen=True, tag=True):
    """Functions of whole groups have no reward for these samples: they leave the group, or end it if all do."""

    group: GroupId
    samples: tuple[SampleId, ...]
    reason: str


class MicroBatchTrained(EventStruct, frozen=True, tag=True):
    step: Step
    worker: WorkerName = WorkerName("")
    """The local worker whose devices trained it; empty: all that the trainer has."""


class StepRestarted(EventStruct, frozen=True, tag=True):
    """The trainer has lost what it made of the step, and begins it anew: what it took, it must get again."""

    step: Step


class StepTrained(EventStruct, frozen=True, tag=True, omit_defaults=True):
    step: Step
    left_out: tuple[WorkerName, ...] = ()
    """Workers of which samples were left out, since they had made them up."""


class ValidationBegan(EventStruct, frozen=True, tag=True):
    """Between two steps: its devices answer prompts that are not trained on."""


class ValidationEnded(EventStruct, frozen=True, tag=True):
    pass


# The driver, and time


class PlacingPaused(EventStruct, frozen=True, tag=True):
    """A person wants no more leases given; running ones go on."""


class PlacingResumed(EventStruct, frozen=True, tag=True):
    pass


class TrainerLeft(EventStruct, frozen=True, tag=True):
    """The trainer is away: until it is back, nothing is scored and no prompt is given. No worker is blamed for it."""

    away_s: Seconds = 0.0
    """How long ago it was last heard of, by a driver that was away itself."""


class TrainerReturned(EventStruct, frozen=True, tag=True):
    pass


class TrainerReplaced(EventStruct, frozen=True, tag=True):
    """Another process goes on in its place: it was gone, not only out of reach."""


class RulesChanged(EventStruct, frozen=True, tag=True):
    """A run goes on with other rules: those parts of this configuration that an open run may change, and no others."""

    config: SchedulerConfig


class DriverResumed(EventStruct, frozen=True, tag=True):
    """The driver was away and is back with its journal: what was due meanwhile could not be heard."""

    away_s: Seconds
    grace_s: Seconds
    """How much longer than usual workers may take to be heard of."""


class TimePassed(EventStruct, frozen=True, tag=True):
    """Nothing happened, but `wakeup_at` has come."""


Event = (
    TokensArrived
    | SampleFinished
    | TokensDiscarded
    | RewardFinished
    | WorkerReported
    | FleetReported
    | LeaseEnded
    | TimePassed
    | GroupsTaken
    | MicroBatchTrained
    | WeightsInstalled
    | WeightsFailed
    | EngineDown
    | EngineBack
    | DutyChanged
    | WorkerJoined
    | WorkerLeft
    | DrainRequested
    | SupplyOffered
    | GroupRejected
    | GroupUnscored
    | StepRestarted
    | StepTrained
    | ValidationBegan
    | ValidationEnded
    | VersionPublished
    | VersionReplaced
    | RoundRequested
    | CallMade
    | CallRepeated
    | EpisodeEnded
    | HostJoined
    | HostLeft
    | HostDrainRequested
    | RewardWorkerJoined
    | RewardWorkerReported
    | RewardWorkerLeft
    | GroupAsked
    | SampleStopped
    | GroupWithdrawn
    | PlacingPaused
    | PlacingResumed
    | DriverResumed
    | TrainerLeft
    | TrainerReturned
    | TrainerReplaced
    | RulesChanged
)
