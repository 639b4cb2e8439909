"""The members of a fleet, since when, doing what, at what price: watched while a journal is told again.

Rules kept here: a watcher only reads the scheduler's tables, after each event.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

from msgspec import Struct

from polyrl.ids import Seconds, WorkerName
from polyrl.scheduling.core.commands import (
    Abort,
    Command,
    ForgetWorker,
    Generate,
    HandOver,
    PullWeights,
    ReleaseWorker,
    Reshape,
    StartGenerating,
    StartTraining,
)
from polyrl.scheduling.core.events import (
    CallMade,
    Event,
    FleetReported,
    GroupsTaken,
    LeaseEnded,
    MicroBatchTrained,
    RewardFinished,
    SampleFinished,
    SupplyOffered,
    TokensArrived,
    WeightsInstalled,
    WorkerJoined,
    WorkerLeft,
    WorkerReported,
)
from polyrl.scheduling.core.fleet import Worker
from polyrl.scheduling.core.ledger import Ledger
from polyrl.telemetry.timeline import Span, Timeline

_HOUR_S = 3600.0
QUIET = (TokensArrived, WorkerReported, FleetReported, RewardFinished)
"""Frequent events. When no command follows, no worker has changed what it does."""
_OF_FEW = (*QUIET, SampleFinished, LeaseEnded, WeightsInstalled, CallMade, GroupsTaken, MicroBatchTrained)
"""Frequent events after which only those workers do something else that they or their commands name."""
_NAMING = (Generate, Abort, HandOver, PullWeights, ReleaseWorker, ForgetWorker, StartTraining, StartGenerating)


class Life(Struct):
    """A worker's time in one seat."""

    worker: WorkerName
    local: bool
    spot: bool
    price_usd_per_hour: float
    began_at: Seconds
    starting_s: Seconds
    """Paid for before it joined, and after its life before this one ended."""
    ended_at: Seconds | None = None
    """For a worker that was not heard of after an absence of the driver: when the absence began."""
    missed_since: Seconds | None = None
    """It is unknown yet whether it lived on: the driver was away from then on, and has not heard of it."""
    repriced: list[tuple[Seconds, float]] = []
    """From when on it cost something else an hour."""
    ending: Literal["", "left", "lost"] = ""
    """`lost`: it went without handing over."""
    why: str = ""

    def usd(self, end: Seconds) -> float:
        """Return its dollars up to then: every second times the price of that second."""
        moments = [*((min(at, end), price) for at, price in self.repriced), (end, 0.0)]
        since, price, usd = self.began_at - self.starting_s, self.price_usd_per_hour, 0.0
        for moment, next_price in moments:
            usd += (moment - since) * price / _HOUR_S
            since, price = moment, next_price
        return usd


