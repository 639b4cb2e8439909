"""The workers of the fleet: the life of each, its price, and its measured speed.

    joined --> waiting for weights --> pulling --> active --> draining --> gone
                     ^                   |            |           |
                     +--- pull failed ---+            |           |
                     +--- a newer version is needed --+           |
    any of them ----- missed, stalled, or its driver saw it die --+-> gone

Its engine may be down for a while in any of these states: it gets no samples and no weights until it is back. The same
holds after the driver was away, until the worker is heard of again: it may be gone. If it is not, it is paid for the
absence.

A worker takes a *seat* when it joins: a number never used again. A name that joins anew (a restart before anyone missed
the old process, or a second machine with the same name) takes a new seat and its old one is given up first. A local
worker shares the trainer's devices: it is never without weights, but its devices may be training.
"""

from typing import Literal

from msgspec import Struct, field

from polyrl.ids import GroupId, Incarnation, LeaseId, SampleId, Seconds, Version, WorkerName
from polyrl.scheduling.core.ledger import Activity, Ledger
from polyrl.scheduling.core.samples import NO_VERSION

WorkerState = Literal["waiting", "pulling", "active", "draining"]
WorkerDuty = Literal["generating", "stopping", "to_training", "training", "to_generating"]

_GAIN_DOWN = 0.3
_GAIN_UP = 0.03
"""How much an observation moves its bin. Prefilling and pauses only ever add time, so a shorter one tells more."""
MAX_DEPARTED = 1000
"""The number of departed workers whose names are remembered."""
NUM_ACCUSERS = 2
_FIXED_SHARE = 0.5
"""The share of a decode step's time taken as fixed, beyond the smallest and largest number of samples seen."""


UNBOUNDED = 1 << 30
"""More samples than any worker has."""


class Speed(Struct):
    """Measured seconds of one decode step by number of running samples: one moving mean per doubling.

    No formula is fitted: contexts grow while samples end, and a fitted line predicted decode steps of no time at all.
    """

    steps_s: list[Seconds] = []
    """Bin b holds 2^b up to 2^(b+1) - 1 samples; 0 is not seen yet."""
    samples: list[float] = []
    """The mean number of samples of what was seen in the bin."""

    def observe(self, num_running: int, step_s: Seconds) -> None:
        b = num_running.bit_length() - 1
        if b < 0:
            return
        while len(self.steps_s) <= b:
            self.steps_s.append(0.0)
            self.samples.append(0.0)
        if self.steps_s[b] == 0.0:
            self.steps_s[b], self.samples[b] = step_s, float(num_running)
        else:
            gain = _GAIN_DOWN if step_s < self.steps_s[b] else _GAIN_UP
            self.steps_s[b] += gain * (step_s - self.steps_s[b])
            self.samples[b] += gain * (num_running - self.samples[b])

    def step_s(self, num_running: float) -> Seconds | None:
        """Return the time of a step with `num_running` samples, interpolated between bins; None before any was seen."""
        below: tuple[float, Seconds] | None = None
        for num, step_s in zip(self.samples, self.steps_s, strict=True):
            if step_s == 0.0:
                continue
            if num_running <= num:
                if below is None:
                    return step_s * (_FIXED_SHARE + (1.0 - _FIXED_SHARE) * num_running / num)
                share = (num_running - below[0]) / (num - below[0])
                return below[1] + share * (step_s - below[1])
            below = (num, step_s)
        return None if below is None else below[1] * (_FIXED_SHARE + (1.0 - _FIXED_SHARE) * num_running / below[0])


