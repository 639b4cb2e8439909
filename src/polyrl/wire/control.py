"""The messages over HTTP, as JSON: joining, opening a run, status. manager/routes.py has the routes."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from polyrl.scheduling.core.bounds import Region
from polyrl.scheduling.core.parameters import SchedulerConfig
from polyrl.wire.frames import NoticeSeconds

WORKER_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$(?!\n)"
"""Python's `$` also matches before a last newline, which the lookahead forbids; elsewhere it changes nothing."""
PRINTABLE = r"^[^\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]*$(?!\n)"
"""No control characters, and none that turn the direction of what follows or are not seen."""
SESSION_HEADER = "X-PolyRL-Session"
READ_HEADER = "X-PolyRL-Read"
"""The share of its run that a manager which starts again has read: it answers nothing else before it has all."""
DEFAULT_PORT = 5000


MAX_SLOTS = 65_536
"""More than any engine runs at once. Older managers let a worker claim more, and their journals know of it."""
EMULATED = "emulated"
"""The engine without a model: it makes up its tokens."""


class JoinRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker that wants to join the fleet."""

    name: Annotated[str, Meta(pattern=WORKER_NAME)]
    protocol: Annotated[int, Meta(ge=0)]
    engine: Annotated[str, Meta(max_length=64, pattern=PRINTABLE)]
    model: Annotated[str, Meta(max_length=256, pattern=PRINTABLE)] = ""
    slots: Annotated[int, Meta(ge=1, le=1_000_000)]
    spot: bool = False
    num_devices: Annotated[int, Meta(ge=1, le=4096)] = 1
    planned: bool = False
    """The run has started it, and plans how wide its engine is."""
    price_usd_per_hour: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    kv_tokens: Annotated[int, Meta(ge=0, le=1 << 50)] = 0
    version: Annotated[int, Meta(ge=0, le=1 << 50)] | None = None
    starting_s: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    local: bool = False
    """It shares the trainer's devices and weights. Only a worker with the admin token may say so."""
    relays: bool = False
    """Others may fetch weights from it."""
    region: Region = ""
    """Workers of one name are near each other, and far from all others; empty: near the trainer."""


class JoinReply(Struct, frozen=True, kw_only=True):
    worker: str
    session: str
    """The session that it dials its connection with, now and after every break."""
    heartbeat_interval_s: float
    flush_interval_s: float
    flush_phase_s: float
    """Send when the wall clock is at a multiple of the interval and this much more: in company, frames cost less."""
    weights_key: str = ""
    """Hexadecimal: with it, those of one run know each other where weights are fetched."""


class HostJoinRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A host that wants to play an environment's episodes."""

    name: Annotated[str, Meta(pattern=WORKER_NAME)]
    protocol: Annotated[int, Meta(ge=0)]
    environment: Annotated[str, Meta(min_length=1, max_length=256, pattern=PRINTABLE)]
    slots: Annotated[int, Meta(ge=1, le=MAX_SLOTS)]
    """Episodes that it plays at once."""
    price_usd_per_hour: Annotated[float, Meta(ge=0, le=1e6)] = 0.0


class HostJoinReply(Struct, frozen=True, kw_only=True):
    host: str
    session: str
    """The session that it dials its connection with, now and after every break."""
    heartbeat_interval_s: float


class RewardJoinRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A reward worker that wants to score answers."""

    name: Annotated[str, Meta(pattern=WORKER_NAME)]
    protocol: Annotated[int, Meta(ge=0)]
    secret: Annotated[str, Meta(pattern=r"^[0-9a-f]{32,64}$(?!\n)")]
    """Made by the process, and kept secret: by it the same process is known after a restart of the manager."""
    places: Annotated[int, Meta(ge=1, le=1 << 20)]
    """Answers that it scores at once."""
    price_usd_per_hour: Annotated[float, Meta(ge=0, le=1e6)] = 0.0


class RewardJoinReply(Struct, frozen=True, kw_only=True):
    session: str
    """The session that it dials its connection with, now and after every break."""
    heartbeat_interval_s: float


class NameReply(Struct, frozen=True, kw_only=True):
    """Whether a worker that is about to start will be let in under a name."""

    refusal: str = ""
    """Why not: another worker is connected under the name, and does not leave. Empty: the name is free."""
    missed_in_s: float = 0.0
    """The time in which that worker is given up, if it has died without a goodbye."""


TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]


class AnswerRules(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rules that answers of the run's model keep. A worker whose tokens break them is refused."""

    vocab: Annotated[int, Meta(ge=1, le=1 << 31)]
    """Token ids are below it."""
    end_ids: tuple[TokenId, ...]
    """The model's own ends of text. An answer that stops does so with one of them, or with a stop id of its prompt."""
    max_context: Annotated[int, Meta(ge=1, le=1 << 40)]
    """Prompt and answer together: an answer is cut off there, or at `max_new_tokens`."""


class RunRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A trainer that opens a run, or comes back to it."""

    protocol: Annotated[int, Meta(ge=0)]
    config: SchedulerConfig
    has_reward: bool = False
    """It scores samples; otherwise each counts as scored, with reward 0, when it is generated."""
    has_weights: bool = False
    """Versions come with weights: no worker may write before it has fetched them."""
    caveat: Annotated[str, Meta(max_length=200, pattern=PRINTABLE)] = ""
    """A warning that every output on the run repeats: its numbers should not be read without it."""
    trains: bool = False
    """A model is trained on the answers: a worker whose engine has no model is refused."""
    answers: AnswerRules | None = None
    """None: answers are of no model that the trainer knows, and any token id may come."""


class RunReply(Struct, frozen=True, kw_only=True):
    session: str
    fresh: bool
    """Whether the run was opened by this request; otherwise it was there already, and goes on."""
    published: int
    """The newest version; -1 is none."""
    last_requested: int
    """The newest step whose round was requested; -1 is none."""
    open_steps: tuple[int, ...]
    weights_key: str = ""


class DrainRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    reason: Annotated[str, Meta(min_length=1, max_length=200, pattern=PRINTABLE)] = "asked to drain"
    notice_s: NoticeSeconds = 0.0


class WorkerStatus(Struct, frozen=True, kw_only=True):
    name: str
    state: str
    """waiting (for weights), pulling, active, draining; `down` while its engine is; `joined` while there is no run."""
    connected: bool
    engine: str
    model: str
    version: int
    running: int
    slots: int
    engine_waiting: int
    kv_used: float
    tokens_per_s: float
    price_usd_per_hour: float
    spot: bool
    last_heard_s: float
    """Seconds since anything came from it."""
    usd: float
    duty: str = "generating"
    """Devices that also train pass through stopping, to_training, training and to_generating."""
    pulling: int = -1
    """The version that it pulls; -1: none."""
    source: str = ""
    """The worker that it pulls from; empty: the trainer."""
    draft_rounds: int = 0
    """Steps of its engine that verified drafts, since that started."""
    tokens_drafted: int = 0
    tokens_accepted: int = 0
    """Drafted tokens that stood: each saved its sample a step."""
    tokens_running: int = 0
    """The number of tokens so far of the samples that it runs."""
    newest_lease: int = -1
    """Of the samples that it runs. It tells short answers that follow each other from a worker that stands still."""
    local: bool = False
    """Whether it is the trainer's own, which is not drained."""


class HostStatus(Struct, frozen=True, kw_only=True):
    name: str
    environment: str
    connected: bool
    draining: bool
    playing: int
    """Episodes that it plays."""
    slots: int
    price_usd_per_hour: float
    last_heard_s: float
    usd: float


class EnvironmentStatus(Struct, frozen=True, kw_only=True):
    """An environment as a resource: how many episodes its hosts can play, and how long its turns take."""

    name: str
    places: int
    """Episodes that its hosts are trusted with at this moment; a new host earns more with every call."""
    playing: int
    waiting: int
    """Episodes that wait for a place."""
    turn_p50_s: float | None
    """The median time of its turns; None: none has ended."""
    turn_p99_s: float | None
    turn_limit_s: float
    """A turn is given up after that. Tasks with slower turns have longer, and so has a new host."""
    episode_limit_s: float
    """An episode whose turns took that long together gets no further one. Tasks with slower episodes have longer."""


