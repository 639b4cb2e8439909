"""Sessions of reward workers, and of the dispatcher: the trainer's connection for their jobs.

Rules kept here: nothing of a job is kept. A frame for a peer that is not connected is dropped, since the trainer says
it again; so frames go out at once, and not with the journal, which knows nothing of them.
"""

import hashlib
import time

from polyrl.manager.peers.link import Link
from polyrl.wire import reward_frames as r
from polyrl.wire.control import RewardJoinRequest

_MOST_FRAMES = 600
_FRAMES_A_SECOND = 16.0
"""Frames beside results that were asked for, at once and from then on. An honest worker sends a report a beat."""
_FRAME_BYTES = 1 << 16
"""An unrequested result counts once more for each so many bytes: it is passed on. An honest worker sends some
after a restart of the manager, which has forgotten what it gave out."""


def life_of(facts: RewardJoinRequest) -> str:
    """Return the name of the process, by which others may know it: its secret cannot be told from it."""
    return hashlib.blake2b(facts.secret.encode(), digest_size=12).hexdigest()


class RewardSession:
    """The session of a reward worker."""

    def __init__(self, key: str, facts: RewardJoinRequest) -> None:
        self.key, self.facts = key, facts
        self.name = facts.name
        self.life = life_of(facts)
        self.link: Link | None = None
        self.greeted = self.is_ready = self.is_draining = False
        """On its present connection: it has said RewardHello; it can score by the present rules. And: it leaves."""
        self.connection = 0
        """The number of its present connection, of all that reward workers had; 0: none."""
        self.heard_at = time.monotonic()
        self.report = r.RewardReport(0, 0, 0)
        self.num_jobs = 0
        """Results that it sent and that were due."""
        self.told: tuple[int, float] = (0, 0.0)
        """The jobs and the CPU time that the ledger has been told of."""
        self.told_at = self.heard_at
        self._num_owed = 0
        """Results that are due."""
        self._num_small = 0.0
        """Its other frames, less an allowance that grows with time."""
        self._counted_at = time.monotonic()

    @property
    def places(self) -> int:
        return min(self.facts.places, r.MAX_PLACES)

    def connect(self, link: Link) -> None:
        if self.link is not None:
            self.link.close("it connected again")
        self.link = link
        self.greeted = self.is_ready = False
        self.connection = 0

    def give(self, job: r.GiveJob) -> None:
        if self.link is not None and self.is_ready:
            self._num_owed += 1
            self.link.send(job)

    def may_say(self, frame: r.FromRewardWorker, now: float) -> bool:
        """Count a frame. Returns False when there are far too many unrequested ones."""
        if isinstance(frame, r.JobDone) and self._num_owed:
            self._num_owed -= 1
            self.num_jobs += 1
            return True
        passed_s, self._counted_at = max(0.0, now - self._counted_at), now
        cost = 1 + (len(frame.result) // _FRAME_BYTES if isinstance(frame, r.JobDone) else 0)
        self._num_small = max(0.0, self._num_small - passed_s * _FRAMES_A_SECOND) + cost
        return self._num_small <= _MOST_FRAMES


class DispatcherSession:
    """A connection of the trainer's for the jobs of reward workers. It ends with that connection."""

    def __init__(self) -> None:
        self.link: Link | None = None
        self.greeted = False

    def connect(self, link: Link) -> None:
        self.link = link

    def say(self, frame: r.ToDispatcher) -> None:
        if self.link is not None:
            self.link.send(frame)


class RewardRelay:
    """The manager's state of reward workers: their sessions, and the trainer's connection for their jobs."""

    def __init__(self) -> None:
        self.workers: dict[str, RewardSession] = {}
        self.dispatcher: DispatcherSession | None = None
        self.rules: r.RewardRules | None = None
        """The trainer's; None until it has dialled."""
        self.num_local: int | None = None
        """Reward processes of the trainer's own; None until it has dialled."""
        self.sent_away: dict[str, str] = {}
        """The last lives that were refused, and why: such a process does not come back."""
        self.num_connections = 0
        self.none_since = time.monotonic()
        """Since when no reward worker is ready, if none is."""
        self._had_some = False
        self.started_at = time.monotonic()

    @property
    def num_ready(self) -> int:
        return sum(one.is_ready and not one.is_draining for one in self.workers.values())

    def missed_in(self, timeout_s: float) -> float | None:
        """Return when the reward worker that is silent for longest is missed; None if there is none."""
        heard = [one.heard_at for one in self.workers.values()]
        return max(0.0, min(heard) + timeout_s - time.monotonic()) if heard else None

    def stood_still(self) -> None:
        """Forgive a silence that was this process's own."""
        for one in self.workers.values():
            one.heard_at = time.monotonic()

    def tell_fleet(self) -> None:
        """Tell the trainer which reward workers are there. A disconnected one stays until it is given up."""
        has_some = self.num_ready > 0
        if self._had_some and not has_some:
            self.none_since = time.monotonic()
        self._had_some = has_some
        if self.dispatcher is None:
            return
        seats = [
            r.RewardSeat(one.name, one.life, one.places, one.connection if one.is_ready else 0, one.is_draining)
            for one in self.workers.values()
        ]
        self.dispatcher.say(r.RewardFleet(tuple(seats)))
