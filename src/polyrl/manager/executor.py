"""The live driver: turns what peers say into events, and the scheduler's commands into what peers are told.

It has one owner (service.py). Frames and questions wait in an inbox; the owner takes all that are there, tells the
scheduler, writes the journal once, and only then sends, answers and acknowledges.

Rules kept here:
- Nothing leaves before what led to it is in the journal; only a goodbye does, and it changes nothing.
- Payload goes into the journal as it came, and never into the scheduler; the scheduler hears of a worker's progress
  every few seconds, and of an answer's end at once.
- A peer that says what cannot be true is cut off, counted, and its samples move on. It harms nobody else.
- A peer that connects, for the first time or again, says what it holds, and is sent what it lacks.
"""

import logging
import math
import secrets
import time
from collections import Counter, deque
from typing import assert_never

from polyrl.errors import LawViolation
from polyrl.ids import GroupId, Incarnation, LeaseId, SampleId, Seconds, Step, Version, WorkerName, group_of
from polyrl.manager.journal import (
    Granted,
    PromptsSupplied,
    RewardKept,
    RunJournal,
    RunOpened,
    SessionOpened,
)
from polyrl.manager.payload import Payload, append_cells, without_rows
from polyrl.manager.sessions import Link, TrainerSession, WorkerSession
from polyrl.manager.settings import ManagerSettings
from polyrl.scheduling import commands as c
from polyrl.scheduling import events as e
from polyrl.scheduling.fleet import Worker
from polyrl.scheduling.order import mix64
from polyrl.scheduling.parameters import SchedulerConfig
from polyrl.scheduling.samples import NO_VERSION, Sample
from polyrl.scheduling.scheduler import Scheduler
from polyrl.wire import columns, frames
from polyrl.wire.columns import CELL_BYTES, BadColumns
from polyrl.wire.control import JoinReply, JoinRequest, RunReply, RunRequest

log = logging.getLogger("polyrl.manager")

_TELL_PROGRESS_EVERY_S = 2.0
_MAX_PROMPT_TOKENS = 1 << 24
_COMPANY = 32
"""So many workers send at the same moments."""
_PHASES = 8


class RequestError(Exception):
    """What somebody asked for cannot be: they are told, and everything goes on."""


