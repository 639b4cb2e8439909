"""Everything that travels over a WebSocket: closed unions of frames, msgpack arrays with a tag.

    worker  -> manager    Hello first; then NewTokens, Report, Installed, InstallFailed, Down, Back, OnDuty, Leaving,
                          Goodbye
    manager -> worker     Welcome first; then Orders, Stop, Ack, PullOrder, ChangeDuty, Release
    trainer -> manager    TrainerHello first; then statements, each numbered: RequestRound, SupplyPrompts, Scored, ...
    manager -> trainer    Opened, ScoreThese, Delivered, Closed, ... ; Ack

Rules: a connection may break at any moment and is dialled again. Nothing is resent by number; each side says at the
start what it holds, and the other sends what is missing (a worker's leases by token offset, a trainer's open round).
So every frame must be safe to receive twice. Payload is packed columns (columns.py), never lists of tokens.

Everything here is decoded by type; an unknown tag or a wrong field is a DecodeError and closes the connection.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from polyrl.errors import plain, shorten
from polyrl.scheduling.core.commands import PlannedGroup
from polyrl.scheduling.core.events import Duty, RewardOutcome
from polyrl.scheduling.core.ledger import StepLine
from polyrl.wire.imposed import ImposedLengths

PROTOCOL = 4
MAX_WORKER_FRAME_BYTES = 16 << 20
MAX_TRAINER_FRAME_BYTES = 256 << 20
MAX_REPLACED = 64
MAX_ENDED = 65_536
"""Ends of answers in one frame: more than any engine runs at once."""

EndReason = Literal["stop", "length", "handed_over", "engine_failed", "refused"]
"""`stop` and `length` end the answer; the others end the lease alone."""

Natural = Annotated[int, Meta(ge=0, le=1 << 62)]
VersionNumber = Annotated[int, Meta(ge=0, lt=1 << 31)]
HeldVersion = Annotated[int, Meta(ge=-1, lt=1 << 31)]
"""Four bytes in a column of versions."""
PeerText = Annotated[str, Meta(max_length=2000)]
"""A peer's words. They go into journals and logs, and onto terminals: each frame has its own made plain and short, as
it is decoded."""
Digest = Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?$(?!\n)")]
Parts = Annotated[dict[Annotated[str, Meta(max_length=130)], float], Meta(max_length=1024)]
"""The parts of a reward, by name."""
MAX_NOTICE_S = 86_400.0
NoticeSeconds = Annotated[float, Meta(ge=0, le=MAX_NOTICE_S)]
"""How long a machine stays that was given notice; 0: it hands over now."""
Addresses = Annotated[tuple[Annotated[str, Meta(max_length=256)], ...], Meta(max_length=64)]


class Frame(Struct, frozen=True, array_like=True, gc=False):
    """The base of all frames: how they are written down."""


def make_plain(said: Struct, *fields: str) -> None:
    for field in fields:
        text = getattr(said, field)
        if (short := shorten(plain(text))) != text:
            force_setattr(said, field, short)


# Sampling


class Sampling(Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """How tokens are drawn. An engine declares which of it it can do (engines/engine.py), and refuses the rest."""

    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    """0: all."""
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    stop_ids: tuple[Annotated[int, Meta(ge=0, lt=1 << 31)], ...] = ()
    """Beside the model's own end of text."""
    stop: tuple[Annotated[str, Meta(min_length=1)], ...] = ()
    ignore_eos: bool = False
    imposed: ImposedLengths | None = None
    """Lengths that the worker imposes on answers, regardless of the model."""

    @property
    def truncates(self) -> bool:
        """Some tokens cannot be drawn."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


# Worker to manager


class Hello(Frame, frozen=True, tag="hello"):
    """The state of a worker that connects, first or again."""

    version: HeldVersion
    """The version that its engine runs; -1: none yet."""
    leases: bytes
    """The leases that it holds: running, or ended and not acknowledged."""
    draining: PeerText = ""
    """Why it wants to go, if it does."""
    digest: Digest = ""
    """The digest of the version that it runs; empty if that was not fetched."""
    weight_addresses: Addresses = ()
    """Where others may fetch weights from it."""
    down: PeerText = ""
    """Why its engine is down, if it is."""
    notice_s: NoticeSeconds = 0.0
    """With `draining`: how long its machine stays."""

    def __post_init__(self) -> None:
        make_plain(self, "draining", "down")


class Ended(Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    lease: Natural
    num_tokens: Natural
    """All tokens of the sample."""
    reason: EndReason
    detail: PeerText = ""

    def __post_init__(self) -> None:
        if self.detail:
            make_plain(self, "detail")


class NewTokens(Frame, frozen=True, tag="tokens", forbid_unknown_fields=True):
    """New tokens of running samples, and which of them ended. Acknowledged by `seq` when it is journalled.

    It goes into the journal unchanged, so it may hold nothing that is never read.
    """

    seq: Natural
    leases: bytes
    offsets: bytes
    counts: bytes
    versions: bytes
    cells: bytes
    ended: Annotated[tuple[Ended, ...], Meta(max_length=MAX_ENDED)] = ()


class Report(Frame, frozen=True, tag="report"):
    """A heartbeat."""

    num_running: Natural
    num_waiting: Natural
    kv_used: Annotated[float, Meta(ge=0, le=1)]
    num_preemptions: Natural
    tokens_per_s: Annotated[float, Meta(ge=0, le=1e12)]
    num_rounds: Natural = 0
    """Steps of the engine that verified drafts, since it started."""
    num_drafted: Natural = 0
    num_accepted: Natural = 0
    """Tokens of drafts that were verified, and those of them that stood."""


class Installed(Frame, frozen=True, tag="installed"):
    version: VersionNumber
    digest: Digest = ""


class InstallFailed(Frame, frozen=True, tag="install_failed"):
    version: VersionNumber
    reason: PeerText

    def __post_init__(self) -> None:
        make_plain(self, "reason")


class Down(Frame, frozen=True, tag="down"):
    """The worker's engine died, and is being started again. Its leases end by themselves."""

    reason: PeerText

    def __post_init__(self) -> None:
        make_plain(self, "reason")


