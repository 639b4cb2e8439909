"""An account of a run, from its journal alone: the ledger, a line a step, the life of every worker.

The journal holds the events; telling them to a scheduler again gives the rest. After each event the account looks at
the fleet itself, without asking the ledger: so the two can be held against each other (reconcile.py).

Rules kept here: a run that still goes on, or whose driver was killed, is told up to its last whole record. Commands are
compared with the journal's all along: where this version decides otherwise, the account ends and says so. With
`verify`, the laws (scheduling/invariants.py) are checked as often as they can be without costing more than the rest.

Left out: rewards and texts, which no journal holds.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from msgspec import Struct

from polyrl.errors import LawViolation, UserError
from polyrl.ids import Seconds, WorkerName
from polyrl.journal.files import find_begun, open_journal
from polyrl.journal.framing import CutShort
from polyrl.journal.records import CAVEAT, JournalHeader, Record, digest_commands, resume_scheduler
from polyrl.scheduling import invariants
from polyrl.scheduling.core.commands import Command, ForgetWorker, ReportStep
from polyrl.scheduling.core.events import (
    DriverResumed,
    Event,
    FleetReported,
    RewardFinished,
    SupplyOffered,
    TokensArrived,
    TrainerLeft,
    TrainerReplaced,
    TrainerReturned,
    WorkerJoined,
    WorkerLeft,
    WorkerReported,
)
from polyrl.scheduling.core.fleet import Worker, settle
from polyrl.scheduling.core.hosts import settle_host
from polyrl.scheduling.core.ledger import Ledger, StepLine
from polyrl.scheduling.core.parameters import SchedulerConfig
from polyrl.scheduling.core.reward_workers import settle_reward_worker
from polyrl.scheduling.scheduler import Scheduler
from polyrl.telemetry.timeline import Span, Timeline

_HOUR_S = 3600.0
_SAMPLES_A_CHECK = 4
"""Events between two checks of the laws, one for so many open samples: a check looks at each of them."""
_QUIET = (TokensArrived, WorkerReported, FleetReported, RewardFinished)
"""Frequent events. When no command follows, no worker has changed what it does."""


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
    """Nobody knows yet whether it lived on: the driver was away from then on, and has not heard of it."""
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


class OpenAmounts(Struct, frozen=True):
    """Amounts that are not decided yet."""

    prompts: int
    deferred_prompts: int
    samples: int
    tokens: int


class Account(Struct):
    about: dict[str, str]
    config: SchedulerConfig
    ledger: Ledger
    """Settled at `now`."""
    started_at: Seconds
    now: Seconds
    """The moment of the last event."""
    num_records: int
    lines: list[StepLine]
    lives: list[Life]
    timeline: Timeline
    away: list[tuple[Seconds, Seconds]]
    """From when to when there was no driver, or it stood still."""
    trainer_gone_s: Seconds
    """Seconds between `started_at` and `now` without a trainer. They are not paid for."""
    open: OpenAmounts
    paid_before: dict[WorkerName, tuple[float, float]]
    """Seconds and dollars by worker in the state that the first journal starts from; empty for a whole run."""
    hosts: dict[str, tuple[float, float]]
    """Seconds and dollars by host: its time from when it was seen to join to when it was seen to go, and its price."""
    reward_workers: dict[str, tuple[float, float]]
    """The same, by reward worker."""
    is_whole: bool
    """It starts where the run does."""
    cut_short: str = ""
    """Place and manner in which the journal ends inside a record; empty if it does not."""
    difference: str = ""
    """The record at which this version decides otherwise than the journal's: the account ends there."""
    broken_laws: list[str] = []
    num_checks: int = 0
    """Number of checks of the laws."""

    @property
    def caveat(self) -> str:
        """A warning that belongs to every number of the run; mostly empty."""
        return self.about.get(CAVEAT, "")


