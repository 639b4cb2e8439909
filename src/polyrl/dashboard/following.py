"""Follow a run's journal as it grows: what every worker, host and the trainer did when; which group is which prompt.

The journal is told to a scheduler again, in a thread of its own; the thread waits at the journal's end for more.

Rules kept here: files are only read. The journal of a run that is over ends the thread. The memory of leases is
bounded; the oldest go first. A journal that is damaged, or whose decisions this version would not make, is followed no
further: `trouble` says why in one line, and what was read before stays.
"""

import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from polyrl.dashboard.leases import KeptLeases, LeaseSpan
from polyrl.dashboard.waiting import TimePart, TimeUse
from polyrl.errors import JournalError, UserError
from polyrl.ids import GroupId, SampleId, Seconds, show_sample
from polyrl.journal.files import find_begun
from polyrl.journal.framing import CutShort
from polyrl.journal.records import JournalHeader, Record, digest_commands, read_records, resume_scheduler
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.ledger import StepLine
from polyrl.scheduling.scheduler import Scheduler
from polyrl.telemetry.lives import FleetWatcher, Life
from polyrl.telemetry.timeline import Span, Timeline

TRAINER = "trainer"
_WORKERS = ("worker", "local")
"""Kinds of rows that have samples. The trainer's own worker may have the name of the trainer's row."""
_CHUNK_BYTES = 1 << 18
_LOOK_AGAIN_S = 0.5
_MAX_SPANS, _MAX_LEASES = 750, 3_000
"""How many a row of the picture has at most."""
_MAX_GROUPS = 500_000
_NEWEST_GROUPS = 20_000
"""The groups among which those of open rounds are looked for."""
_STEADY = (e.TokensArrived, e.WorkerReported, e.FleetReported, e.RewardFinished)
"""Frequent events. Without a command after them, no activity has changed."""

_GOINGS = (e.WorkerLeft, e.WorkerJoined, e.DriverResumed)
"""Events after which a worker, and with it its leases, may be gone."""


class GroupPrompt(NamedTuple):
    """The prompt of a group."""

    step: int
    domain: str
    domain_number: int
    prompt: int
    epoch: int


class TimelineRow(NamedTuple):
    name: str
    kind: str
    """trainer, worker, local or host."""
    spans: list[tuple[Seconds, Seconds, str]]
    leases: list[LeaseSpan]
    """Of a row that is opened."""
    num_leases: int
    ends: list[tuple[Seconds, str, str]]
    """(when, left or lost, why)."""


class TimelineWindow(NamedTuple):
    from_s: Seconds
    to_s: Seconds
    run_s: Seconds
    rows: list[TimelineRow]
    num_rows: int