class Back(Frame, frozen=True, tag="back"):
    """The worker's engine is back, and runs the version that it ran at its start."""

    version: HeldVersion
    """-1 is nothing."""


class Leaving(Frame, frozen=True, tag="leaving"):
    """The worker wants to hand everything over and leave."""

    reason: PeerText
    notice_s: NoticeSeconds = 0.0

    def __post_init__(self) -> None:
        make_plain(self, "reason")


class Goodbye(Frame, frozen=True, tag="goodbye"):
    reason: PeerText
    is_misfit: bool = False
    """It can never serve this run, and says why."""

    def __post_init__(self) -> None:
        make_plain(self, "reason")


class OnDuty(Frame, frozen=True, tag="on_duty"):
    """A local worker's devices do this now."""

    duty: Duty


FromWorker = Hello | NewTokens | Report | Installed | InstallFailed | Down | Back | OnDuty | Leaving | Goodbye


# Manager to worker


class HeldLease(Struct, frozen=True, array_like=True, gc=False):
    lease: int
    num_tokens: int
    """The tokens that the manager has of the sample: the worker sends what follows."""


class Welcome(Frame, frozen=True, tag="welcome"):
    """The leases of this worker that the manager knows. Leases that are not here are over."""

    held: tuple[HeldLease, ...]


class Order(Struct, frozen=True, array_like=True, gc=False):
    """A lease: generate this sample from here."""

    lease: int
    sample: int
    prompt: bytes
    """Packed token ids."""
    so_far: bytes
    """Packed ids of the tokens that are there already."""
    max_tokens: int
    """It ends at this many tokens, with those of `so_far`."""
    seed: int
    sampling: Sampling
    num_before: int = 0
    """Drawn tokens of the sample that are part of the prompt, as an episode's earlier answers are. Offsets count them,
    `max_tokens` does not."""
    goes_on: bool = True
    """Whether a later prompt may begin with its answer, as those of episodes and of clients' conversations do."""


class Orders(Frame, frozen=True, tag="generate"):
    orders: tuple[Order, ...]


class Stop(Frame, frozen=True, tag="stop"):
    aborts: tuple[int, ...] = ()
    """Forget them."""
    hand_overs: tuple[int, ...] = ()
    """Stop at the current token and send all of them."""


class Ack(Frame, frozen=True, tag="ack"):
    """Everything up to this number is safe: it need not be held any longer."""

    seq: int


class PullOrder(Frame, frozen=True, tag="pull"):
    version: int
    source: str
    """The name of a peer; empty for the trainer."""
    held: int
    """The version that the worker holds now; -1: none."""
    digest: str = ""
    """The digest that it must have; empty where versions are only numbers."""
    addresses: tuple[str, ...] = ()
    """Where it can be fetched."""


class ChangeDuty(Frame, frozen=True, tag="change_duty"):
    """Tell a local worker what its devices are to do. Answered by OnDuty, even if they do so already."""

    duty: Duty
    why: str


class Release(Frame, frozen=True, tag="release"):
    """The worker may go: nothing more is wanted from it. `rejoin`: it was given up, and may join anew."""

    why: str
    rejoin: bool = False
    in_anger: bool = False
    """It was refused, or its name was taken: something is wrong with it."""


ToWorker = Welcome | Orders | Stop | Ack | PullOrder | ChangeDuty | Release


# Trainer to manager


