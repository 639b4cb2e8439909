"""The manager's state whether or not a run is open: sessions, their names, its clock, and counts of refusals.

Workers may join and wait before a run is open. When a trainer does, or `--serve`, the lobby gets its `run`
(run.py), and keeps the sessions: a worker of the fleet is a session here and a seat in the scheduler.

    frames, questions --> frames_in --> tell --> scheduler --> frames_out --> sessions
                                                     commit: journal, then send

The lobby has one owner (service.py), which takes all that has come, writes the journal once, and only then sends,
answers and acknowledges. The modules beside it are functions over the lobby or over the run, as the scheduler's parts
are over its desk.

Rules kept here:
- Nothing leaves before its cause is in the journal. Only a goodbye does, and it changes nothing.
- The maps of names are bounded: any number of workers may come and go.
"""

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING

from polyrl.errors import Refused, shorten
from polyrl.ids import HostName, Incarnation, Seconds, WorkerName
from polyrl.journal.records import CAVEAT
from polyrl.manager.journal import RunJournal
from polyrl.manager.notes import AnyNote, HostOpened, SessionOpened
from polyrl.manager.peers.reward_sessions import RewardRelay
from polyrl.manager.peers.sessions import HostSession, WorkerSession
from polyrl.manager.settings import ManagerSettings
from polyrl.scheduling.core import events as e
from polyrl.wire import frames

if TYPE_CHECKING:
    from polyrl.manager.run import Run

log = logging.getLogger("polyrl.manager")

_MAX_FAREWELLS = 1000
_MAX_TURNED_AWAY = 16
_FORGET_EVERY = 1000
"""Names beyond those still known, before they are forgotten all at once."""


