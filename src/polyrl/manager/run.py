"""What the manager holds of a run, and its one door to the scheduler: tell an event, carry out, commit, send.

    frames, questions --> from_workers, from_trainer, joining --> tell --> scheduler --> frames_out --> sessions
                                                                                    commit: journal, then send

It has one owner (service.py), who takes all that has come, writes the journal once, and only then sends, answers and
acknowledges. The parts beside it are modules of functions over it, as the scheduler's are over its desk.

Rules kept here:
- Nothing leaves before what led to it is in the journal; only a goodbye does, and it changes nothing.
- Payload goes into the journal as it came, and never into the scheduler.
- What an event leads to is told after it, never within it.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable

from polyrl.errors import shorten
from polyrl.ids import GroupId, Incarnation, LeaseId, Seconds, WorkerName
from polyrl.journal.records import CAVEAT
from polyrl.manager.gathering import gather
from polyrl.manager.journal import Granted, RunJournal, RunOpened, SessionOpened, VersionOffered
from polyrl.manager.payload import Payload
from polyrl.manager.peers.sessions import TrainerSession, WorkerSession
from polyrl.manager.question import Question
from polyrl.manager.settings import ManagerSettings
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.fleet import Worker
from polyrl.scheduling.parts.hearing import concerned
from polyrl.scheduling.scheduler import Scheduler
from polyrl.wire import frames
from polyrl.wire.columns import ANY_VOCABULARY, Vocabulary
from polyrl.wire.control import AnswerRules

log = logging.getLogger("polyrl.manager")

CarryOut = Callable[["Executor", c.Command], None]

_MAX_FAREWELLS = 1000
_MAX_TURNED_AWAY = 16
_FORGET_EVERY = 1000
"""Lives more than are known are forgotten by so many at a time."""


class Executor:
    def __init__(
        self, journal: RunJournal, settings: ManagerSettings, about: dict[str, str], carry_out: CarryOut
    ) -> None:
        self.journal = journal
        self.settings = settings
        self.about = about
        self._carry_out = carry_out
        self.weights_key = ""
        """What those who fetch and serve weights prove to each other that they know."""
        self.scheduler: Scheduler | None = None
        self.payload = Payload()
        self.workers: dict[WorkerName, WorkerSession] = {}
        self.turned_away: dict[WorkerName, tuple[str, Seconds]] = {}
        """Workers that cannot serve this run: why, and when they were gone. The last ones."""
        self.absent: dict[WorkerName, tuple[str, float]] = {}
        """Names of workers that were given up and may come back: the session of each, and until when the name is kept
        for who shows it. The first to be free first."""
        self.farewells: dict[str, frames.Release] = {}
        """What those are told who were given up for good and dial again: they did not hear it. By their session."""
        self.lives: dict[WorkerName, Incarnation] = {}
        self.trainer: TrainerSession | None = None
        self.rewards: tuple[frames.RewardsTold, Seconds] | None = None
        """What the trainer's functions do, and when it said so."""
        self.refused: Counter[str] = Counter()
        self.num_tokens = 0
        """Tokens that came in since this process started."""
        self.num_frames = 0
        self._clock_base = 0.0
        self._clock_start = time.monotonic()
        self._events: deque[e.Event] = deque()
        self._telling = False
        self.granted = Granted([], [], [], [])
        """Leases that are not in the journal yet."""
        self.questions: dict[GroupId, Question] = {}
        """What was asked beside the trainer, and is not over."""
        self.no_prompt_yet: dict[GroupId, list[LeaseId]] = {}
        """Leases that wait for their group's prompt."""
        self.dirty: dict[str, WorkerSession] = {}
        """Sessions with something to send."""
        self.is_urgent = False
        """Somebody waits for what is to be sent; tokens alone are no hurry."""
        self.has_told = False
        """The scheduler heard something: it may want to be woken at another time."""

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

    def tell_news(self, session: WorkerSession) -> None:
        """Tell what was heard of a worker, although nothing else happens."""
        if self.scheduler is not None:
            news = gather(self.scheduler.desk, [session], self.payload.texts, self.now())
            if news is not None:
                self.tell(news)

    def stood_still(self, seconds: Seconds) -> None:
        """Nobody could be heard for so long: who was heard before that is to be heard anew."""
        for session in self.workers.values():
            session.told_heard_at = session.heard_at
        self.tell(e.DriverResumed(seconds, 0.0))

    # The scheduler

    def tell(self, event: e.Event) -> None:
        """Tell the scheduler and carry out what it wants. What that leads to is told after it.

        News that was held back, and that the event depends on, is told before it.
        """
        if self.scheduler is None:
            return
        self._events.append(event)
        if self._telling:
            return
        self._telling = self.has_told = True
        try:
            while self._events:
                event = self._events.popleft()
                now = self.now()
                whole = concerned(self.scheduler.desk, event, now)
                if whole is not None:
                    news = gather(self.scheduler.desk, self.workers.values(), self.payload.texts, now, whole)
                    if news is not None:
                        self._handle(self.scheduler, news, now)
                if isinstance(event, e.TimePassed) and not self.scheduler.is_due(now):
                    continue  # who was waited for has been heard
                self._handle(self.scheduler, event, now)
        finally:
            self._telling = False

    def _handle(self, scheduler: Scheduler, event: e.Event, now: Seconds) -> None:
        commands = scheduler.handle(event, now)
        self.journal.add_event(now, event, commands)
        for command in commands:
            self.is_urgent = True
            self._carry_out(self, command)

    @property
    def has_heard_all(self) -> bool:
        """Every worker has said something since the last commit."""
        return len(self.dirty) >= len(self.workers)

    def commit(self) -> None:
        """Write the journal; then send."""
        self.is_urgent = False
        self.note_grants()
        self.journal.commit()
        if self.journal.rotation_is_due:
            self.journal.rotate(self.scheduler, self.about, self.standing())
        now = self.now()
        for session in self.dirty.values():
            session.flush(now)
        self.dirty.clear()
        if self.trainer is not None:
            self.trainer.flush()
        for question in self.questions.values():
            question.look()

    def standing(self) -> list[SessionOpened | RunOpened | VersionOffered]:
        """What no step's end makes void."""
        notes: list[SessionOpened | RunOpened | VersionOffered] = [
            SessionOpened(one.key, one.incarnation, one.facts) for one in self.workers.values()
        ]
        if self.trainer is not None:
            notes.append(self.opened_by(self.trainer))
        return [*notes, *self.payload.offers.values()]

    def opened_by(self, trainer: TrainerSession) -> RunOpened:
        return RunOpened(
            trainer.key, trainer.has_reward, trainer.has_weights, self.caveat, trainer.trains, trainer.answers
        )

    @property
    def caveat(self) -> str:
        """The trainer's, of the run."""
        return self.about.get(CAVEAT, "")

    def set_caveat(self, caveat: str) -> None:
        if caveat:
            self.about[CAVEAT] = caveat

    def note_grants(self) -> None:
        """Put the leases that were given into the journal: their order among tokens and prompts counts."""
        if self.granted.leases:
            self.journal.add_note(self.granted)
            self.granted = Granted([], [], [], [])

    # Peers

    @property
    def vocabulary(self) -> Vocabulary:
        """Whose ids workers may send."""
        return ANY_VOCABULARY if self.trainer is None else self.trainer.vocabulary

    @property
    def answers(self) -> AnswerRules | None:
        """What answers can be; None where no trainer has said so."""
        return None if self.trainer is None else self.trainer.answers

    def engine_of(self, name: str) -> str:
        """What kind of engine a worker said that it has; empty when it is gone."""
        session = self.workers.get(WorkerName(name))
        return "" if session is None else session.facts.engine

    def session(self, name: WorkerName) -> WorkerSession | None:
        """A worker that is to be told something."""
        session = self.workers.get(name)
        if session is not None:
            self.dirty[session.key] = session
        return session

    def seat_of(self, session: WorkerSession) -> Worker | None:
        """The worker as the scheduler knows it; None if it was given up, or there is no run."""
        if self.scheduler is None:
            return None
        return self.scheduler.desk.state.fleet.find(session.name, session.incarnation)

    def say_to_trainer(self, frame: frames.ToTrainer) -> None:
        if self.trainer is not None:
            self.trainer.say(frame)

    def turn_away(self, name: WorkerName, why: str) -> None:
        """Remember who cannot serve this run, so that whoever runs it hears of it."""
        self.turned_away.pop(name, None)
        self.turned_away[name] = shorten(why), time.monotonic()
        if len(self.turned_away) > _MAX_TURNED_AWAY:
            del self.turned_away[next(iter(self.turned_away))]

    def forget(self, name: WorkerName, why: str, *, rejoin: bool = False, in_anger: bool = False) -> None:
        """A worker's session is over, and it is told so."""
        session = self.workers.pop(name, None)
        if session is None:
            return
        self.dirty.pop(session.key, None)
        log.log(logging.WARNING if in_anger else logging.INFO, "worker %s is given up: %s", name, why)
        release = frames.Release(why, rejoin, in_anger)
        if session.link is not None:
            session.link.send(release)
            session.link.close(why)
        if rejoin:
            self._keep_name(session)
        else:  # also to who is connected: the connection may be broken, and nobody has noticed
            self.farewells[session.key] = release
            if len(self.farewells) > _MAX_FAREWELLS:
                del self.farewells[next(iter(self.farewells))]

    def next_life(self, name: WorkerName) -> Incarnation:
        """Of a worker that joins. What the scheduler has forgotten, or never heard of, begins anew."""
        known = {} if self.scheduler is None else self.scheduler.desk.state.fleet.last_incarnations
        if len(self.lives) > len(known) + len(self.workers) + _FORGET_EVERY:
            self.lives = {one: life for one, life in self.lives.items() if one in known or one in self.workers}
        life = self.lives[name] = Incarnation(self.lives.get(name, 0) + 1)
        return life

    def _keep_name(self, session: WorkerSession) -> None:
        now = time.monotonic()
        for name in list(self.absent):
            if self.absent[name][1] > now:
                break
            del self.absent[name]
        self.absent.pop(session.name, None)
        self.absent[session.name] = session.key, now + self.settings.restart_grace_s