class TrainerHello(Frame, frozen=True, tag="trainer"):
    """The first frame on every connection. The run's settings came when it was opened (control.RunRequest)."""


class PromptPayload(Struct, frozen=True, array_like=True, gc=False):
    group: Natural
    tokens: bytes
    """Empty for a group of episodes: environments make their prompts."""
    sampling: Sampling
    task: bytes = b""
    """For a group of episodes: a row of the data, as JSON; empty where the environment brings its own tasks."""


class RequestRound(Frame, frozen=True, tag="request_round"):
    seq: Natural
    step: Natural


class SupplyPrompts(Frame, frozen=True, tag="supply_prompts"):
    seq: Natural
    prompts: tuple[PromptPayload, ...]


class Scored(Frame, frozen=True, tag="scored"):
    seq: Natural
    sample: Natural
    attempt: Natural
    outcome: RewardOutcome
    value: float
    correct: bool
    cpu_s: float
    parts: Parts = {}

    def __post_init__(self) -> None:
        if self.parts:
            force_setattr(self, "parts", {shorten(plain(name)): value for name, value in self.parts.items()})


class Took(Frame, frozen=True, tag="took"):
    seq: Natural
    step: Natural
    groups: tuple[Natural, ...]
    worker: PeerText = ""
    """The local worker whose devices train them; empty: all of the trainer's."""

    def __post_init__(self) -> None:
        make_plain(self, "worker")


class Rejected(Frame, frozen=True, tag="rejected"):
    seq: Natural
    group: Natural
    reason: PeerText
    workers: Annotated[tuple[PeerText, ...], Meta(max_length=MAX_REPLACED)] = ()
    """The workers whose tokens it is rejected for. A worker that is named again and again is given up."""

    def __post_init__(self) -> None:
        make_plain(self, "reason")
        force_setattr(self, "workers", tuple(shorten(plain(name)) for name in self.workers))


class Unscored(Frame, frozen=True, tag="unscored"):
    """Functions of whole groups have no reward for these samples: they leave their group, or with it the run."""

    seq: Natural
    group: Natural
    samples: tuple[Natural, ...]
    reason: PeerText

    def __post_init__(self) -> None:
        make_plain(self, "reason")


class MicroBatchDone(Frame, frozen=True, tag="micro_batch_done"):
    seq: Natural
    step: Natural
    worker: PeerText = ""
    """The local worker whose devices had it; empty: all of the trainer's."""

    def __post_init__(self) -> None:
        make_plain(self, "worker")


class RestartStep(Frame, frozen=True, tag="restart_step"):
    """The trainer lost its work on the step: groups that were taken are to be delivered again."""

    seq: Natural
    step: Natural


class StepDone(Frame, frozen=True, tag="step_done"):
    seq: Natural
    step: Natural
    left_out: Annotated[tuple[PeerText, ...], Meta(max_length=MAX_REPLACED)] = ()
    """Workers of which samples were left out, since they had made them up."""

    def __post_init__(self) -> None:
        force_setattr(self, "left_out", tuple(shorten(plain(name)) for name in self.left_out))


class Validating(Frame, frozen=True, tag="validating"):
    """The trainer begins or ends validation: that time is no part of a step, nor a wait for samples."""

    seq: Natural
    begins: bool


class RewardsTold(Frame, frozen=True, tag="rewards"):
    """The state of the reward functions, told now and then while some run: status and doctor show it."""

    seq: Natural
    running: Natural
    """Functions that run, which is less than the answers that were given out to be scored."""
    timeout_s: Annotated[float, Meta(ge=0, le=1e9)]
    longest_s: Annotated[float, Meta(ge=0, le=1e9)]
    """How long the one that has run longest has; `function` is its name."""
    function: PeerText
    failed: Natural
    """Answers without a reward so far."""
    why: PeerText
    """The reason of the last answer without a reward."""

    def __post_init__(self) -> None:
        make_plain(self, "function", "why")


class Offered(Frame, frozen=True, tag="offered"):
    """The offer of the trainer's provider of workers: how many could be had in all, and the price of another one."""

    seq: Natural
    num_workers: Natural
    usd_per_hour: Annotated[float, Meta(ge=0, le=1e6)]
    workers: Annotated[tuple[PeerText, ...], Meta(max_length=100_000)] = ()
    """Workers that cost so much, too, from now on."""

    def __post_init__(self) -> None:
        if not all(name.isprintable() for name in self.workers):
            force_setattr(self, "workers", tuple(shorten(plain(name)) for name in self.workers))


class Published(Frame, frozen=True, tag="published"):
    seq: Natural
    version: VersionNumber
    digest: Digest = ""
    addresses: Addresses = ()
    replaces: Annotated[tuple[Digest, ...], Meta(max_length=MAX_REPLACED)] = ()
    """Digests under which the same trainer has published this version before. This one replaces them."""