class Refused(RequestError):
    """A peer said what cannot be. `kind` is what it is counted as."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class Executor:
    def __init__(self, journal: RunJournal, settings: ManagerSettings, about: dict[str, str]) -> None:
        self._journal = journal
        self._settings = settings
        self._about = about
        self.scheduler: Scheduler | None = None
        self.payload = Payload()
        self.workers: dict[WorkerName, WorkerSession] = {}
        self.lives: dict[WorkerName, Incarnation] = {}
        self.taken_over: set[str] = set()
        """Sessions whose name another process has now: were they to join again, the two would take turns."""
        self.trainer: TrainerSession | None = None
        self.refused: Counter[str] = Counter()
        self.num_tokens = 0
        """Tokens that came in since this process started."""
        self.num_frames = 0
        self._clock_base = 0.0
        self._clock_start = time.monotonic()
        self._events: deque[e.Event] = deque()
        self._telling = False
        self._granted = Granted([], [], [], [])
        self._no_prompt_yet: dict[GroupId, list[LeaseId]] = {}
        self._dirty: dict[str, WorkerSession] = {}
        self.is_urgent = False
        """Somebody waits for what is to be sent; tokens alone are no hurry."""

    # Time

    def now(self) -> Seconds:
        return self._clock_base + time.monotonic() - self._clock_start

    def set_clock(self, now: Seconds) -> None:
        self._clock_base, self._clock_start = now, time.monotonic()

    def wakeup_in(self) -> Seconds | None:
        """How long until the scheduler wants to be told that time has passed."""
        at = None if self.scheduler is None else self.scheduler.wakeup_at
        return None if at is None else max(0.0, at - self.now())

    def pass_time(self) -> None:
        if self.wakeup_in() == 0.0:
            self.tell(e.TimePassed())

    # The scheduler

    def tell(self, event: e.Event) -> None:
        """Tell the scheduler and carry out what it wants. What that leads to is told after it."""
        if self.scheduler is None:
            return
        self._events.append(event)
        if self._telling:
            return
        self._telling = True
        try:
            while self._events:
                event = self._events.popleft()
                now = self.now()
                commands = self.scheduler.handle(event, now)
                self._journal.add_event(now, event, commands)
                for command in commands:
                    self.is_urgent = True
                    self._carry_out(command)
        finally:
            self._telling = False

    def commit(self) -> None:
        """Write the journal; then send."""
        self.is_urgent = False
        self._note_grants()
        self._journal.commit()
        self._journal.rotate_if_due(self.scheduler, self._about, self._standing())
        now = self.now()
        for session in self._dirty.values():
            session.flush(now)
        self._dirty.clear()
        if self.trainer is not None:
            self.trainer.flush()

    def _standing(self) -> list[SessionOpened | RunOpened]:
        notes: list[SessionOpened | RunOpened] = [
            SessionOpened(one.key, one.incarnation, one.facts) for one in self.workers.values()
        ]
        if self.trainer is not None:
            notes.append(RunOpened(self.trainer.key, self.trainer.has_reward))
        return notes

    def _note_grants(self) -> None:
        if self._granted.leases:
            self._journal.add_note(self._granted)
            self._granted = Granted([], [], [], [])

    def _session(self, name: WorkerName) -> WorkerSession | None:
        session = self.workers.get(name)
        if session is not None:
            self._dirty[session.key] = session
        return session

    def seat_of(self, session: WorkerSession) -> Worker | None:
        """The worker as the scheduler knows it; None if it was given up, or there is no run."""
        if self.scheduler is None:
            return None
        return self.scheduler.desk.state.fleet.find(session.name, session.incarnation)

    @property
    def restart_grace_s(self) -> Seconds:
        return self._settings.restart_grace_s

    def write_down_what_holds(self) -> None:
        """After a restart: sessions and leases as we know them, whatever half of a batch was on file before."""
        assert self.scheduler is not None
        for note in self._standing():
            self._journal.add_note(note)
        desk = self.scheduler.desk
        granted = self._granted
        for lease, sample in desk.leases.items():
            text = self.payload.text(sample.id)
            text.worker = desk.seats[sample.worker].name
            granted.leases.append(lease)
            granted.samples.append(sample.id)
            granted.from_tokens.append(text.num_tokens)
            granted.workers.append(text.worker)

    def expect_prompts(self) -> None:
        """After a restart: leases that were given before their prompt was there are sent when it is."""
        assert self.scheduler is not None
        for sample in self.scheduler.desk.leases.values():
            if sample.group not in self.payload.prompts:
                self._no_prompt_yet.setdefault(sample.group, []).append(sample.lease)

    # Commands

    def _carry_out(self, command: c.Command) -> None:
        match command:
            case c.Generate():
                self._generate(command)
            case c.Abort():
                if (session := self._session(command.worker)) is not None:
                    session.abort(command.lease)
            case c.HandOver():
                if (session := self._session(command.worker)) is not None:
                    session.hand_over(command.lease)
            case c.PullWeights():
                if (session := self._session(command.worker)) is not None:
                    held = NO_VERSION if command.held is None else command.held
                    session.say(frames.Pull(command.version, command.source or "", held))
            case c.ReleaseWorker():
                if (session := self._session(command.worker)) is not None:
                    session.say(frames.Release(command.why))
            case c.ForgetWorker():
                self._forget(command.worker, command.why, rejoin=True)
            case c.Score():
                self._score(command.sample, command.attempt, command.timeout_s)
            case c.StartTraining() | c.StartGenerating() | c.Reshape():
                raise LawViolation(f"no worker here shares a trainer's devices: {command}")
            case _:
                self._tell_trainer(command)

    def _tell_trainer(self, command: c.Command) -> None:
        match command:
            case c.OpenRound():
                for group in command.groups:
                    self.payload.expect(command.step, group.group)
                self._say(_opened(command.step, command.kind, command.groups, command.why))
            case c.AddGroup():
                self.payload.expect(command.step, command.group.group)
                self._say(_opened(command.step, "", (command.group,), command.why))
            case c.CancelScore():
                self._say(frames.CancelScoring(command.sample, command.attempt))
            case c.DeliverGroup():
                self._deliver(command.step, command.group, command.samples)
            case c.DropGroup():
                self.payload.drop_group(command.group)
                self._no_prompt_yet.pop(command.group, None)
                self._say(frames.Dropped(command.group, command.why))
            case c.CloseRound():
                self._say(self._closed(command.step))
            case c.EndData():
                self._say(frames.DataEnded(command.step))
            case c.ReportStep():
                self.payload.drop_step(command.line.step)
                self._say(frames.StepReported(command.line))
            case c.AdviseFleet():
                self._say(frames.FleetAdvised(command.num_workers, command.why))
            case _:
                raise LawViolation(f"nobody carries this out: {command}")

    def _say(self, frame: frames.ToTrainer) -> None:
        if self.trainer is not None:
            self.trainer.say(frame)

    def _generate(self, command: c.Generate) -> None:
        assert self.scheduler is not None
        text = self.payload.text(command.sample)
        migrates = self.scheduler.desk.config.fleet_rules.migrate
        from_token = text.num_tokens if migrates else command.from_token
        text.lease_to(command.worker, from_token)
        granted = self._granted
        granted.leases.append(command.lease)
        granted.samples.append(command.sample)
        granted.from_tokens.append(from_token)
        granted.workers.append(command.worker)
        if group_of(command.sample) in self.payload.prompts:
            self._order(command.lease)
        else:
            self._no_prompt_yet.setdefault(group_of(command.sample), []).append(command.lease)

    def _order(self, lease: LeaseId) -> None:
        """Send a lease to its worker, if it is still one."""
        assert self.scheduler is not None
        desk = self.scheduler.desk
        sample = desk.leases.get(lease)
        if sample is None:
            return
        session = self._session(desk.seats[sample.worker].name)
        prompt = self.payload.prompts.get(sample.group)
        if session is None or prompt is None:
            return
        session.order(
            frames.Order(
                lease,
                sample.id,
                prompt.tokens,
                columns.tokens_of(self.payload.text(sample.id).cells),
                desk.max_new_tokens,
                mix64(desk.config.seed, sample.id) >> 1,
                prompt.sampling,
            )
        )

    def _score(self, sample: SampleId, attempt: int, timeout_s: Seconds) -> None:
        if self.trainer is not None and not self.trainer.has_reward:
            self.tell(e.RewardFinished(sample, attempt, "scored"))
        else:
            self._say(frames.ScoreThese((frames.ScoreThis(attempt, timeout_s, self.payload.sample_text(sample)),)))

    def _deliver(self, step: Step, group: GroupId, samples: tuple[SampleId, ...]) -> None:
        self._say(frames.Delivered(step, group, tuple(map(self.payload.sample_text, samples))))

    def _closed(self, step: Step) -> frames.Closed:
        assert self.scheduler is not None
        desk = self.scheduler.desk
        groups = [desk.groups[group] for group in desk.rounds[step].groups]
        delivered, taken = (tuple(one.id for one in groups if one.state == state) for state in ("delivered", "taken"))
        return frames.Closed(step, delivered, taken)

    def _forget(self, name: WorkerName, why: str, *, rejoin: bool = False, in_anger: bool = False) -> None:
        session = self.workers.pop(name, None)
        if session is None:
            return
        self._dirty.pop(session.key, None)
        log.info("worker %s is given up: %s", name, why)
        if session.link is not None:
            session.link.send(frames.encode(frames.Release(why, rejoin, in_anger)))
            session.link.close(why)

    # Joining

    def join(self, request: JoinRequest) -> JoinReply:
        name = WorkerName(request.name)
        if name in self.workers:
            self.taken_over.add(self.workers[name].key)
        self._forget(name, "another process joined under its name", in_anger=True)
        incarnation = Incarnation(self.lives.get(name, 0) + 1)
        self.lives[name] = incarnation
        session = WorkerSession(secrets.token_hex(16), incarnation, request)
        session.heard_at = session.told_at = self.now()
        self.workers[name] = session
        self._journal.add_note(SessionOpened(session.key, incarnation, request))
        log.info("worker %s joined: %s, %d slots", name, request.engine, request.slots)
        if self.scheduler is not None:
            self._tell_joined(session)
        stream = self._settings.stream
        return JoinReply(
            worker=name,
            session=session.key,
            heartbeat_interval_s=stream.heartbeat_interval_s,
            flush_interval_s=stream.flush_interval_s,
            flush_phase_s=self._next_phase() * stream.flush_interval_s,
            max_frame_bytes=frames.MAX_WORKER_FRAME_BYTES,
        )

    def _next_phase(self) -> float:
        """Workers send in companies: a frame that comes alone finds the manager cold and costs twice as much."""
        company = len(self.workers) // _COMPANY
        return (company % _PHASES) / _PHASES

    def _tell_joined(self, session: WorkerSession) -> None:
        facts = session.facts
        self.tell(
            e.WorkerJoined(
                session.name,
                session.incarnation,
                slots=facts.slots,
                spot=facts.spot,
                num_devices=facts.num_devices,
                price_usd_per_hour=facts.price_usd_per_hour,
                kv_tokens=facts.kv_tokens,
                version=None if facts.version is None else Version(facts.version),
                starting_s=facts.starting_s,
            )
        )

    def find_worker(self, key: str) -> WorkerSession | None:
        given = key.encode(errors="replace")  # compare_digest takes no text beyond ASCII
        return next((one for one in self.workers.values() if secrets.compare_digest(one.key.encode(), given)), None)

    def open_run(self, request: RunRequest) -> RunReply:
        """Open the run, or go on with it. Raises Refused for a configuration that is not the run's."""
        fresh = self.scheduler is None
        if self.scheduler is None:
            scheduler = Scheduler(request.config)
            self._journal.begin_events(request.config, self._about)
            self.scheduler = scheduler
            self.set_clock(0.0)
        elif request.config != self.scheduler.desk.config:
            raise Refused("run", f"the run is open with another configuration: {_differs(request.config, self)}")
        if self.trainer is not None and self.trainer.link is not None:
            self.trainer.link.close("another trainer opened the run")
        self.trainer = TrainerSession(secrets.token_hex(16), has_reward=request.has_reward)
        self._journal.add_note(RunOpened(self.trainer.key, request.has_reward))
        if fresh:
            for session in self.workers.values():
                session.heard_at = session.told_at = self.now()
                self._tell_joined(session)
        state = self.scheduler.desk.state
        return RunReply(
            session=self.trainer.key,
            fresh=fresh,
            published=state.published,
            last_requested=state.last_requested,
            open_steps=tuple(state.rounds),
        )

    def drain(self, name: WorkerName, reason: str) -> bool:
        """Whether there is such a worker."""
        session = self.workers.get(name)
        if session is None:
            return False
        if self.seat_of(session) is None:
            self._forget(name, reason)
        else:
            self.tell(e.DrainRequested(name, session.incarnation, reason))
        return True

    # What workers say

    def worker_said(self, session: WorkerSession, link: Link, raw: bytes) -> None:
        if self.workers.get(session.name) is not session or session.link is not link:
            link.close("that session is over, or has another connection")
            return
        self.num_frames += 1
        try:
            self._hear_worker(session, raw)
        except Refused as refused:
            self._refuse(session, refused)

    def _hear_worker(self, session: WorkerSession, raw: bytes) -> None:
        try:
            frame = frames.decode_from_worker(raw)
        except frames.NO_FRAME as error:
            raise Refused("frame", f"not a frame: {error}") from error
        if not session.greeted and not isinstance(frame, frames.Hello):
            raise Refused("order", f"a {type(frame).__name__} before a Hello")
        session.heard_at = self.now()
        self._dirty[session.key] = session
        match frame:
            case frames.Tokens():
                self._tokens(session, frame, raw)
            case frames.Report():
                self._report(session, frame)
            case frames.Hello():
                self._hello(session, frame)
            case frames.Installed():
                self._check_version(frame.version)
                self.tell(e.WeightsInstalled(session.name, session.incarnation, Version(frame.version)))
            case frames.InstallFailed():
                version = Version(frame.version)
                self.tell(e.WeightsFailed(session.name, session.incarnation, version, frame.reason))
            case frames.Leaving():
                self.drain(session.name, frame.reason)
            case frames.Goodbye():
                self.tell(e.WorkerLeft(session.name, session.incarnation, frame.reason))
                self._forget(session.name, frame.reason)
            case _:
                assert_never(frame)

    def _refuse(self, session: WorkerSession, refused: Refused) -> None:
        self.refused[refused.kind] += 1
        log.warning("worker %s is refused: %s", session.name, refused)
        self.tell(e.WorkerLeft(session.name, session.incarnation, f"refused: {refused}"))
        self._forget(session.name, f"refused: {refused}", in_anger=True)

    def _check_version(self, version: int) -> None:
        if self.scheduler is None or version > self.scheduler.desk.state.published:
            raise Refused("version", f"version {version} was never published")

    def _hello(self, session: WorkerSession, hello: frames.Hello) -> None:
        if len(hello.leases) % 8:
            raise Refused("columns", "a column ends inside a number")
        if session.greeted:
            raise Refused("order", "a second Hello on one connection")
        session.greeted = self.is_urgent = True
        worker = self.seat_of(session)
        if worker is None or self.scheduler is None:
            session.say(frames.Welcome(()))
            return
        desk = self.scheduler.desk
        theirs = list(map(LeaseId, columns.unpack_column("Q", hello.leases)))
        ours = worker.leases
        held = tuple(frames.Held(one, self.payload.text(ours[one]).num_tokens) for one in theirs if one in ours)
        session.say(frames.Welcome(held))
        if worker.version < hello.version <= desk.state.published:  # as at a join, any other is as good as none
            self.tell(e.WeightsInstalled(session.name, session.incarnation, Version(hello.version)))
        if worker.pulling != NO_VERSION:
            source = desk.seats.get(worker.source)
            session.say(frames.Pull(worker.pulling, "" if source is None else source.name, worker.version))
        known = frozenset(theirs)
        for lease in list(ours):
            sample = desk.leases[lease]
            if lease not in known:
                self._order_again(lease, sample)
            elif sample.state == "stopping":
                session.hand_over(lease)
        if hello.draining:
            self.drain(session.name, hello.draining)
        if worker.state == "draining" and not worker.leases:
            session.say(frames.Release("it has handed everything over"))

    def _order_again(self, lease: LeaseId, sample: Sample) -> None:
        """A lease that its worker never heard of, or has forgotten: it had better start, or end, now."""
        if sample.state == "stopping":
            self.tell(e.LeaseEnded(lease, self.payload.text(sample.id).num_tokens, "handed_over"))
        else:
            self._order(lease)

    def _tokens(self, session: WorkerSession, frame: frames.Tokens, raw: bytes) -> None:
        worker = self.seat_of(session)
        if worker is None or self.scheduler is None:
            raise Refused("order", "tokens before any lease")
        desk = self.scheduler.desk
        try:
            column = columns.check(frame.leases, frame.offsets, frame.counts, frame.versions, frame.cells)
        except BadColumns as error:
            raise Refused("columns", str(error)) from error
        if column.leases:
            if max(map(int.__add__, column.offsets, column.counts)) > desk.max_new_tokens:
                raise Refused("budget", f"more than {desk.max_new_tokens} tokens of a sample")
            self._check_versions(worker, column)
        session.acknowledge(frame.seq, has_ends=bool(frame.ended))
        idle, num_gaps = self._append(worker, column, frame.cells)
        self._journal_tokens(worker, frame, raw, column, idle)
        for ended in frame.ended:
            self._ended(worker, ended)
        if num_gaps:
            raise Refused("offset", f"{num_gaps} samples with a gap in their tokens")

    def _check_versions(self, worker: Worker, column: columns.Columns) -> None:
        """Nobody writes with weights that it has not got yet, or had before its lease was given."""
        assert self.scheduler is not None
        oldest, newest = min(column.versions), max(column.versions)
        if not 0 <= oldest <= newest <= worker.version:
            raise Refused("version", f"tokens of a version that it does not hold; it holds {worker.version}")
        if oldest == worker.version:
            return
        for lease, version in zip(column.leases, column.versions, strict=True):
            sample = self.scheduler.desk.leases.get(LeaseId(lease))
            if sample is not None and sample.worker == worker.seat and version < sample.version:
                raise Refused("version", f"tokens of version {version}; the lease was given to {sample.version}")

    def _journal_tokens(
        self, worker: Worker, frame: frames.Tokens, raw: bytes, column: columns.Columns, idle: list[int]
    ) -> None:
        """What was taken in, and nothing else: at a restart nobody asks whose lease it was."""
        self._note_grants()  # the order in the journal tells late tokens from timely ones
        ended = tuple(one for one in frame.ended if one.lease in worker.leases)
        if not idle and len(ended) == len(frame.ended):
            self._journal.add_tokens(raw)
        elif len(idle) < len(column.leases) or ended:
            self._journal.add_tokens(frames.encode(without_rows(frame, column, frozenset(idle), ended)))

    def _append(self, worker: Worker, column: columns.Columns, cells: bytes) -> tuple[list[int], int]:
        """Add a frame's tokens to their samples.

        Returns the rows that brought nothing, by where their cells start, and how many of them left a gap.
        """
        assert self.scheduler is not None
        leases, texts, seat = self.scheduler.desk.leases, self.payload.texts, worker.seat
        start = num_gaps = num_missing = 0
        idle: list[int] = []
        # The hottest loop there is: once a frame and running sample. See `polyrl bench relay`.
        for lease, offset, count, version, end in zip(*column, strict=False):
            sample = leases.get(lease)  # pyright: ignore[reportArgumentType]  a number becomes a lease by being found
            if sample is None or sample.worker != seat:
                self.refused["late_lease"] += 1
                idle.append(start)
                num_missing += count
            else:
                text = texts[sample.id]
                buffer = text.cells
                if version == text.version and len(buffer) == offset * CELL_BYTES:
                    buffer += cells[start:end]
                else:
                    num_new = append_cells(text, offset, version, cells[start:end])
                    num_gaps += num_new < 0
                    num_missing += count - max(0, num_new)
                    if num_new <= 0:
                        idle.append(start)
            start = end
        self.num_tokens += start // CELL_BYTES - num_missing
        return idle, num_gaps

    def _ended(self, worker: Worker, ended: frames.Ended) -> None:
        assert self.scheduler is not None
        sample = self.scheduler.desk.leases.get(LeaseId(ended.lease))
        if sample is None or sample.worker != worker.seat:
            self.refused["late_lease"] += 1
            return
        text = self.payload.text(sample.id)
        if ended.num_tokens != text.num_tokens:
            raise Refused("offset", f"an end after {ended.num_tokens} tokens; {text.num_tokens} have come")
        if ended.reason == "stop" or ended.reason == "length":
            if text.num_tokens == 0:
                raise Refused("budget", "an answer without a token")
            text.finish = ended.reason
            self.tell(e.SampleFinished(sample.lease, ended.num_tokens))
        else:
            if ended.reason != "handed_over":
                log.warning("sample %s on %s: %s: %s", sample.id, worker.name, ended.reason, ended.detail)
            self.tell(e.LeaseEnded(sample.lease, ended.num_tokens, ended.reason))

    def _report(self, session: WorkerSession, report: frames.Report) -> None:
        session.report = report
        worker = self.seat_of(session)
        if worker is None:
            return
        now = self.now()
        if worker.leases and now - session.told_at >= _TELL_PROGRESS_EVERY_S:
            session.told_at = now
            texts = self.payload.texts
            counts = tuple(texts[sample].num_tokens for sample in worker.leases.values())
            self.tell(e.TokensArrived(session.name, session.incarnation, tuple(worker.leases), counts))
        self.tell(
            e.WorkerReported(session.name, session.incarnation, report.num_waiting, report.num_preemptions),
        )

    # What the trainer says

    def trainer_said(self, session: TrainerSession, link: Link, raw: bytes) -> None:
        if self.trainer is not session or session.link is not link:
            link.close("that session is over, or has another connection")
            return
        self.num_frames += 1
        try:
            self._hear_trainer(session, raw)
        except Refused as refused:
            self.refused[refused.kind] += 1
            log.warning("the trainer is refused: %s", refused)
            link.send(frames.encode(frames.Release(f"refused: {refused}")))
            link.close(str(refused), code=1008)
            self.trainer_gone(session, link)

    def _hear_trainer(self, session: TrainerSession, raw: bytes) -> None:
        try:
            frame = frames.decode_from_trainer(raw)
        except frames.NO_FRAME as error:
            raise Refused("frame", f"not a frame: {error}") from error
        if isinstance(frame, frames.TrainerHello):
            self._greet_trainer(session)
            return
        if not session.greeted:
            raise Refused("order", f"a {type(frame).__name__} before a TrainerHello")
        self._state(frame)
        session.acknowledge(frame.seq)

    def _state(self, frame: frames.Statement) -> None:
        match frame:
            case frames.RequestRound():
                self._request_round(Step(frame.step))
            case frames.SupplyPrompts():
                self._supply(frame)
            case frames.Scored():
                self._scored(frame)
            case frames.Took():
                self.tell(e.GroupsTaken(Step(frame.step), tuple(map(GroupId, frame.groups))))
            case frames.Rejected():
                self.tell(e.GroupRejected(GroupId(frame.group), frame.reason))
            case frames.MicroBatchDone():
                self.tell(e.MicroBatchTrained(Step(frame.step)))
            case frames.StepDone():
                self.tell(e.StepTrained(Step(frame.step)))
            case frames.Published():
                self.tell(e.VersionPublished(Version(frame.version)))
            case _:
                assert_never(frame)

    def _request_round(self, step: Step) -> None:
        assert self.scheduler is not None
        self.tell(e.RoundRequested(step))
        ended_at = self.scheduler.desk.state.data_ended_at
        if ended_at is not None and step >= ended_at:
            self._say(frames.DataEnded(step))

    def _supply(self, frame: frames.SupplyPrompts) -> None:
        assert self.scheduler is not None
        groups = self.scheduler.desk.groups
        wanted = tuple(one for one in frame.prompts if one.group in groups and one.group not in self.payload.prompts)
        for prompt in wanted:
            if len(prompt.tokens) % 4 or not 0 < len(prompt.tokens) <= 4 * _MAX_PROMPT_TOKENS:
                raise Refused("prompt", f"group {prompt.group}: a prompt of {len(prompt.tokens) / 4:g} tokens")
        if wanted:
            self._note_grants()
            self._journal.add_note(PromptsSupplied(wanted))
        for prompt in wanted:
            group = GroupId(prompt.group)
            self.payload.prompts[group] = prompt
            for lease in self._no_prompt_yet.pop(group, ()):
                self._order(lease)

    def _scored(self, frame: frames.Scored) -> None:
        if not math.isfinite(frame.value):
            raise Refused("reward", f"sample {frame.sample}: a reward of {frame.value}")
        assert self.scheduler is not None
        desk, sample = self.scheduler.desk, SampleId(frame.sample)
        is_awaited = sample in desk.scoring.running and desk.samples[sample].attempt == frame.attempt
        if is_awaited and frame.outcome != "infrastructure_failed":
            self.payload.text(sample).reward = frame.value
            self._journal.add_note(RewardKept(frame.sample, frame.value))
        self.tell(e.RewardFinished(sample, frame.attempt, frame.outcome, frame.correct, frame.cpu_s))

    def _greet_trainer(self, session: TrainerSession) -> None:
        """Send all that it needs to go on, whatever it has heard before."""
        assert self.scheduler is not None
        session.greeted = self.is_urgent = True
        session.away_since = None
        self.tell(e.TrainerReturned())
        desk = self.scheduler.desk
        if desk.state.data_ended_at is not None:
            session.say(frames.DataEnded(desk.state.data_ended_at))
        for round_ in desk.rounds.values():
            missing = [desk.groups[one] for one in round_.groups if one not in self.payload.prompts]
            plans = tuple(c.PlannedGroup(one.id, one.domain, one.prompt, one.epoch, one.num_samples) for one in missing)
            session.say(_opened(round_.step, round_.kind, plans, "it is open"))
            for group_id in round_.groups:
                group = desk.groups[group_id]
                if group.state == "delivered":
                    kept = [one for one in group.sample_ids() if desk.samples[one].state == "scored"]
                    self._deliver(round_.step, group_id, tuple(kept))
            if round_.closed_at is not None:
                session.say(self._closed(round_.step))
        for sample in list(desk.scoring.running):  # without a reward function, each ends at once
            if sample in desk.scoring.running:
                self._score(sample, desk.samples[sample].attempt, desk.config.rewards.t_max_s)

    # Connections that ended

    def worker_gone(self, session: WorkerSession, link: Link) -> None:
        """Its connection broke: it may dial again. If not, its heartbeat is missed."""
        if session.link is link:
            session.link, session.greeted = None, False

    def trainer_gone(self, session: TrainerSession, link: Link) -> None:
        if session.link is link:
            session.link, session.greeted = None, False
            session.away_since = self.now()
            self.tell(e.TrainerLeft())


def _opened(step: int, kind: str, groups: tuple[c.PlannedGroup, ...], why: str) -> frames.Opened:
    plans = (frames.GroupPlan(one.group, one.domain, one.prompt, one.epoch, one.num_samples) for one in groups)
    return frames.Opened(step, kind, tuple(plans), why)


def _differs(config: SchedulerConfig, executor: Executor) -> str:
    """The first key in which a configuration is not the run's."""
    assert executor.scheduler is not None
    ours = executor.scheduler.desk.config
    for name in config.__struct_fields__:
        if getattr(config, name) != getattr(ours, name):
            return f"{name} is {getattr(ours, name)!r}, not {getattr(config, name)!r}"
    return "nothing"
