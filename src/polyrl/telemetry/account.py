"""An account of a run, from its journal alone: the ledger, a line a step, the life of every worker.

The journal holds the events; telling them to a scheduler again gives the rest. After each event the account looks at
the fleet itself, without asking the ledger: so the two can be held against each other (reconcile.py).

Rules kept here: a run that still goes on, or whose driver was killed, is told up to its last whole record. Commands are
compared with the journal's all along: where this version decides otherwise, the account ends and says so. With
`verify`, the laws (scheduling/invariants.py) are checked as often as they can be without costing more than the rest.

Left out: rewards and texts, which no journal holds.
"""

from pathlib import Path

from msgspec import Struct

from polyrl.errors import LawViolation, UserError
from polyrl.ids import Seconds, WorkerName
from polyrl.journal.files import find_begun, open_journal
from polyrl.journal.framing import CutShort
from polyrl.journal.records import CAVEAT, JournalHeader, Record, digest_commands, resume_scheduler
from polyrl.scheduling import invariants
from polyrl.scheduling.core.commands import (
    ReportStep,
)
from polyrl.scheduling.core.events import (
    DriverResumed,
    Event,
    TrainerLeft,
    TrainerReplaced,
    TrainerReturned,
)
from polyrl.scheduling.core.fleet import settle
from polyrl.scheduling.core.hosts import settle_host
from polyrl.scheduling.core.ledger import Ledger, StepLine
from polyrl.scheduling.core.parameters import SchedulerConfig
from polyrl.scheduling.core.reward_workers import settle_reward_worker
from polyrl.scheduling.scheduler import Scheduler
from polyrl.telemetry.lives import QUIET, FleetWatcher, Life, SeatWatcher
from polyrl.telemetry.timeline import Timeline

_SAMPLES_A_CHECK = 4
"""Events between two checks of the laws, one for so many open samples: a check looks at each of them."""


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
    """A scheduler that is told a journal's events again, and a watch on its fleet."""

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
        self._host_watcher, self._reward_watcher = SeatWatcher(), SeatWatcher()
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
        if commands or self._watcher.misses or not isinstance(record.event, QUIET):
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


def _still_open(scheduler: Scheduler) -> OpenAmounts:
    state = scheduler.desk.state
    samples = [one for one in state.samples.values() if one.state != "discarded"]
    return OpenAmounts(
        prompts=len(state.groups) - len(state.asked.groups),
        deferred_prompts=sum(map(len, state.tail.deferred)),
        samples=len(samples),
        tokens=sum(one.num_tokens for one in samples),
    )