class Lobby:
    def __init__(self, journal: RunJournal, settings: ManagerSettings, about: dict[str, str]) -> None:
        self.journal = journal
        self.settings = settings
        self.about = about
        """Facts about the run for the header of its journal."""
        self.run: Run | None = None
        self.weights_key = ""
        """The secret that weight servers and the workers that pull from them share."""
        self.workers: dict[WorkerName, WorkerSession] = {}
        self.hosts: dict[HostName, HostSession] = {}
        self.reward_relay = RewardRelay()
        self.host_lives: dict[HostName, Incarnation] = {}
        self.turned_away: dict[WorkerName, tuple[str, Seconds]] = {}
        """The last workers that could not serve this run: why, and when each left."""
        self.absent: dict[WorkerName, tuple[str, float]] = {}
        """Names of workers that were given up and may come back: the session of each, and until when its name is
        reserved. In the order in which the names become free."""
        self.farewells: dict[str, frames.Release] = {}
        """By session: the last message to a worker that was given up for good, repeated when it dials again."""
        self.lives: dict[WorkerName, Incarnation] = {}
        self.refused: Counter[str] = Counter()
        self.num_frames = 0
        self.dirty: dict[str, WorkerSession] = {}
        """Sessions with something to send."""
        self.is_urgent = False
        """A peer waits for what is to be sent. Tokens alone are not urgent."""
        self.dirty_hosts: dict[HostName, HostSession] = {}
        self._clock_base = 0.0
        self._clock_start = time.monotonic()

    def need_run(self) -> "Run":
        """Return the run. Raises Refused where none is open."""
        if self.run is None:
            raise Refused("run", "no run is open")
        return self.run

    def tell(self, event: e.Event) -> None:
        """Tell the scheduler, if there is one."""
        if self.run is not None:
            self.run.tell(event)

    # Time

    def now(self) -> Seconds:
        """Return the run's own time; before a run is open, that of the process."""
        return self._clock_base + time.monotonic() - self._clock_start

    def set_clock(self, now: Seconds) -> None:
        self._clock_base, self._clock_start = now, time.monotonic()

    # Writing, then sending

    @property
    def has_heard_all(self) -> bool:
        """Whether every worker has said something since the last commit."""
        return len(self.dirty) >= len(self.workers)

    def commit(self) -> None:
        """Write the journal; then send."""
        run = self.run
        self.is_urgent = False
        if run is not None:
            run.note_grants()
        self.journal.commit()
        if self.journal.rotation_is_due:
            self.journal.rotate(None if run is None else run.scheduler, self.about, self.standing())
        now = self.now()
        for session in self.dirty.values():
            session.flush(now)
        self.dirty.clear()
        for host in self.dirty_hosts.values():
            host.flush()
        self.dirty_hosts.clear()
        if run is not None:
            run.flush()

    def standing(self) -> list[AnyNote]:
        """Return the notes that stay true when a step ends. Every file of payload begins with them."""
        sessions = [SessionOpened(one.key, one.incarnation, one.facts) for one in self.workers.values()]
        hosts = [HostOpened(one.key, one.incarnation, one.facts) for one in self.hosts.values()]
        return [*sessions, *hosts, *(() if self.run is None else self.run.standing())]

    @property
    def caveat(self) -> str:
        """The trainer's warning about this run's figures; empty for none."""
        return self.about.get(CAVEAT, "")

    def set_caveat(self, caveat: str) -> None:
        if caveat:
            self.about[CAVEAT] = caveat

    # Workers

    def engine_of(self, name: str) -> str:
        """Return the kind of engine a worker said that it has; empty when the worker is gone."""
        session = self.workers.get(WorkerName(name))
        return "" if session is None else session.facts.engine

    def session(self, name: WorkerName) -> WorkerSession | None:
        """Return a worker's session in order to tell it something: the next commit sends it."""
        session = self.workers.get(name)
        if session is not None:
            self.dirty[session.key] = session
        return session

    def turn_away(self, name: WorkerName, why: str) -> None:
        """Remember that a worker cannot serve this run, for the status."""
        self.turned_away.pop(name, None)
        self.turned_away[name] = shorten(why), time.monotonic()
        if len(self.turned_away) > _MAX_TURNED_AWAY:
            del self.turned_away[next(iter(self.turned_away))]

    def forget(self, name: WorkerName, why: str, *, rejoin: bool = False, in_anger: bool = False) -> None:
        """End a worker's session, and tell the worker so."""
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
            self._reserve_name(session)
        else:  # also for a worker that is connected: its connection may be broken already
            self.farewells[session.key] = release
            if len(self.farewells) > _MAX_FAREWELLS:
                del self.farewells[next(iter(self.farewells))]

    # Hosts

    def host(self, name: HostName) -> HostSession | None:
        """Return a host's session in order to tell it something: the next commit sends it."""
        session = self.hosts.get(name)
        if session is not None:
            self.dirty_hosts[name] = session
        return session

    def forget_host(self, name: HostName, why: str, *, in_anger: bool = False) -> None:
        """End a host's session, and tell the host so."""
        session = self.hosts.pop(name, None)
        if session is None:
            return
        self.dirty_hosts.pop(name, None)
        log.log(logging.WARNING if in_anger else logging.INFO, "host %s is given up: %s", name, why)
        if session.link is not None:
            session.link.send(frames.Release(why, rejoin=not in_anger, in_anger=in_anger))
            session.link.close(why)

    def next_host_life(self, name: HostName) -> Incarnation:
        """Count a host that joins. A name that the scheduler has forgotten begins at 1 again."""
        known = {} if self.run is None else self.run.desk.hosts.last_incarnations
        if len(self.host_lives) > len(known) + len(self.hosts) + _FORGET_EVERY:
            self.host_lives = {one: life for one, life in self.host_lives.items() if one in known or one in self.hosts}
        life = self.host_lives[name] = Incarnation(self.host_lives.get(name, 0) + 1)
        return life

    # Lives of workers

    def next_life(self, name: WorkerName) -> Incarnation:
        """Count a worker that joins. A name that the scheduler has forgotten, or never heard, begins at 1 again."""
        known = {} if self.run is None else self.run.desk.state.fleet.last_incarnations
        if len(self.lives) > len(known) + len(self.workers) + _FORGET_EVERY:
            self.lives = {one: life for one, life in self.lives.items() if one in known or one in self.workers}
        life = self.lives[name] = Incarnation(self.lives.get(name, 0) + 1)
        return life

    def _reserve_name(self, session: WorkerSession) -> None:
        now = time.monotonic()
        for name in list(self.absent):
            if self.absent[name][1] > now:
                break
            del self.absent[name]
        self.absent.pop(session.name, None)
        self.absent[session.name] = session.key, now + self.settings.restart_grace_s