class Worker(Struct):
    seat: int
    name: WorkerName
    incarnation: Incarnation
    slots: int
    spot: bool
    local: bool
    num_devices: int
    kv_tokens: int
    since: Seconds
    """Up to when its seconds are in the ledger."""
    planned: bool = False
    """The run plans how wide its engine is (reshaping.py)."""
    state: WorkerState = "waiting"
    duty: WorkerDuty = "generating"
    version: Version = NO_VERSION
    pulling: Version = NO_VERSION
    source: int = -1
    """The seat of the peer it pulls from; -1 is the trainer, or no source when it does not pull."""
    num_pull_failures: int = 0
    bad_source: bool = False
    """Under rules 0: a pull from it failed."""
    accused_by: list[WorkerName] = []
    """Workers whose pulls of the newest version from it failed, and from no other source since. By name, which stays
    the same however often a worker joins."""
    failed_with_peer: bool = False
    """To pull the newest version: it gets that from the trainer."""
    relays: bool = True
    region: str = ""
    """A version enters a region once (weight_delivery.py); empty: near the trainer."""
    failed_groups: list[GroupId] = []
    """Groups of which it failed samples since its last answer. The fault is not yet assigned (failures.py)."""
    num_faults: int = 0
    """The number of failed groups that another worker has answered."""
    num_rejected: int = 0
    """Groups that the trainer has rejected for what it wrote."""
    has_answered: bool = False
    """It has brought an answer, and the trainer has rejected none of it since."""
    is_believed: bool = False
    """Answers of it were trained, and the trainer has rejected none of it since."""
    num_waiting: int = 0
    """Samples that its engine itself holds back, and not only because it computes prompts."""
    held_back_at: int = -1
    """Samples that its engine ran at its last report, if it held others back then; otherwise -1."""
    has_progressed: bool = False
    """Whether it brought tokens since its last report."""
    num_preemptions: int = 0
    leases: dict[LeaseId, SampleId] = {}
    last_tokens_at: Seconds = 0.0
    speed: Speed = field(default_factory=Speed)
    plateau: int = 0
    """Samples that its engine runs at once without holding any back; balancing.py learns it."""
    earned: int = UNBOUNDED
    """Samples that it is trusted with at once, whatever number of slots it claims (credit.py)."""
    has_stalled: bool = False
    """Whether all samples of a worker of this name stalled, and none has been answered since."""
    num_granted: int = 0
    """Leases given to it since it last brought tokens."""
    down: bool = False
    """Its engine died and is being started again."""
    num_deaths: int = 0
    """How often its engine died with samples since its last answer."""
    unheard: bool = False
    """The driver was away, and has not heard of it since: its seconds from then on are not in the ledger yet."""
    idle_since: Seconds | None = None
    """Of a local worker: since when its devices are there to train and have nothing."""
    validating: bool = False
    """The trainer validates on its devices."""
    leaves_at: Seconds | None = None
    """When its machine goes, if a notice was given (notices.py)."""
    why_leaving: str = ""
    is_closed: bool = False
    """It was given notice, and goes so soon that no new sample pays there."""
    begun_at: Seconds | None = None
    """When its machine began to start; None: it has been able to write since."""
    is_taken: bool = False
    """Its machine is taken away, with notice: the run did not ask for that."""

    @property
    def may_relay(self) -> bool:
        """Whether other workers may be sent to it for weights. A single accuser does not rule it out: the accuser may
        lie, or be at fault itself."""
        return self.relays and not self.bad_source and len(self.accused_by) < NUM_ACCUSERS

    @property
    def may_generate(self) -> bool:
        return self.state == "active" and self.duty == "generating" and not self.down and not self.unheard

    @property
    def may_take(self) -> bool:
        """Samples may be given to it, if it has room."""
        return self.may_generate and not self.is_closed

    @property
    def owes(self) -> bool:
        """Whether leaving now counts as a loss: as far as we know, it has not handed everything over."""
        return self.state != "draining" or bool(self.leases) or self.unheard

    @property
    def is_doubtful(self) -> bool:
        """Whether it failed samples and has brought no answer since."""
        return bool(self.failed_groups) or self.num_faults > 0

    @property
    def is_proven(self) -> bool:
        """Whether it has brought an answer. Names and claims cost nothing: one worker token lets a process join under
        many names."""
        return self.local or self.has_answered

    @property
    def limit(self) -> int:
        """Samples that it may have at once."""
        return min(self.plateau, self.earned)

    @property
    def capacity(self) -> int:
        """The slots that its load is measured against: its credit bounds its claim."""
        return min(self.slots, self.earned)

    @property
    def credit(self) -> int:
        return self.limit - len(self.leases)

    @property
    def activity(self) -> Activity:
        if self.state == "draining":
            return "draining"
        if self.validating and not self.leases:
            return "validating"
        if self.local and self.duty != "generating" and self.duty != "stopping":
            return "training"
        if self.leases:
            return "generating"
        if self.down:
            return "starting"
        return "idle" if self.state == "active" else "pulling"


