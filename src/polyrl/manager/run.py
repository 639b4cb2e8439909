"""An open run: its scheduler, its payload, and the only way to the scheduler: tell an event, carry its commands out.

Rules kept here:
- Payload goes into the journal as it came, and never into the scheduler.
- An event that another event leads to is told after it, never within it.
- Heartbeats and progress are told together, as one event, when something depends on them (scheduling/parts/hearing.py
  says when): progress and what engines hold back every few seconds, a heartbeat when its deadline comes near.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from polyrl.ids import GroupId, LeaseId, SampleId, Seconds
from polyrl.manager.lobby import Lobby
from polyrl.manager.notes import Granted, RunOpened, VersionOffered
from polyrl.manager.payload import Payload, SampleTokens
from polyrl.manager.peers.sessions import TrainerSession, WorkerSession
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.desk import Desk
from polyrl.scheduling.core.fleet import Worker
from polyrl.scheduling.core.samples import TrackedSample
from polyrl.scheduling.parts.hearing import MS_A_TICK, concerned, runs_of, teaches
from polyrl.scheduling.scheduler import Scheduler
from polyrl.wire import frames
from polyrl.wire.columns import ANY_VOCABULARY, Vocabulary
from polyrl.wire.control import AnswerRules

if TYPE_CHECKING:
    from polyrl.manager.asking import Question

CarryOut = Callable[["Run", c.Command], None]

_TELL_EVERY_BEATS = 2.0
AT_LAST_BEATS = 5.0
"""The samples that an engine holds back are told after so many heartbeats, although nothing depended on it."""


class Run:
    def __init__(self, lobby: Lobby, scheduler: Scheduler, carry_out: CarryOut) -> None:
        self.lobby = lobby
        self.scheduler = scheduler
        self.desk: Desk = scheduler.desk
        self._carry_out = carry_out
        self.payload = Payload()
        self.trainer: TrainerSession | None = None
        """None in a run without one, that only answers questions."""
        self.rewards: tuple[frames.RewardsTold, Seconds] | None = None
        """The trainer's last word on its reward functions, and when it came."""
        self.questions: dict[GroupId, Question] = {}
        """Open questions: what was asked beside the trainer."""
        self.no_prompt_yet: dict[GroupId, list[LeaseId]] = {}
        """Leases that wait for their group's prompt."""
        self.no_task_yet: dict[GroupId, list[SampleId]] = {}
        """Episodes that wait for their group's task."""
        self.granted = Granted([], [], [], [])
        """Leases that are not in the journal yet."""
        self.num_tokens = 0
        """Tokens that came in since this process started."""
        self.has_told = False
        """The scheduler was told something, so its next deadline may have changed."""
        self._events: deque[e.Event] = deque()
        self._telling = False

    @property
    def beat_s(self) -> Seconds:
        """Seconds from one heartbeat of a worker to the next."""
        return self.lobby.settings.stream.heartbeat_interval_s

    # The scheduler

    def tell(self, event: e.Event) -> None:
        """Tell the scheduler and carry out its commands. Events that these lead to are told afterwards.

        News that was held back, and that the event depends on, is told before it.
        """
        self._events.append(event)
        if self._telling:
            return
        self._telling = self.has_told = True
        try:
            while self._events:
                event = self._events.popleft()
                now = self.lobby.now()
                whole = concerned(self.desk, event, now)
                if whole is not None:
                    news = gather(
                        self.desk, self.lobby.workers.values(), self.payload.tokens, now, whole, beat_s=self.beat_s
                    )
                    if news is not None:
                        self._handle(news, now)
                if isinstance(event, e.TimePassed) and not self.scheduler.is_due(now):
                    continue  # the news that was told just now put the deadline off
                self._handle(event, now)
        finally:
            self._telling = False

    def _handle(self, event: e.Event, now: Seconds) -> None:
        commands = self.scheduler.handle(event, now)
        self.lobby.journal.add_event(now, event, commands)
        for command in commands:
            self.lobby.is_urgent = True
            self._carry_out(self, command)

    def tell_news(self, session: WorkerSession) -> None:
        """Tell what was heard of a worker, although nothing else happens."""
        news = gather(self.desk, [session], self.payload.tokens, self.lobby.now(), beat_s=self.beat_s)
        if news is not None:
            self.tell(news)

    def tell_progress(self, sample: TrackedSample) -> None:
        """Tell how far a running sample is, before some of its tokens are thrown away."""
        worker = self.desk.seats.get(sample.worker)
        session = None if worker is None else self.lobby.workers.get(worker.name)
        if worker is not None and session is not None:
            news = gather(self.desk, [session], self.payload.tokens, self.lobby.now(), [worker.seat])
            if news is not None:
                self.tell(news)

    def wakeup_in(self) -> Seconds | None:
        """Return how long scheduler, hosts and reward workers may be left alone; None where nothing has a deadline."""
        at = self.scheduler.wakeup_at
        if self.lobby.hosts:
            timeout_s = self.desk.config.environments.host_timeout_s
            silent_at = min(one.heard_at for one in self.lobby.hosts.values()) + timeout_s
            at = silent_at if at is None else min(at, silent_at)
        found = [] if at is None else [max(0.0, at - self.lobby.now())]
        relay_s = self.lobby.reward_relay.missed_in(self.desk.config.fleet_rules.heartbeat_timeout_s)
        return min((*found, *([] if relay_s is None else [relay_s])), default=None)

    def pass_time(self) -> None:
        if self.scheduler.is_due(self.lobby.now()):
            self.tell(e.TimePassed())

    def stood_still(self, seconds: Seconds) -> None:
        """Take in that this process stood still for so long: a worker counts as heard only when it is heard anew."""
        for session in self.lobby.workers.values():
            session.told_heard_at = session.heard_at
        for host in self.lobby.hosts.values():
            host.heard_at = max(host.heard_at, self.lobby.now())
        self.lobby.reward_relay.stood_still()
        self.tell(e.DriverResumed(seconds, 0.0))

    def seat_of(self, session: WorkerSession) -> Worker | None:
        """Return the worker as the scheduler knows it; None where the scheduler has given it up."""
        return self.desk.state.fleet.find(session.name, session.incarnation)

    # The journal, and what is sent after it is written

    def note_grants(self) -> None:
        """Put new leases into the journal. Their place among tokens and prompts there tells late tokens from timely."""
        if self.granted.leases:
            self.lobby.journal.add_note(self.granted)
            self.granted = Granted([], [], [], [])

    def standing(self) -> list[RunOpened | VersionOffered]:
        opened = [] if self.trainer is None else [self.opened_by(self.trainer)]
        return [*opened, *self.payload.offers.values()]

    def opened_by(self, trainer: TrainerSession) -> RunOpened:
        return RunOpened(
            trainer.key, trainer.has_reward, trainer.has_weights, self.lobby.caveat, trainer.trains, trainer.answers
        )

    def flush(self) -> None:
        """Send what is for the trainer, and wake the readers of answers. The journal is written."""
        if self.trainer is not None:
            self.trainer.flush()
        for question in self.questions.values():
            question.look()

    # The trainer

    @property
    def vocabulary(self) -> Vocabulary:
        """The token ids that workers may send."""
        return ANY_VOCABULARY if self.trainer is None else self.trainer.vocabulary

    @property
    def answers(self) -> AnswerRules | None:
        """The trainer's rules for a whole answer; None where no trainer gave any."""
        return None if self.trainer is None else self.trainer.answers

    @property
    def has_weights(self) -> bool:
        """Whether the trainer serves weights that workers fetch."""
        return self.trainer is not None and self.trainer.has_weights

    @property
    def is_without_trainer(self) -> bool:
        """Whether the run only answers questions. Where there is a trainer, only it publishes versions."""
        return self.trainer is None and self.desk.state.published >= 0

    @property
    def is_of_a_model(self) -> bool:
        """Whether the answers are trained on, or read by clients."""
        return self.is_without_trainer if self.trainer is None else self.trainer.trains

    def say_to_trainer(self, frame: frames.ToTrainer) -> None:
        if self.trainer is not None:
            self.trainer.say(frame)


