"""Sessions of workers and trainers. A session outlives its connections, which may break at any moment.

A peer gets its session when it joins; a link (link.py) is the sending half of its connection. Frames for the peer are
gathered here and go out when the journal has been written (`flush`). Without a connection they are thrown away: when
the peer dials again, each side says what it holds, and the missing part is made anew (from_workers.py,
from_trainer.py).
"""

from polyrl.ids import HostName, Incarnation, WorkerName
from polyrl.manager.frames_in.stride import Stride
from polyrl.manager.peers.link import Link
from polyrl.telemetry.repeats import Repeats
from polyrl.wire import frames, host_frames
from polyrl.wire.columns import ANY_ID, Vocabulary, in_pieces
from polyrl.wire.control import AnswerRules, HostJoinRequest, JoinRequest
from polyrl.wire.host_frames import FRAMES_A_SECOND, FRAMES_AT_ONCE, LEAST_EPISODES

_ACK_EVERY_S = 1.0
_ACK_EVERY_FRAMES = 16
"""How often frames without an end of an answer are acknowledged; ends are acknowledged at once, since a worker keeps a
lease until then."""
_MOST_SMALL_FRAMES = 1200
"""Frames other than tokens and replies, at once: half as many wait in the sockets after ten minutes without a manager
(more when workers report more than once a second)."""
_SMALL_FRAMES_A_BEAT = 8
"""Such frames from then on, or that many a second if beats are rarer. An honest worker sends a Report, and seldom
another."""
_SMALL_FRAMES_A_NEWS = 60
"""News that goes into the journal counts as so many: an engine that died or is back, a machine that goes."""
_SPENT_AT_JOIN = 0.75
"""Of the allowance: nothing waits in the sockets of a worker that has just joined, and it may join again and again."""
_LATE_ROWS_A_FRAME = 256
_LATE_TOKENS_A_FRAME = 4096
"""Late rows and tokens that count as one small frame. An honest worker goes on with an aborted sample until it hears of
the abort: a moment, and for all its samples at once where a round ends."""
_HELD_A_FRAME = 256
"""Episodes listed by a host that connects that count as one more frame of it: each is looked up."""


def most_small_frames(heartbeat_interval_s: float) -> float:
    """Return how many small frames a worker may send at once."""
    return _MOST_SMALL_FRAMES / min(1.0, heartbeat_interval_s)


class WorkerSession:
    """The session of a worker, in one of its lives."""

    def __init__(self, key: str, incarnation: Incarnation, facts: JoinRequest, joined_from: str = "") -> None:
        """`joined_from`: the worker's address; empty after a restart of the manager."""
        self.key = key
        self.joined_from = joined_from
        self.name = WorkerName(facts.name)
        self.incarnation = incarnation
        self.facts = facts
        self.link: Link | None = None
        self.greeted = False
        """Whether it has said Hello on its present connection."""
        self.is_expected = False
        """Whether the manager was started again, and has not heard of it since."""
        self.weight_addresses: tuple[str, ...] = ()
        """Where others may fetch weights from it, as it said on its present connection."""
        self.report: frames.Report | None = None
        self.heard_at = 0.0
        self.told_at = 0.0
        """When the scheduler was last told how far its samples are."""
        self.told_heard_at = 0.0
        """The `heard_at` that the scheduler knows."""
        self.told_report: frames.Report | None = None
        """The last report that the scheduler was told: told twice, it would count as two."""
        self.stride: Stride | None = None
        """Set while its frames go on from each other."""
        self.last_failure = ""
        """Why its last failed lease failed, in its words."""
        self.failures = Repeats()
        self.num_failed_installs = 0
        self.has_installed = False
        """Whether it has installed a version of this run."""
        self.most_held = 0
        """The most leases it had at once. It has no more to tell of, whatever number of slots it claims."""
        self._num_small = 0.0
        """Its small frames, less an allowance that grows with time."""
        self._counted_at = 0.0
        self._num_owed = 0
        """Replies that are still due: one for each order to pull or to change duty."""
        self._orders: list[frames.Order] = []
        self._aborts: list[int] = []
        self._hand_overs: list[int] = []
        self._ack: int | None = None
        self._ack_due = False
        self._acked_at = 0.0
        self._acked_seq = 0
        self._others: list[frames.ToWorker] = []

    def connect(self, link: Link) -> None:
        if self.link is not None:
            self.link.close("it connected again")
        self.link = link
        self.greeted = False
        self._ack = None

    def begin(self, now: float, heartbeat_interval_s: float) -> None:
        """Note that it has joined."""
        self.heard_at = self.told_at = self.told_heard_at = self._counted_at = now
        self._num_small = _SPENT_AT_JOIN * most_small_frames(heartbeat_interval_s)

    def may_say(self, frame: frames.FromWorker, now: float, heartbeat_interval_s: float) -> bool:
        """Count a frame other than tokens. Returns False when there are far too many."""
        if self._num_owed and isinstance(frame, frames.OnDuty | frames.Installed | frames.InstallFailed):
            self._num_owed -= 1  # the manager asked for these: steps may be short
            return True
        return self._spend(1.0, now, heartbeat_interval_s)

    def may_tell(self, now: float, heartbeat_interval_s: float) -> bool:
        """Count news that goes into the journal. Returns False when there is far too much."""
        return self._spend(_SMALL_FRAMES_A_NEWS, now, heartbeat_interval_s)

    def may_waste(self, num_rows: int, num_tokens: int, now: float, heartbeat_interval_s: float) -> bool:
        """Count the late rows and tokens of a frame. Returns False when there are far too many."""
        cost = num_rows / _LATE_ROWS_A_FRAME + num_tokens / _LATE_TOKENS_A_FRAME
        return self._spend(1.0 + cost, now, heartbeat_interval_s)

    def _spend(self, cost: float, now: float, heartbeat_interval_s: float) -> bool:
        beat_s = min(1.0, heartbeat_interval_s)
        beats = max(0.0, now - self._counted_at) / beat_s  # a run that opens sets the clock back
        self._counted_at = now
        self._num_small = max(0.0, self._num_small - beats * _SMALL_FRAMES_A_BEAT) + cost
        return self._num_small <= most_small_frames(beat_s)

    def order(self, order: frames.Order) -> None:
        self._orders.append(order)

    def abort(self, lease: int) -> None:
        self._orders = [one for one in self._orders if one.lease != lease] if self._orders else []
        self._aborts.append(lease)

    def hand_over(self, lease: int) -> None:
        self._hand_overs.append(lease)

    def acknowledge(self, seq: int, *, has_ends: bool) -> None:
        self._ack = seq
        self._ack_due = self._ack_due or has_ends or seq - self._acked_seq >= _ACK_EVERY_FRAMES

    def say(self, frame: frames.ToWorker) -> None:
        self._others.append(frame)

    def flush(self, now: float) -> None:
        """Send what was gathered, if the worker is connected. Tokens that end no answer are acknowledged seldom."""
        is_ack_due = self._ack is not None and (self._ack_due or now - self._acked_at >= _ACK_EVERY_S)
        if not (is_ack_due or self._others or self._orders or self._aborts or self._hand_overs):
            return  # nearly always
        gathered: list[frames.ToWorker] = [*self._others]
        if self._ack is not None and is_ack_due:
            gathered.append(frames.Ack(self._ack))
            self._acked_seq, self._acked_at = self._ack, now
            self._ack, self._ack_due = None, False
        gathered += map(frames.Orders, in_pieces(self._orders, _order_bytes))
        if self._aborts or self._hand_overs:
            gathered.append(frames.Stop(tuple(self._aborts), tuple(self._hand_overs)))
        self._orders, self._aborts, self._hand_overs, self._others = [], [], [], []
        if self.link is not None and self.greeted:
            for frame in gathered:
                self.link.send(frame)
                self._num_owed += isinstance(frame, frames.ChangeDuty | frames.PullOrder)