class FleetState(Struct):
    seats: dict[int, Worker] = {}
    by_name: dict[WorkerName, int] = {}
    last_incarnations: dict[WorkerName, Incarnation] = {}
    """The newest life of every name, present or departed: it shows that a join is repeated late."""
    departed: dict[WorkerName, None] = {}
    """The latest names that left, in order. Only the latest, since a peer could join under ever new names."""
    local_seats: list[int] = []
    next_seat: int = 1
    num_remote: int = 0
    """Remote workers that have joined and are not draining, with or without weights."""
    counted_at: Seconds = 0.0
    remote_area: float = 0.0
    """`num_remote` integrated over the time since `measured_from`."""
    measured_from: Seconds = 0.0

    def find(self, name: WorkerName, incarnation: Incarnation) -> Worker | None:
        """Return the worker in that very life, or None for news of the dead."""
        seat = self.by_name.get(name)
        if seat is None:
            return None
        worker = self.seats[seat]
        return worker if worker.incarnation == incarnation else None

    def local(self) -> list[Worker]:
        return [self.seats[seat] for seat in self.local_seats]

    def add(self, worker: Worker, now: Seconds) -> None:
        self.seats[worker.seat] = worker
        self.by_name[worker.name] = worker.seat
        self.last_incarnations[worker.name] = worker.incarnation
        self.departed.pop(worker.name, None)
        if worker.local:
            self.local_seats.append(worker.seat)
        else:
            self._count(1, now)

    def remove(self, worker: Worker, now: Seconds) -> None:
        del self.seats[worker.seat]
        del self.by_name[worker.name]
        self.departed[worker.name] = None
        if worker.local:
            self.local_seats.remove(worker.seat)
        elif worker.state != "draining":
            self._count(-1, now)

    def forget_oldest(self) -> WorkerName | None:
        """Return the name that departed first, if more have than are remembered."""
        if len(self.departed) <= MAX_DEPARTED:
            return None
        name = next(iter(self.departed))
        del self.departed[name]
        del self.last_incarnations[name]
        return name

    def start_drain(self, worker: Worker, now: Seconds) -> None:
        if not worker.local and worker.state != "draining":
            self._count(-1, now)
        worker.state = "draining"

    def mean_remote(self, now: Seconds) -> float:
        """Remote workers, averaged over the time since the last `restart_mean`."""
        span = now - self.measured_from
        if span <= 0.0:
            return float(self.num_remote)
        return (self.remote_area + self.num_remote * (now - self.counted_at)) / span

    def restart_mean(self, now: Seconds) -> None:
        self.remote_area, self.counted_at, self.measured_from = 0.0, now, now

    def skip(self, seconds: Seconds) -> None:
        """Leave so much time out of the mean."""
        self.counted_at += seconds
        self.measured_from += seconds

    def _count(self, change: int, now: Seconds) -> None:
        self.remote_area += self.num_remote * (now - self.counted_at)
        self.counted_at = now
        self.num_remote += change


def settle(worker: Worker, ledger: Ledger, now: Seconds) -> None:
    """Write the seconds since the last time into the ledger. Call it before anything that changes the activity."""
    if now > worker.since and not worker.unheard:
        ledger.pay(worker.name, worker.activity, now - worker.since)
        worker.since = now