Statement = (
    RequestRound
    | SupplyPrompts
    | Scored
    | Took
    | Rejected
    | Unscored
    | MicroBatchDone
    | RestartStep
    | StepDone
    | Validating
    | RewardsTold
    | Offered
    | Published
)
FromTrainer = TrainerHello | Statement


# Manager to trainer


class Opened(Frame, frozen=True, tag="opened"):
    """A round has begun, or is still open: these groups want their prompts."""

    step: int
    kind: str
    groups: tuple[PlannedGroup, ...]
    why: str


class Segment(Struct, frozen=True, array_like=True, gc=False):
    """The version and the worker that wrote the tokens from `from_token` on."""

    from_token: int
    version: int
    worker: str
    digest: str = ""
    """The digest of the version; empty where versions are only numbers."""
    engine: str = ""
    """The kind of engine that the worker says it has."""


class CallPayload(Struct, frozen=True, array_like=True, gc=False):
    """A call of an episode. Its prompt is the first `kept` tokens of what call `base` was given and answered with, and
    then `tokens`; its answer is the sample's tokens from `start` to `end`."""

    base: int
    kept: int
    tokens: bytes
    start: int
    end: int
    finish: str
    is_trained: bool = True


class EnvironmentReward(Struct, frozen=True, array_like=True, gc=False):
    """The reward that an episode's environment gave it, whatever the trainer's functions make of it."""

    value: float
    parts: dict[str, float] = {}


class SamplePayload(Struct, frozen=True, array_like=True, gc=False):
    """An answer, or an episode, with all that is known of it."""

    sample: int
    cells: bytes
    segments: tuple[Segment, ...]
    finish: str
    reward: float
    parts: dict[str, float] = {}
    """The parts of the reward, by name."""
    is_kept: bool = False
    """Cells, segments and finish are left out: the trainer has them from ScoreThese on the same connection."""
    calls: tuple[CallPayload, ...] = ()
    """An episode's; empty for a single answer."""
    own: EnvironmentReward | None = None
    """An episode's; None for a single answer. `reward` and `parts` are the same until the trainer has scored it."""


class Origin(Struct, frozen=True, array_like=True, gc=False):
    """Which prompt of the data a group answers."""

    domain: int
    prompt: int
    epoch: int


class ScoreThis(Struct, frozen=True, array_like=True, gc=False):
    attempt: int
    timeout_s: float
    step: int
    """The answer is kept until it is delivered, this step is done, or the connection breaks."""
    answer: SamplePayload
    origin: Origin


class ScoreThese(Frame, frozen=True, tag="score"):
    samples: tuple[ScoreThis, ...]


class CancelScoring(Frame, frozen=True, tag="cancel_scoring"):
    sample: int
    attempt: int


class Delivered(Frame, frozen=True, tag="delivered"):
    """A complete group, or a part of it. After a break it is delivered from its beginning."""

    step: int
    group: int
    origin: Origin
    samples: tuple[SamplePayload, ...]
    more: bool = False
    """The next frame about this group has the rest, or more of it."""


class Dropped(Frame, frozen=True, tag="dropped"):
    group: int
    why: str


class Closed(Frame, frozen=True, tag="closed"):
    """All of a round is delivered. A rejection voids it; then it is sent again."""

    step: int
    delivered: tuple[int, ...]
    taken: tuple[int, ...]
    """Groups that a trainer has taken, this one or one before it: they are not delivered again."""


class DataEnded(Frame, frozen=True, tag="data_ended"):
    step: int


class StepReported(Frame, frozen=True, tag="step"):
    line: StepLine


class WidthPlanned(Frame, frozen=True, tag="width"):
    """The trainer is to run the engines that it started with this tensor parallelism. Said again after every break."""

    tensor_parallel: int
    num_engines: int
    why: str


class FleetAdvised(Frame, frozen=True, tag="advice"):
    num_workers: int
    why: str
    let_go: tuple[str, ...] = ()
    """Workers that are too many, the least useful first."""


ToTrainer = (
    Opened
    | ScoreThese
    | CancelScoring
    | Delivered
    | Dropped
    | Closed
    | DataEnded
    | StepReported
    | FleetAdvised
    | WidthPlanned
    | Ack
    | Release
)

DecodeError = msgspec.DecodeError
"""Raised for bytes that are no frame; its subclass ValidationError is raised for a frame with a wrong field."""
"""All that decoding can raise: what a peer nests deeper than Python counts is no DecodeError."""

encode = msgspec.msgpack.Encoder().encode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_trainer = msgspec.msgpack.Decoder(FromTrainer).decode
decode_to_trainer = msgspec.msgpack.Decoder(ToTrainer).decode