def _order_bytes(order: frames.Order) -> int:
    return len(order.prompt) + len(order.so_far)


class HostSession:
    """The session of a host, in one of its lives."""

    def __init__(self, key: str, incarnation: Incarnation, facts: HostJoinRequest) -> None:
        self.key, self.incarnation, self.facts = key, incarnation, facts
        self.name = HostName(facts.name)
        self.link: Link | None = None
        self.greeted = False
        """Whether it has said HostHello on its present connection."""
        self.heard_at = 0.0
        self.failures = Repeats()
        self._gathered: list[host_frames.ToHost] = []
        self._over: list[host_frames.HeldEpisode] = []
        self._num_small = 0.0
        """Its frames, less an allowance that grows with time."""
        self._counted_at = 0.0

    def connect(self, link: Link) -> None:
        if self.link is not None:
            self.link.close("it connected again")
        self.link = link
        self.greeted = False
        self._gathered, self._over = [], []  # of the connection before: this one is told all anew

    def may_say(self, now: float, num_episodes: int, num_held: int = 0) -> bool:
        """Count a frame, in which `num_held` episodes are listed. Returns False when there are far too many: calls of
        an episode wait for each other."""
        num = max(LEAST_EPISODES, num_episodes)
        passed_s = max(0.0, now - self._counted_at)
        self._counted_at = now
        self._num_small = max(0.0, self._num_small - passed_s * FRAMES_A_SECOND * num)
        self._num_small += 1 + num_held / _HELD_A_FRAME
        return self._num_small <= FRAMES_AT_ONCE + 4 * num

    def say(self, frame: host_frames.ToHost) -> None:
        self._gathered.append(frame)

    def stop(self, sample: int, attempt: int) -> None:
        self._over.append(host_frames.HeldEpisode(sample, attempt))

    def flush(self) -> None:
        gathered, self._gathered = self._gathered, []
        if self._over:
            gathered.append(host_frames.StopPlaying(tuple(self._over)))
            self._over = []
        if self.link is not None and self.greeted:
            for frame in gathered:
                self.link.send(frame)


class TrainerSession:
    def __init__(
        self,
        key: str,
        *,
        has_reward: bool,
        has_weights: bool = False,
        trains: bool = False,
        answers: AnswerRules | None = None,
    ) -> None:
        self.key = key
        self.has_reward = has_reward
        self.has_weights = has_weights
        self.trains = trains
        self.answers = answers
        self.vocabulary = Vocabulary(ANY_ID if answers is None else answers.vocab)
        self.link: Link | None = None
        self.greeted = False
        self.away_since: float | None = 0.0
        self._gathered: list[frames.ToTrainer] = []
        self._ack: int | None = None

    def connect(self, link: Link) -> None:
        if self.link is not None:
            self.link.close("another trainer connected")
        self.link = link
        self.greeted = False
        self._gathered.clear()  # for the connection before: this one is told all anew when it has said Hello

    def say(self, frame: frames.ToTrainer) -> None:
        self._gathered.append(frame)

    def acknowledge(self, seq: int) -> None:
        self._ack = seq

    def flush(self) -> None:
        gathered, self._gathered = self._gathered, []
        if self._ack is not None:
            gathered.append(frames.Ack(self._ack))
            self._ack = None
        if self.link is not None and self.greeted:
            for frame in gathered:
                self.link.send(frame)