def read_account(path: Path | str, *, verify: bool = False) -> Account:
    """Tell a run again. Raises JournalError if there is no run, or its journal is damaged before its end."""
    files = find_begun(Path(path))
    teller: _Teller | None = None
    for file in files:
        is_last = file == files[-1]
        try:
            header, records = open_journal(file)
            if teller is None:
                teller = _Teller(header, verify=verify)
            else:
                teller.go_on(header)
            for record in records:
                if not teller.hear(record, file):
                    return teller.account()
        except CutShort as cut:
            if not is_last or teller is None:
                raise
            teller.cut_short = str(cut)
    if teller is None:
        raise UserError("there is no journal")
    return teller.account()


class _Teller:
    """A scheduler that hears it all again, and somebody who watches its fleet."""

    def __init__(self, header: JournalHeader, *, verify: bool) -> None:
        """`header` is that of the first journal."""
        self._scheduler = resume_scheduler(header, None)
        self.cut_short = ""
        self._verify = verify
        self._header = header
        self._difference = ""
        self._broken: list[str] = []
        self._lines: list[StepLine] = []
        self._num_records = 0
        self._unchecked = 0
        self._num_checks = 0
        self._host_watcher, self._reward_watcher = _SeatWatcher(), _SeatWatcher()
        self._away: list[tuple[Seconds, Seconds]] = []
        ledger = self._scheduler.ledger
        self._paid_before = {name: (line.paid_s, line.usd) for name, line in ledger.workers.items()}
        self._trainer_gone, self._trainer_left_at = [(0.0, ledger.trainer_gone_s)], ledger.trainer_left_at
        self._watcher = FleetWatcher()
        self._watcher.take_over(self._scheduler.desk.seats.values(), ledger)
        self._host_watcher.take_over(self._scheduler.desk.hosts.seats, ledger.hosts)
        self._reward_watcher.take_over(self._scheduler.desk.reward_workers.seats, ledger.reward_workers)

    def go_on(self, header: JournalHeader) -> None:
        """Go on with the next journal of the run."""
        self._scheduler = resume_scheduler(header, self._scheduler)

    def hear(self, record: Record, file: Path) -> bool:
        """Take a record in. False: nothing behind it can be believed."""
        commands = self._scheduler.handle(record.event, record.now)
        self._num_records += 1
        if digest_commands(commands) != record.commands_digest:
            self._difference = (
                f"{file}: record {record.number}: this version of PolyRL decides otherwise than the one that wrote it"
            )
            return False
        if commands or self._watcher.misses or not isinstance(record.event, _QUIET):
            self._watcher.look(self._scheduler.desk.seats, record.event, commands, record.now, self._scheduler.ledger)
        desk, ledger = self._scheduler.desk, self._scheduler.ledger
        self._host_watcher.look(desk.hosts.seats, ledger.hosts, record.now)
        self._reward_watcher.look(desk.reward_workers.seats, ledger.reward_workers, record.now)
        if isinstance(record.event, DriverResumed) and record.event.away_s > 0:
            self._away.append((record.now - record.event.away_s, record.now))
        self._watch_trainer(record.event, record.now, self._scheduler.ledger.started_at or 0.0)
        trained = [command.line for command in commands if isinstance(command, ReportStep)]
        self._lines += trained
        return not self._verify or self._check(file, record, at_once=bool(trained))

    def _watch_trainer(self, event: Event, now: Seconds, started_at: Seconds) -> None:
        """Note the trainer's absence. A trainer that returns was there all along; another process was not."""
        if isinstance(event, TrainerLeft) and self._trainer_left_at is None:
            self._trainer_left_at = max(now - max(0.0, event.away_s), started_at)
        elif isinstance(event, TrainerReplaced) and self._trainer_left_at is not None:
            self._trainer_gone.append((self._trainer_left_at, now))
        if isinstance(event, TrainerReplaced | TrainerReturned):
            self._trainer_left_at = None

    def _check(self, file: Path, record: Record, *, at_once: bool) -> bool:
        self._unchecked += 1
        if not at_once and self._unchecked * _SAMPLES_A_CHECK < len(self._scheduler.desk.samples):
            return True
        return self._check_now(f"{file}: record {record.number}", record.now)

    def _check_now(self, where: str, now: Seconds) -> bool:
        self._unchecked = 0
        self._num_checks += 1
        try:
            invariants.check(self._scheduler, now)
        except LawViolation as violation:
            self._broken.append(f"{where}: {violation}")
            return False
        return True

    def account(self) -> Account:
        scheduler, header = self._scheduler, self._header
        ledger = scheduler.ledger
        started_at = 0.0 if ledger.started_at is None else ledger.started_at
        now = max(started_at, scheduler.now)
        if self._verify and self._unchecked and not self._broken and not self._difference:
            self._check_now("at the end", now)
        for worker in scheduler.desk.seats.values():
            settle(worker, ledger, now)
        for host in scheduler.desk.hosts.seats.values():
            settle_host(host, ledger, now)
        for reward_worker in scheduler.desk.reward_workers.seats.values():
            settle_reward_worker(reward_worker, ledger, now)
        self._watcher.end(now)
        if self._trainer_left_at is not None:
            self._trainer_gone.append((self._trainer_left_at, now))
        return Account(
            about=header.about,
            config=header.config,
            ledger=ledger,
            started_at=started_at,
            now=now,
            num_records=self._num_records,
            lines=self._lines,
            lives=self._watcher.lives,
            timeline=self._watcher.timeline,
            away=self._away,
            trainer_gone_s=sum(until - since for since, until in self._trainer_gone),
            open=_still_open(scheduler),
            paid_before=self._paid_before,
            hosts=self._host_watcher.paid(now),
            reward_workers=self._reward_watcher.paid(now),
            is_whole=not header.saved,
            cut_short=self.cut_short,
            difference=self._difference,
            broken_laws=self._broken,
            num_checks=self._num_checks,
        )


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

    def take_over(self, workers: Iterable[Worker], ledger: Ledger) -> None:
        """Take in the workers that were there when the first journal starts."""
        self._gone_at = {name: line.paid_until for name, line in ledger.workers.items() if line.paid_until is not None}
        for worker in workers:
            self._begin(worker, worker.since, 0.0, ledger)

    def look(
        self, seats: dict[int, Worker], event: Event, commands: Sequence[Command], now: Seconds, ledger: Ledger
    ) -> None:
        if len(seats) != len(self._by_seat) or isinstance(event, WorkerJoined | WorkerLeft):
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
        for seat, worker in seats.items():
            self._owes[seat] = worker.state != "draining" or bool(worker.leases)
            if worker.unheard:
                self._miss(worker)
            else:
                self._find(seat)
                self.timeline.mark(worker.name, worker.activity, now)

    def _miss(self, worker: Worker) -> None:
        since, _ = self.misses.get(worker.seat, (worker.since, ""))
        self.misses[worker.seat] = since, worker.activity
        self.timeline.mark(worker.name, None, since)

    def _find(self, seat: int) -> None:
        """A worker that is heard of again was there all along."""
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
        row = self.timeline.rows.setdefault(worker.name, [])
        if paid_s > 0.0:
            row.append(Span(now - paid_s, now, "starting"))

    def _end(self, seat: int, why: str, now: Seconds) -> None:
        life = self._by_seat.pop(seat)
        missed = self.misses.pop(seat, None)
        life.ended_at = self._gone_at[life.worker] = now if missed is None else missed[0]
        life.why = why
        life.ending = "lost" if self._owes.pop(seat, True) or missed is not None else "left"
        self.timeline.mark(life.worker, None, life.ended_at)

    def end(self, now: Seconds) -> None:
        """End the account. Nobody knows whether a worker that is still missed lived on."""
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


class _SeatWatcher:
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


def _still_open(scheduler: Scheduler) -> OpenAmounts:
    state = scheduler.desk.state
    samples = [one for one in state.samples.values() if one.state != "discarded"]
    return OpenAmounts(
        prompts=len(state.groups) - len(state.asked.groups),
        deferred_prompts=sum(map(len, state.tail.deferred)),
        samples=len(samples),
        tokens=sum(one.num_tokens for one in samples),
    )