class RewardWorkerStatus(Struct, frozen=True, kw_only=True):
    name: str
    state: str
    """joined (the trainer's settings are not there, or being checked), ready, draining."""
    connected: bool
    places: int
    running: int
    """Answers that it scores, as it says; so are the next two."""
    scored: int
    failed: int
    """Answers to which a function gave no reward."""
    last_heard_s: float


class RoundStatus(Struct, frozen=True, kw_only=True):
    step: int
    kind: str
    age_s: float
    groups: int
    samples_waiting: int
    samples_running: int
    samples_generated: int
    groups_generated: int
    """Groups that have enough answers."""
    groups_delivered: int
    closed: bool
    longest_tokens: int = 0
    """The length of the longest running sample."""
    longest_on: str = ""
    """The worker that runs it."""
    episodes_unhosted: int = 0
    """Episodes that wait for a host."""
    episodes_playing: int = 0
    """Episodes whose environment has the move."""


class WaitStatus(Struct, frozen=True, kw_only=True):
    what: str
    """Which wait it is: a name of deadlines.WaitName, or `trainer`, `weights`, `workers`, `hosts`, `reward workers`,
    `prompts`, `a resume`."""
    of: str
    age_s: float | None
    given_up_in_s: float | None
    """None: it is waited for as long as it takes."""


class TurnedAway(Struct, frozen=True, kw_only=True):
    """A worker that left for good, or was sent away: it cannot serve this run."""

    name: str
    why: str
    ago_s: float


class RewardsStatus(Struct, frozen=True, kw_only=True):
    """The state of the trainer's reward functions, as it reported last."""

    running: int
    """Functions that run at this moment; `queues` counts the answers."""
    timeout_s: float
    longest_s: float
    """How long the one that has run longest has."""
    function: str
    """Its name."""
    failed: int
    """Answers without a reward since the trainer started."""
    why: str
    """The reason of the last answer without a reward."""


class Status(Struct, frozen=True, kw_only=True):
    run: str
    """open, or none."""
    paused: bool
    uptime_s: float
    now_s: float
    published: int
    trainer: str
    """attached, away, or none. A run that only serves clients has none."""
    trainer_does: str = ""
    """waits (its devices have nothing to train), trains, validates; empty: something else."""
    trainer_since_s: float | None = None
    """For how long it has been doing that."""
    workers: tuple[WorkerStatus, ...]
    rounds: tuple[RoundStatus, ...]
    queues: dict[str, int]
    waits: tuple[WaitStatus, ...]
    ledger: dict[str, Any]
    refused: dict[str, int]
    """The number of refusals, by reason."""
    turned_away: list[TurnedAway] = []
    """The last of them, the newest last."""
    caveat: str = ""
    """The trainer's, of the run."""
    tokens_received: int = 0
    """Since the manager started."""
    max_new_tokens: int = 0
    """Where answers end."""
    rewards: RewardsStatus | None = None
    """None: the trainer has not reported."""
    hosts: list[HostStatus] = []
    environments: list[EnvironmentStatus] = []
    reward_workers: list[RewardWorkerStatus] = []


class HealthReply(Struct, frozen=True, kw_only=True):
    status: Literal["ok"] = "ok"


class DrainReply(Struct, frozen=True, kw_only=True):
    draining: str
    """The worker's name."""


class PauseReply(Struct, frozen=True, kw_only=True):
    paused: bool


class ErrorReply(Struct, frozen=True, kw_only=True):
    error: str


def other_protocol(of_manager: int, of_peer: int) -> str:
    """Return the error message for a peer that speaks another protocol."""
    return f"this manager speaks protocol {of_manager}, not {of_peer}: install the same PolyRL"


class DescriptionInfo(Struct, frozen=True, kw_only=True):
    title: Literal["PolyRL manager"]
    protocol: int | None = msgspec.field(default=None, name="x-protocol")
    """None: it tells who joins."""


class Description(Struct, frozen=True, kw_only=True):
    """The part of openapi.json by which a manager is recognised."""

    info: DescriptionInfo