# News that was held back


def gather(
    desk: Desk,
    sessions: Iterable[WorkerSession],
    all_tokens: Mapping[SampleId, SampleTokens],
    now: Seconds,
    whole: Collection[int] = (),
    *,
    beat_s: Seconds = 1.0,
) -> e.FleetReported | None:
    """Return the news that is due, and all news of the seats in `whole`; None for none. It counts as told."""
    found = [(worker, one) for one in sessions if (worker := desk.state.fleet.find(one.name, one.incarnation))]
    found.sort(key=lambda one: one[0].seat)
    seats: list[int] = []
    heard_ago: list[int] = []
    progress: list[tuple[int, ...]] = []
    engines: list[tuple[int, int, int]] = []
    last = 0
    for worker, session in found:
        ago = _heard_ago(desk, worker, session, now)
        is_due = worker.seat in whole or now - session.told_at >= _TELL_EVERY_BEATS * beat_s
        runs = _gains(desk, worker, all_tokens) if is_due and worker.leases else ()
        report = session.report if is_due and session.report is not session.told_report else None
        if report is not None and not teaches(worker, report.num_waiting):
            report = None
        if is_due:
            session.told_at, session.told_report = now, session.report
        if ago < 0 and not runs and report is None:
            continue
        if runs:
            progress.append((len(seats), *runs))
        if report is not None:
            engines.append((len(seats), report.num_waiting, report.num_preemptions))
        seats.append(worker.seat - last)
        heard_ago.append(ago)
        last = worker.seat
    return e.FleetReported(tuple(seats), tuple(heard_ago), tuple(progress), tuple(engines)) if seats else None


def _heard_ago(desk: Desk, worker: Worker, session: WorkerSession, now: Seconds) -> int:
    """Return how long ago the worker was heard, in ticks; -1 where telling it can wait, or would repeat."""
    if session.heard_at <= session.told_heard_at:
        return -1
    left_s = desk.deadlines.entries[("heartbeat", worker.seat)] - now
    if not worker.unheard and left_s > desk.config.fleet_rules.heartbeat_timeout_s / 2:
        return -1
    session.told_heard_at = session.heard_at
    return max(0, round((now - session.heard_at) * 1000 / MS_A_TICK))


def _gains(desk: Desk, worker: Worker, all_tokens: Mapping[SampleId, SampleTokens]) -> tuple[int, ...]:
    """Return how many tokens each of its samples has beyond those that were told; empty where none has any."""
    leases = desk.leases
    gains: list[tuple[LeaseId, int]] = []
    for lease, sample in worker.leases.items():
        tokens = all_tokens.get(sample)
        gain = 0 if tokens is None else tokens.num_tokens - leases[lease].num_tokens
        gains.append((lease, gain if gain > 0 else 0))
    return runs_of(gains) if any(gain for _, gain in gains) else ()
