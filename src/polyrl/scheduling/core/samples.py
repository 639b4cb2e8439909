"""Samples, groups and rounds while they are open.

    sample:  waiting -> leased (-> stopping) -> waiting ...      a lease ended before the answer did
                        leased -> generated -> scoring -> scored -> trained
             any of them -> discarded                            with a cause in the ledger

    group:   open -> claimed -> ready -> delivered -> taken -> trained
             open -> deferred        its prompt waits for a long round; the group is forgotten
             any  -> dropped         with a reason in the ledger; forgotten too

    asked:   open -> forgotten       when all its samples are generated, or it is withdrawn (asking.py)

    episode: unhosted -> playing -> waiting -> leased -> playing ... -> scored      (episodes.py)
             its host is lost, or it failed -> unhosted

`open`: its samples race. `claimed`: enough of them have ended, its place in the step is sure. `ready`: all are scored.
`delivered`: given to the trainer. `taken`: the trainer said so. Samples and groups of a step are forgotten when the
step is trained; what remains of them is in the ledger.
"""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from polyrl.ids import GroupId, LeaseId, PromptId, SampleId, Seconds, Step, Version, sample_id
from polyrl.scheduling.core.commands import RoundKind

SampleState = Literal[
    "unhosted", "playing", "waiting", "leased", "stopping", "generated", "scoring", "scored", "discarded"
]
GroupState = Literal["open", "claimed", "ready", "delivered", "taken"]

NO_LEASE = LeaseId(0)
NO_VERSION = Version(-1)
ASKED = Step(-1)
"""The step of groups that no step trains on (asking.py)."""


class TrackedSample(Struct, gc=False):
    id: SampleId
    group: GroupId
    kept: bool
    """It will be trained if its group is. In a race every sample may be; in designated mode only the chosen ones."""
    state: SampleState = "waiting"
    num_tokens: int = 0
    """Tokens that have arrived: where it is resumed."""
    lease: LeaseId = NO_LEASE
    worker: int = -1
    """The seat of the worker that holds its lease."""
    version: Version = NO_VERSION
    """The oldest version that wrote one of its tokens."""
    moved_at: int = 0
    """Its tokens when it last moved."""
    target: int = -1
    """The seat of the worker that balancing wants to have it."""
    attempt: int = 0
    """The number of the scoring attempt. Only the answer to the latest attempt counts."""
    num_failures: int = 0
    """How often a worker failed it. A sample that failed waits in a queue of its own (failures.py)."""
    writer: int = -1
    """The seat of the worker that last brought tokens of it, of those that no longer have it."""
    seen_tokens: int = -1
    """Its tokens at the last look for stalled leases; -1 when there was none under its present lease."""
    host: int = -1
    """The seat of the host that plays it, if it is an episode and one does. `attempt` is how often it was begun."""
    call_start: int = 0
    """Its tokens before its present call, or its last one."""
    call_end: int = 0
    """Its present call ends at this many tokens."""
    num_faults: int = 0
    """How often it ended as a failure of its environment."""
    failed_at: int = -1
    """The seat of the host where it last failed."""
    num_losses: int = 0
    """How often its host was lost since a call of it was last answered."""


class Playtime(Struct, gc=False):
    """The time of an episode that a host plays, beside its sample."""

    began_at: Seconds
    """When its present attempt began."""
    turn_began_at: Seconds
    """Since when its environment has the move, or when it last had it."""
    limit_s: Seconds = 0.0
    """How long that turn may take."""
    played_s: Seconds = 0.0
    """The time of the turns before, in this attempt."""
    took_s: Seconds | None = None
    """Seconds from its beginning to its end; None if it was begun again: that time is no measure."""
    num_hangs: int = 0
    """How often it stood still at a host that hung."""
    episode_limit_s: Seconds = 0.0
    """No turn of it begins after so much was played; 0: nothing is learned yet."""

    def skip(self, seconds: Seconds) -> None:
        """Leave out an absence of the driver."""
        self.began_at += seconds
        self.turn_began_at += seconds


class TrackedGroup(Struct, gc=False):
    id: GroupId
    step: Step
    domain: int
    prompt: PromptId
    epoch: int
    times_deferred: int
    first_deferred_step: int
    num_samples: int
    need: int
    """Samples that make it complete."""
    state: GroupState = "open"
    num_generated: int = 0
    num_scored: int = 0
    prefix_worker: int = -1
    """The seat of the worker that was last given one of its samples."""
    failed_on: list[int] = []
    """Seats of workers that failed one of its samples."""
    num_again: int = 0
    """How often its prompt was written before in this round, by workers that the trainer did not believe."""

    def sample_ids(self) -> Sequence[SampleId]:
        first = sample_id(self.id, 0)
        return range(first, first + self.num_samples)  # pyright: ignore[reportReturnType]  integers, one a sample


class Round(Struct):
    step: Step
    kind: RoundKind
    opened_at: Seconds
    quotas: list[int]
    """Groups that each domain owes the step."""
    claims: list[int]
    """Groups of each domain that have their place."""
    num_open: list[int]
    """Groups of each domain that still race."""
    groups: dict[GroupId, None]
    """In the order of the plan."""
    num_planned: int
    """Samples at its start: what shares of it are measured against."""
    fresh: list[SampleId]
    """Waiting samples with no token yet, last one first out. Samples that stopped waiting are skipped."""
    resumed: list[tuple[int, SampleId]]
    """Heap of waiting samples that have tokens: longest first, as (-tokens, sample)."""
    num_waiting: int = 0
    num_leased: int = 0
    num_generated: int = 0
    ended_tokens: int = 0
    """Tokens of the samples counted in `num_generated`."""
    num_delivered: int = 0
    """Groups that reached the trainer and were not rejected."""
    num_ready: int = 0
    num_refills: int = 0
    num_moves: int = 0
    closed_at: Seconds | None = None
    next_hand_back_share: float = 0.0
    predicted_s: Seconds | None = None
    """The seconds that the parallelism planner expects, if it plans."""
    farthest: int = 0
    """The most tokens of a sample of it that ended or was stopped; kept when parallelism is planned."""
    written_at: Seconds | None = None
    """When the last lease of it ended; kept when parallelism is planned."""
    waits_for_places: bool = False
    """Whether samples waited for a place to be scored then: the pool of rewards was full."""
    failed: list[SampleId] = []
    """Waiting samples that a worker failed, first come first served: only some workers may get them (failures.py)."""
    unhosted: dict[int, list[SampleId]] = {}
    """By domain, episodes that wait for a host, last one first out. Samples that stopped waiting are skipped."""
    num_unhosted: int = 0
    num_playing: int = 0
    """Episodes whose host has the move."""
    returning: dict[int, dict[SampleId, None]] = {}
    """By seat, waiting episodes whose last call that worker answered, first come first served. At -1, those that have
    tokens, and whose worker is gone."""
    num_passed: int = 0
    """How often in a row one of those was placed before the first sample."""

    @classmethod
    def of_asked(cls) -> "Round":
        """Make the round that holds the asked groups: it never opens, closes or ends."""
        return cls(ASKED, "short", 0.0, [], [], [], {}, 0, [], [])

    @property
    def is_generating(self) -> bool:
        return self.num_waiting > 0 or self.num_leased > 0 or self.num_unhosted > 0 or self.num_playing > 0