class FleetWatcher:
    """Watches the fleet: which workers are there, since when, and their activity."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.lives: list[Life] = []
        self.misses: dict[int, tuple[Seconds, str]] = {}
        """Seats that were not heard of since the driver was away: since when, and what they did as far as we know."""
        self._by_seat: dict[int, Life] = {}
        self._owes: dict[int, bool] = {}
        """By seat: whether its going now would be a loss."""
        self._gone_at: dict[WorkerName, Seconds] = {}
        """The end of the last life of each name."""
        self._holders: dict[int, WorkerName] = {}
        """The worker of each lease that was seen to begin."""
        self._seat_of: dict[WorkerName, int] = {}
        self._has_looked = False

    def take_over(self, workers: Iterable[Worker], ledger: Ledger) -> None:
        """Take in the workers that were there when the first journal starts."""
        self._gone_at = {name: line.paid_until for name, line in ledger.workers.items() if line.paid_until is not None}
        for worker in workers:
            self._begin(worker, worker.since, 0.0, ledger)

    def look(
        self, seats: dict[int, Worker], event: Event, commands: Sequence[Command], now: Seconds, ledger: Ledger
    ) -> None:
        concerned = self._concerned(seats, event, commands)
        if len(seats) != len(self._by_seat) or isinstance(event, WorkerJoined | WorkerLeft):
            concerned = seats.values()
            for seat in [seat for seat in self._by_seat if seat not in seats]:
                if isinstance(event, WorkerLeft):  # of its own mouth
                    self._find(seat)
                self._end(seat, _why_gone(self._by_seat[seat], event, commands), now)
            for worker in [worker for seat, worker in seats.items() if seat not in self._by_seat]:
                starting_s = event.starting_s if isinstance(event, WorkerJoined) else 0.0
                self._begin(worker, now, starting_s, ledger)
        if isinstance(event, SupplyOffered):
            for seat, life in self._by_seat.items():
                if life.worker in event.workers and not life.local and not seats[seat].unheard:
                    life.repriced.append((now, ledger.workers[life.worker].price_usd_per_hour))
        for worker in concerned:
            self._owes[worker.seat] = worker.state != "draining" or bool(worker.leases)
            if worker.unheard:
                self._miss(worker)
            else:
                self._find(worker.seat)
                self.timeline.mark(worker.name, worker.activity, now)

    def _concerned(self, seats: dict[int, Worker], event: Event, commands: Sequence[Command]) -> Iterable[Worker]:
        """Return the workers that may do something else now. With a thousand of them, a look at each is most of what
        reading a journal takes."""
        names: dict[WorkerName | None, None] = {}
        match event:
            case SampleFinished() | LeaseEnded():
                names[self._holders.pop(event.lease, None)] = None
            case WeightsInstalled() | TokensArrived() | WorkerReported():
                names[event.worker] = None
            case _:
                pass
        for command in commands:
            if isinstance(command, Generate):
                self._holders[command.lease] = command.worker
            elif isinstance(command, Abort):
                self._holders.pop(command.lease, None)
            if isinstance(command, _NAMING):
                names[command.worker] = None
        is_first, self._has_looked = not self._has_looked, True
        if (
            is_first
            or self.misses
            or not isinstance(event, _OF_FEW)
            or any(isinstance(one, Reshape) for one in commands)
        ):
            return seats.values()
        if None in names:  # a lease that began before this journal
            return seats.values()
        found = (self._seat_of.get(name) for name in names if name is not None)
        return [seats[seat] for seat in found if seat is not None and seat in seats]

    def _miss(self, worker: Worker) -> None:
        since, _ = self.misses.get(worker.seat, (worker.since, ""))
        self.misses[worker.seat] = since, worker.activity
        self.timeline.mark(worker.name, None, since)

    def _find(self, seat: int) -> None:
        """Return the worker's life. A worker that is heard of again was there all along."""
        if seat in self.misses:
            since, activity = self.misses.pop(seat)
            self.timeline.mark(self._by_seat[seat].worker, activity, since)

    def _begin(self, worker: Worker, now: Seconds, starting_s: Seconds, ledger: Ledger) -> None:
        paid_s = starting_s if 0.0 <= starting_s < float("inf") else 0.0
        is_known = ledger.workers[worker.name].num_joins > 1  # else it is new, or went so long ago that it is forgotten
        paid_s = min(paid_s, now - self._gone_at.get(worker.name, -float("inf"))) if is_known else paid_s
        price = ledger.workers[worker.name].price_usd_per_hour
        life = Life(worker.name, worker.local, worker.spot, price, now, paid_s)
        self.lives.append(life)
        self._by_seat[worker.seat] = life
        self._seat_of[worker.name] = worker.seat
        row = self.timeline.rows.setdefault(worker.name, [])
        if paid_s > 0.0:
            row.append(Span(now - paid_s, now, "starting"))

    def _end(self, seat: int, why: str, now: Seconds) -> None:
        life = self._by_seat.pop(seat)
        if self._seat_of.get(life.worker) == seat:
            del self._seat_of[life.worker]
        self._holders = {lease: name for lease, name in self._holders.items() if name != life.worker}
        missed = self.misses.pop(seat, None)
        life.ended_at = self._gone_at[life.worker] = now if missed is None else missed[0]
        life.why = why
        life.ending = "lost" if self._owes.pop(seat, True) or missed is not None else "left"
        self.timeline.mark(life.worker, None, life.ended_at)

    def end(self, now: Seconds) -> None:
        """End the account. It stays unknown whether a worker that is still missed lived on."""
        for seat, (since, _) in self.misses.items():
            self._by_seat[seat].missed_since = since
        self.timeline.end(now)


class _PaidLine(Protocol):
    """A line of the ledger."""

    @property
    def price_usd_per_hour(self) -> float: ...

    @property
    def seconds(self) -> float: ...

    @property
    def usd(self) -> float: ...


class _PaidSeat(Protocol):
    """A host, or a reward worker."""

    @property
    def name(self) -> str: ...

    @property
    def since(self) -> Seconds: ...


class SeatWatcher:
    """Watches hosts or reward workers: which are there, and since when. Lines are the ledger's."""

    def __init__(self) -> None:
        self._there: dict[int, tuple[str, float, Seconds]] = {}
        """By seat: name, price, and since when it is there."""
        self._paid: dict[str, tuple[float, float]] = {}

    def take_over(self, seats: Mapping[int, _PaidSeat], lines: Mapping[Any, _PaidLine]) -> None:
        self._paid = {name: (line.seconds, line.usd) for name, line in lines.items()}
        self._there = {seat: (one.name, lines[one.name].price_usd_per_hour, one.since) for seat, one in seats.items()}

    def look(self, seats: Mapping[int, _PaidSeat], lines: Mapping[Any, _PaidLine], now: Seconds) -> None:
        if self._there.keys() == seats.keys():
            return
        for seat in [seat for seat in self._there if seat not in seats]:
            self._paid = self._with(self._there.pop(seat), now)
        for seat, one in seats.items():
            if seat not in self._there:
                self._there[seat] = one.name, lines[one.name].price_usd_per_hour, now

    def _with(self, one: tuple[str, float, Seconds], now: Seconds) -> dict[str, tuple[float, float]]:
        name, price, since = one
        seconds, usd = self._paid.get(name, (0.0, 0.0))
        return {**self._paid, name: (seconds + now - since, usd + (now - since) * price / _HOUR_S)}

    def paid(self, now: Seconds) -> dict[str, tuple[float, float]]:
        """Return seconds and dollars of all of them up to `now`, which is the last time that it looks."""
        for one in self._there.values():
            self._paid = self._with(one, now)
        self._there = {}
        return self._paid


def _why_gone(life: Life, event: Event, commands: Sequence[Command]) -> str:
    if isinstance(event, WorkerLeft) and event.worker == life.worker:
        return event.reason
    if isinstance(event, WorkerJoined) and event.worker == life.worker:
        return "a newer process joined under its name"
    said = [command.why for command in commands if isinstance(command, ForgetWorker) and command.worker == life.worker]
    return said[0] if said else ""
