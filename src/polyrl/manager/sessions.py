"""Peers as the manager knows them: a session outlives its connections, and a connection may break at any moment.

A session is what a worker or a trainer got when it joined. What is to be sent to it is gathered here and goes out when
the journal has been written (`flush`). If there is no connection, it is thrown away: when the peer dials again, each
side says what it holds and the missing part is made anew (from_workers.py, from_trainer.py).
"""

import asyncio
from collections import deque

from aiohttp import ClientConnectionResetError, WSCloseCode, web

from polyrl.ids import Incarnation, WorkerName
from polyrl.wire import frames
from polyrl.wire.control import JoinRequest

_ACK_EVERY_S = 0.25
_ACK_EVERY_FRAMES = 8


class Link:
    """One connection's sending half. Bounded: a peer that does not read is cut off."""

    def __init__(self, socket: web.WebSocketResponse, max_queued_bytes: int) -> None:
        self._socket = socket
        self._max_queued_bytes = max_queued_bytes
        self._queue: deque[bytes] = deque()
        self._num_queued_bytes = 0
        self._wake = asyncio.Event()
        self._closing: tuple[int, str] | None = None
        self._sending: asyncio.Timeout | None = None
        self.is_too_slow = False

    def send(self, data: bytes) -> None:
        if self._closing is not None:
            return
        self._queue.append(data)
        self._num_queued_bytes += len(data)
        if self._num_queued_bytes > self._max_queued_bytes:
            self._queue.clear()
            self.is_too_slow = True
            self.close("it reads too slowly", WSCloseCode.TRY_AGAIN_LATER)
            if self._sending is not None:
                self._sending.reschedule(asyncio.get_running_loop().time())
        self._wake.set()

    def close(self, reason: str, code: int = WSCloseCode.GOING_AWAY) -> None:
        """Send what is queued, then say goodbye."""
        if self._closing is None:
            self._closing = (code, reason)
            self._wake.set()

    @property
    def is_closing(self) -> bool:
        return self._closing is not None

    async def pump(self, timeout_s: float) -> bool:
        """Send until closed. A peer that takes nothing for `timeout_s` is given up. Whether it took the goodbye."""
        try:
            while True:
                while self._queue:
                    data = self._queue.popleft()
                    async with asyncio.timeout(timeout_s) as self._sending:
                        await self._socket.send_bytes(data)
                    self._sending = None
                    self._num_queued_bytes -= len(data)
                if self._closing is not None:
                    break
                self._wake.clear()
                await self._wake.wait()
        except (TimeoutError, ConnectionError, ClientConnectionResetError, RuntimeError) as error:
            self.is_too_slow = self.is_too_slow or isinstance(error, TimeoutError)
            self._closing = self._closing or (WSCloseCode.ABNORMAL_CLOSURE, "the connection broke")
            return False
        code, reason = self._closing
        try:
            async with asyncio.timeout(2.0):
                await self._socket.close(code=code, message=_cut(reason, 120))
        except (TimeoutError, ConnectionError, ClientConnectionResetError, RuntimeError):
            return False
        return True


def _cut(text: str, num_bytes: int) -> bytes:
    """Its beginning, as whole characters: a close frame must be UTF-8."""
    return text.encode()[:num_bytes].decode(errors="ignore").encode()


class WorkerSession:
    """A worker in one of its lives."""

    def __init__(self, key: str, incarnation: Incarnation, facts: JoinRequest) -> None:
        self.key = key
        self.name = WorkerName(facts.name)
        self.incarnation = incarnation
        self.facts = facts
        self.link: Link | None = None
        self.greeted = False
        """It has said Hello on its present connection."""
        self.report: frames.Report | None = None
        self.heard_at = 0.0
        self.told_at = 0.0
        """When the scheduler last heard of its progress."""
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
        """Send what was gathered, if it listens. Tokens that end nothing are acknowledged a few times a second."""
        gathered: list[frames.ToWorker] = [*self._others]
        if self._ack is not None and (self._ack_due or now - self._acked_at >= _ACK_EVERY_S):
            gathered.append(frames.Ack(self._ack))
            self._acked_seq, self._acked_at = self._ack, now
            self._ack, self._ack_due = None, False
        if self._orders:
            gathered.append(frames.Generate(tuple(self._orders)))
        if self._aborts or self._hand_overs:
            gathered.append(frames.Stop(tuple(self._aborts), tuple(self._hand_overs)))
        self._orders, self._aborts, self._hand_overs, self._others = [], [], [], []
        if self.link is not None and self.greeted:
            for frame in gathered:
                self.link.send(frames.encode(frame))


class TrainerSession:
    def __init__(self, key: str, *, has_reward: bool) -> None:
        self.key = key
        self.has_reward = has_reward
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
                self.link.send(frames.encode(frame))