class Follower:
    """A journal that is read as it grows. All answers are of what was read so far."""

    def __init__(self, path: Path, *, live: bool) -> None:
        """`live`: the journal may still grow."""
        self._path, self._live = path, live
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._read_bytes = self._all_bytes = 0
        self.trouble = ""
        """The reason why it was not read further; empty: there is none."""
        self.is_at_end = False
        self._fleet, self._own, self._use = FleetWatcher(), Timeline(), TimeUse()
        self._scheduler: Scheduler | None = None
        self._now: Seconds = 0.0
        self._lines: list[StepLine] = []
        self._groups: dict[GroupId, GroupPrompt] = {}
        self._delivered: dict[GroupId, tuple[SampleId, ...]] = {}
        self._leases = KeptLeases()
        self._hosts: set[str] = set()
        self._thread = threading.Thread(target=self._follow, name="journal", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until everything written so far was read. False: `timeout_s` was too short."""
        until = time.monotonic() + timeout_s
        while not self.is_at_end and not self.trouble and time.monotonic() < until:
            time.sleep(0.01)
        return self.is_at_end

    @property
    def share_read(self) -> float:
        return min(1.0, self._read_bytes / self._all_bytes) if self._all_bytes else 0.0

    # What was read

    def lines(self) -> list[StepLine]:
        with self._lock:
            return list(self._lines)

    def started_at(self) -> Seconds:
        scheduler = self._scheduler
        return 0.0 if scheduler is None or scheduler.ledger.started_at is None else scheduler.ledger.started_at

    @property
    def trainer_usd_per_hour(self) -> float:
        return 0.0 if self._scheduler is None else self._scheduler.desk.config.trainer_usd_per_hour

    def spent_usd(self) -> float:
        """Return what the run has cost up to now: what the ledger says when all is settled."""
        if self._scheduler is None:
            return 0.0
        desk, ledger, now = self._scheduler.desk, self._scheduler.ledger, self._now
        owed = [(ledger.workers[one.name], one.since) for one in desk.seats.values() if not one.unheard]
        owed += [(ledger.hosts[one.name], one.since) for one in desk.hosts.seats.values()]
        owed += [(ledger.reward_workers[one.name], one.since) for one in desk.reward_workers.seats.values()]
        unsettled = sum(max(0.0, now - since) * line.price_usd_per_hour for line, since in owed)
        return ledger.usd(now) + unsettled / 3600.0

    def tell_time(self, now: Seconds) -> None:
        """Take in the run's own time: where nothing happens, the journal does not tell it."""
        with self._lock:
            if self._scheduler is not None and self.is_at_end:
                self._now = max(self._now, now)

    def time_now(self) -> Seconds:
        """Return the moment up to which the run is known."""
        return self._now

    def time_parts(self) -> list[TimePart]:
        """Return where the time of the newest steps went."""
        with self._lock:
            return self._use.parts(self._lines, self.started_at(), self._now, self.spent_usd())

    def trainer_shares(self) -> dict[str, float]:
        """Return which share of the whole run's time the trainer spent on what, in words."""
        with self._lock:
            parts = self._use.parts((), self.started_at(), self._now, 0.0)
        return {one.words: one.share for one in parts}

    def steps_of_groups(self) -> dict[GroupId, int]:
        """Return the step of every group that is known."""
        with self._lock:
            return {group: planned.step for group, planned in self._groups.items()}

    def steps_since(self, step: int) -> list[int]:
        """Return the steps after this one that rounds were opened for."""
        with self._lock:
            newest = islice(reversed(self._groups.values()), _NEWEST_GROUPS)
            return sorted({planned.step for planned in newest if planned.step > step})

    def prompt_of(self, group: int) -> GroupPrompt | None:
        return self._groups.get(GroupId(group))

    def steps_of(self, domain: int, prompt: int) -> dict[int, list[int]]:
        """Return the groups of a prompt by step."""
        found: dict[int, list[int]] = {}
        with self._lock:
            for group, planned in self._groups.items():
                if planned.prompt == prompt and planned.domain_number == domain:
                    found.setdefault(planned.step, []).append(group)
        return found

    def sample_at(self, group: int, index: int, num: int) -> str:
        """Return the id of a delivered sample, by its place among the `num` of its group that were trained on."""
        delivered = self._delivered.get(GroupId(group), ())
        return show_sample(delivered[index]) if len(delivered) == num and index < num else ""

    def lives(self) -> list[Life]:
        with self._lock:
            return list(self._fleet.lives)

    def paces(self) -> dict[str, float]:
        """Return the tokens a second per sample of each worker, as `KeptLeases.paces` does."""
        with self._lock:
            return self._leases.paces()

    def window(self, from_s: Seconds, to_s: Seconds, first: int, most: int, opened: str = "") -> TimelineWindow:
        """Return `most` rows, from number `first` on, between two moments in seconds since the run began.

        `to_s` 0: up to its end. `opened`: the row that has its leases, unless they are too many to be drawn.
        """
        with self._lock:
            began = self.started_at()
            run_s = max(0.0, self._now - began)
            to_s = run_s if to_s <= 0 else min(to_s, run_s)
            from_s = min(max(0.0, from_s), to_s)
            names = self._names()
            between = began + from_s, began + to_s
            rows = self._rows(names[first:][:most], between, began, _MAX_SPANS)
            rows = [
                row._replace(leases=self._leases_within(row, between, began)) if row.name == opened else row
                for row in rows
            ]
        return TimelineWindow(from_s, to_s, run_s, rows, len(names))

    def everything(self) -> list[TimelineRow]:
        """Return all rows of the whole run, with every span and every lease that is kept."""
        with self._lock:
            began = self.started_at()
            between = began, self._now
            rows = self._rows(self._names(), between, began, sys.maxsize)
            return [row._replace(leases=self._leases_within(row, between, began, sys.maxsize)) for row in rows]

    def _names(self) -> list[tuple[str, str]]:
        local = {life.worker for life in self._fleet.lives if life.local}
        workers = [(name, "local" if name in local else "worker") for name in self._fleet.timeline.rows]
        own = [(name, TRAINER if name == TRAINER else "host") for name in self._own.rows]
        order = (TRAINER, "local", "worker", "host")
        return sorted(own + workers, key=lambda one: order.index(one[1]))

    def _rows(
        self, shown: Sequence[tuple[str, str]], between: tuple[Seconds, Seconds], began: Seconds, most: int
    ) -> list[TimelineRow]:
        ends: dict[str, list[tuple[Seconds, str, str]]] = {}
        for life in self._fleet.lives:
            if life.ended_at is not None and between[0] <= life.ended_at <= between[1]:
                ends.setdefault(life.worker, []).append((life.ended_at - began, life.ending, life.why))
        return [
            TimelineRow(
                name, kind, self._spans(name, kind, between, began, most),
                [], *((self._num_within(name, between), ends.get(name, [])) if kind in _WORKERS else (0, [])),
            )
            for name, kind in shown
        ]  # fmt: skip

    def _spans(
        self, name: str, kind: str, between: tuple[Seconds, Seconds], began: Seconds, most: int
    ) -> list[tuple[Seconds, Seconds, str]]:
        start, end = between
        timeline = self._own if kind in (TRAINER, "host") else self._fleet.timeline
        spans = cut(timeline.rows.get(name, []), start, end)
        since = timeline.doing(name)
        if since is not None and since[0] < end:
            spans.append((max(since[0], start), end, since[1]))
        return [(one - began, other - began, what) for one, other, what in thin(spans, start, end, most)]

    def _num_within(self, worker: str, between: tuple[Seconds, Seconds]) -> int:
        return sum(1 for _ in self._leases.within(worker, between))

    def _leases_within(
        self, row: TimelineRow, between: tuple[Seconds, Seconds], began: Seconds, most: int = _MAX_LEASES
    ) -> list[LeaseSpan]:
        """Return the leases of a row; none where there are more than `most`."""
        if not 0 < row.num_leases <= most:
            return []
        return [
            one._replace(start_s=one.start_s - began, end_s=None if one.end_s is None else one.end_s - began)
            for one in self._leases.within(row.name, between)
        ]

    # Reading

    def _follow(self) -> None:
        try:
            for header, records in self._journals():
                with self._lock:
                    self._begin(header)
                for record in records:
                    with self._lock:
                        if not self._hear(record):
                            return
        except CutShort:
            pass  # its writer was killed, or we were stopped
        except (JournalError, UserError, OSError) as error:
            self.trouble = str(error)
        except Exception as error:
            self.trouble = f"the journal cannot be followed further: {type(error).__name__}: {error}"
            raise  # our mistake: the traceback is printed, and nobody waits for the rest
        self.is_at_end = True

    def _journals(self) -> Iterator[tuple[JournalHeader, Iterator[Record]]]:
        done: set[Path] = set()
        while True:
            files = self._files(is_first=not done)
            self._all_bytes = sum(file.stat().st_size for file in files)
            following = [file for file in files if file not in done]
            if following:
                done.add(following[0])
                yield read_records(self._chunks(following[0]), str(following[0]))
            elif not self._live:
                return
            else:
                self.is_at_end = True
                if self._stop.wait(_LOOK_AGAIN_S):
                    return

    def _files(self, *, is_first: bool) -> list[Path]:
        """Return the journals so far: none in a live run that its trainer has not opened yet."""
        try:
            return find_begun(self._path)
        except JournalError:
            if not self._live or not is_first or not self._path.is_dir():
                raise
            return []

    def _chunks(self, path: Path) -> Iterator[bytes]:
        """Yield a file's bytes; at its end, wait for more until a newer file is there."""
        is_over = False
        with path.open("rb") as file:
            while True:
                if chunk := file.read(_CHUNK_BYTES):
                    self._read_bytes += len(chunk)
                    yield chunk
                    continue
                if is_over or not self._live:
                    return
                self.is_at_end = True
                if self._stop.wait(_LOOK_AGAIN_S):
                    return
                files = find_begun(self._path)
                is_over = files[-1] != path
                self._all_bytes = max(self._read_bytes, sum(one.stat().st_size for one in files))

    def _begin(self, header: JournalHeader) -> None:
        is_first = self._scheduler is None
        self._scheduler = resume_scheduler(header, self._scheduler)
        if is_first:
            self._fleet.take_over(self._scheduler.desk.seats.values(), self._scheduler.ledger)

    def _hear(self, record: Record) -> bool:
        scheduler, now = self._scheduler, record.now
        assert scheduler is not None
        commands = scheduler.handle(record.event, now)
        self._now = max(self._now, now)
        if digest_commands(commands) != record.commands_digest:
            self.trouble = (
                f"record {record.number}: this version of PolyRL decides otherwise than the one that wrote it"
            )
            return False
        if commands or self._fleet.misses or not isinstance(record.event, _STEADY):
            self._fleet.look(scheduler.desk.seats, record.event, commands, now, scheduler.ledger)
            self._watch_own(scheduler, now)
            self._use.mark(scheduler.desk, now)
        self._end_lease(record.event, now)
        for command in commands:
            self._take(command, scheduler, now)
        if isinstance(record.event, _GOINGS) or any(isinstance(one, c.ForgetWorker) for one in commands):
            self._leases.end_lost(scheduler.desk.leases, now)
        return True

    def _watch_own(self, scheduler: Scheduler, now: Seconds) -> None:
        """Mark what the trainer and the hosts do."""
        clock, hosts = scheduler.desk.state.clock, scheduler.desk.hosts.seats.values()
        does = (
            "validating" if clock.validating_since is not None else "training" if clock.busy_since is not None else ""
        )
        self._own.mark(TRAINER, does or ("idle" if clock.idle_since is not None else None), now)
        there = {f"host {host.name}": "generating" if host.episodes else "idle" for host in hosts}
        for name in self._hosts - there.keys():
            self._own.mark(name, None, now)
        for name, activity in there.items():
            self._own.mark(name, activity, now)
        self._hosts = set(there)

    def _end_lease(self, event: e.Event, now: Seconds) -> None:
        match event:
            case e.SampleFinished():
                self._leases.end(event.lease, now, "finished", event.num_tokens)
            case e.LeaseEnded():
                self._leases.end(event.lease, now, "moved", event.num_tokens)
            case _:
                pass

    def _take(self, command: c.Command, scheduler: Scheduler, now: Seconds) -> None:
        match command:
            case c.Generate():
                self._leases.begin(command, now)
            case c.Abort():
                self._leases.end(command.lease, now, "stopped", None)
            case c.OpenRound():
                for group in command.groups:
                    self._plan(group, command.step, scheduler)
            case c.AddGroup():
                self._plan(command.group, command.step, scheduler)
            case c.DeliverGroup():
                self._delivered[command.group] = tuple(command.samples)
            case c.ReportStep():
                self._lines.append(command.line)
            case _:
                pass

    def _plan(self, group: c.PlannedGroup, step: int, scheduler: Scheduler) -> None:
        name = scheduler.desk.config.domains[group.domain].name
        self._groups[group.group] = GroupPrompt(step, name, group.domain, group.prompt, group.epoch)
        while len(self._groups) > _MAX_GROUPS:
            oldest = next(iter(self._groups))
            del self._groups[oldest]
            self._delivered.pop(oldest, None)


def cut(spans: Sequence[Span], start: Seconds, end: Seconds) -> list[tuple[Seconds, Seconds, str]]:
    """Return the spans between two moments. They are in order, and do not overlap."""
    first = max(0, bisect_left(spans, start, key=lambda span: span.end_s))
    found: list[tuple[Seconds, Seconds, str]] = []
    for span in spans[first:]:
        if span.start_s >= end:
            break
        found.append((max(span.start_s, start), min(span.end_s, end), span.activity))
    return found


def thin(
    spans: list[tuple[Seconds, Seconds, str]], start: Seconds, end: Seconds, most: int
) -> list[tuple[Seconds, Seconds, str]]:
    """Return at most `most` spans: of more, each part of the time gets the activity that fills most of it."""
    if len(spans) <= most or end <= start:
        return spans
    width = (end - start) / most
    filled: list[dict[str, float]] = [{} for _ in range(most)]
    for since, until, activity in spans:
        place = int((since - start) / width)
        while place < most and start + place * width < until:
            within = min(until, start + (place + 1) * width) - max(since, start + place * width)
            filled[place][activity] = filled[place].get(activity, 0.0) + max(0.0, within)
            place += 1
    found: list[tuple[Seconds, Seconds, str]] = []
    for place, amounts in enumerate(filled):
        if amounts:
            activity = max(amounts, key=amounts.__getitem__)
            since, until = start + place * width, start + (place + 1) * width
            if found and found[-1][2] == activity and found[-1][1] >= since - width / 2:
                found[-1] = (found[-1][0], until, activity)
            else:
                found.append((since, until, activity))
    return found
