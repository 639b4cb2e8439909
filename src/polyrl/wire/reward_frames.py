"""The frames between reward workers, the manager and the trainer's dispatcher, in the form of frames.py.

    reward worker -> manager    RewardHello first; then RewardReady, JobDone, JobsReturned, RewardReport, Leaving,
                                Goodbye
    manager -> reward worker    RewardRules, GiveJob, LeaveSoon, Release
    dispatcher    -> manager    DispatcherHello first; then SendJob, Accuse
    manager -> dispatcher       RewardFleet, WorkerAnswered

The manager passes jobs and results on, and keeps none of them: a job belongs to the trainer, which sends it again when
a connection breaks. A job that is said twice is the same job, by its number; a result that is said twice counts once.
Jobs, results and rules are opaque here (rewards/remote/travel.py): the manager bounds their size, the trainer checks
what they say.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from polyrl.wire.frames import Frame, Goodbye, Leaving, Natural, PeerText, Release, make_plain

MAX_JOB_BYTES = 32 << 20
MAX_RESULT_BYTES = 8 << 20
MAX_RULES_BYTES = 4 << 20
MAX_REWARD_WORKER_FRAME_BYTES = MAX_RESULT_BYTES + (64 << 10)
MAX_DISPATCHER_FRAME_BYTES = MAX_JOB_BYTES + (64 << 10)
MAX_PLACES = 256
"""Jobs that a reward worker may have at once; a larger claim counts as this many."""
MAX_RETURNED = 4096
ERA_BITS = 31
"""The bits of an era, and of a job's number within it. A job's number begins with its era."""

JobBody = Annotated[bytes, Meta(max_length=MAX_JOB_BYTES)]
ResultBody = Annotated[bytes, Meta(max_length=MAX_RESULT_BYTES)]
LifeName = Annotated[str, Meta(min_length=1, max_length=64)]
"""One process of a reward worker, also over restarts of the manager. It is made from a secret of that process."""


# Reward worker to manager


class RewardHello(Frame, frozen=True, tag="reward_hello"):
    """The first frame on every connection."""

    draining: PeerText = ""
    """Why it wants to go, if it does."""

    def __post_init__(self) -> None:
        make_plain(self, "draining")


class RewardReady(Frame, frozen=True, tag="reward_ready"):
    """It can score by the rules that it was sent."""

    era: Natural
    places: Annotated[int, Meta(ge=1, le=1 << 20)]


class JobDone(Frame, frozen=True, tag="job_done", forbid_unknown_fields=True):
    job: Natural
    result: ResultBody


class JobsReturned(Frame, frozen=True, tag="jobs_returned", forbid_unknown_fields=True):
    """It leaves, and hands these back unscored."""

    jobs: Annotated[tuple[Natural, ...], Meta(max_length=MAX_RETURNED)]


class RewardReport(Frame, frozen=True, tag="reward_report"):
    """A heartbeat."""

    num_running: Natural
    num_scored: Natural
    num_failed: Natural
    """Answers to which a function gave no reward."""
    cpu_s: Annotated[float, Meta(ge=0, le=1e12)] = 0.0
    """The CPU time of its processes since it was started."""


FromRewardWorker = RewardHello | RewardReady | JobDone | JobsReturned | RewardReport | Leaving | Goodbye


# Manager to reward worker


class RewardRules(Frame, frozen=True, tag="reward_rules"):
    """The settings of rewards in the trainer's recipe. Jobs of another era are dropped."""

    era: Natural
    body: Annotated[bytes, Meta(max_length=MAX_RULES_BYTES)]


class GiveJob(Frame, frozen=True, tag="job"):
    job: Natural
    body: JobBody


class LeaveSoon(Frame, frozen=True, tag="leave_soon"):
    """Asks it to finish its jobs, or hand them back, and leave."""

    why: str


ToRewardWorker = RewardRules | GiveJob | LeaveSoon | Release


# Dispatcher to manager


class DispatcherHello(Frame, frozen=True, tag="dispatcher"):
    """The first frame on every connection."""

    rules: RewardRules
    num_local: Natural
    """Processes of the trainer's own."""


class SendJob(Frame, frozen=True, tag="send_job"):
    """A job for a reward worker. It is dropped where that worker is not connected: RewardFleet says so."""

    worker: str
    life: LifeName
    job: Natural
    body: JobBody


class Accuse(Frame, frozen=True, tag="accuse"):
    """The worker said what cannot be true, or does not answer: it is to be sent away."""

    worker: str
    life: LifeName
    why: PeerText


FromDispatcher = DispatcherHello | SendJob | Accuse


# Manager to dispatcher


class RewardSeat(Struct, frozen=True, array_like=True, gc=False):
    """A reward worker that can score by the present rules."""

    worker: str
    life: str
    places: int
    connection: int
    """Another number than before: it has connected again, and what was sent to it meanwhile is lost. 0: it is away."""
    draining: bool


class RewardFleet(Frame, frozen=True, tag="reward_fleet"):
    """All reward workers, whenever one of them has changed. Jobs of those that are not here are lost."""

    seats: tuple[RewardSeat, ...]


class WorkerAnswered(Frame, frozen=True, tag="worker_answered"):
    """A frame of a reward worker, passed on. The manager vouches for the sender, and for nothing else."""

    worker: str
    life: str
    said: JobDone | JobsReturned


ToDispatcher = RewardFleet | WorkerAnswered | Release

decode_from_reward_worker = msgspec.msgpack.Decoder(FromRewardWorker).decode
decode_to_reward_worker = msgspec.msgpack.Decoder(ToRewardWorker).decode
decode_from_dispatcher = msgspec.msgpack.Decoder(FromDispatcher).decode
decode_to_dispatcher = msgspec.msgpack.Decoder(ToDispatcher).decode
