"""A connection's sending half: frames wait here, and go out as fast as the peer reads them.

Rules kept here:
- A peer that reads nothing for a while is cut off, and dials again. A slow one that goes on reading is waited for,
  however much there is for it.
- A frame is encoded when its turn comes. Until then it holds references to prompts and answers that the payload keeps
  anyway, so that a large delivery is not in memory twice. Everything else in a queue is bounded.
- A peer that is told goodbye may still read what was queued before, but not for long.
"""

import asyncio
import time
from collections import deque

from aiohttp import ClientConnectionResetError, WSCloseCode, web

from polyrl.wire import frames, host_frames, reward_frames

_FRAME_BYTES = 256
"""Roughly what a frame takes in a queue, beside the payload it refers to."""
_LOOK_EVERY_S = 0.25
_ROOM_BYTES = 1 << 13
"""Sending does not wait below this in the connection's buffers: they push back at 16 KiB or more."""
_LAST_WORDS_S = 5.0
_BROKEN = (ConnectionError, ClientConnectionResetError, RuntimeError)


AnyFrame = (
    frames.ToWorker | frames.ToTrainer | host_frames.ToHost | reward_frames.ToRewardWorker | reward_frames.ToDispatcher
)


class Link:
    def __init__(self, socket: web.WebSocketResponse, max_queued_bytes: int, seen_at: str = "") -> None:
        """`seen_at`: the peer's address, without its port."""
        self._socket = socket
        self.seen_at = seen_at
        self._max_queued_bytes = max_queued_bytes
        self._queue: deque[AnyFrame] = deque()
        self._num_queued_bytes = 0
        self._wake = asyncio.Event()
        self._closing: tuple[int, str] | None = None
        self._ends_at = 0.0
        """When a connection that is closing is cut, whatever is still queued."""
        self.is_too_slow = False

    def send(self, frame: AnyFrame) -> None:
        """Queue a frame. The objects it refers to must not change any more."""
        if self._closing is not None:
            return
        self._queue.append(frame)
        self._num_queued_bytes += _held_bytes(frame)
        if self._num_queued_bytes > self._max_queued_bytes:
            self._queue.clear()
            self.is_too_slow = True
            self.close("it reads too slowly", WSCloseCode.TRY_AGAIN_LATER)
        self._wake.set()

    def close(self, reason: str, code: int = WSCloseCode.GOING_AWAY) -> None:
        """Send what is queued, then say goodbye."""
        if self._closing is None:
            self._closing = (code, reason)
            self._ends_at = time.monotonic() + _LAST_WORDS_S
            self._wake.set()

    @property
    def is_closing(self) -> bool:
        return self._closing is not None

    async def pump(self, transport: asyncio.WriteTransport | None, timeout_s: float) -> bool:
        """Send until closed, or until the peer reads nothing for `timeout_s`. Returns whether it took the goodbye."""
        try:
            if transport is None:
                raise ConnectionResetError("it was gone before it was there")
            while True:
                while self._queue:
                    frame = self._queue.popleft()
                    await self._give(frames.encode(frame), transport, timeout_s)
                    self._num_queued_bytes -= _held_bytes(frame)
                if self._closing is not None:
                    break
                self._wake.clear()
                await self._wake.wait()
        except (TimeoutError, *_BROKEN) as error:
            self.is_too_slow = self.is_too_slow or isinstance(error, TimeoutError)
            self._closing = self._closing or (WSCloseCode.ABNORMAL_CLOSURE, "the connection broke")
            self._queue.clear()
            return False
        code, reason = self._closing
        try:
            async with asyncio.timeout(2.0):
                await self._socket.close(code=code, message=_cut(reason, 120))
        except (TimeoutError, *_BROKEN):
            return False
        return True

    async def _give(self, data: bytes, transport: asyncio.WriteTransport, timeout_s: float) -> None:
        """Send, and wait until there is room for more. Raises TimeoutError if the peer reads nothing for so long."""
        num_left = transport.get_write_buffer_size()
        if num_left + len(data) <= _ROOM_BYTES:
            await self._socket.send_bytes(data)
            return
        num_left += len(data)
        taken_at = time.monotonic()
        sending = asyncio.ensure_future(self._socket.send_bytes(data))
        try:
            while not (await asyncio.wait((sending,), timeout=min(_LOOK_EVERY_S, timeout_s)))[0]:
                num_left_now, now = transport.get_write_buffer_size(), time.monotonic()
                if num_left_now < num_left:
                    num_left, taken_at = num_left_now, now
                is_late = self._closing is not None and now > self._ends_at
                if now - taken_at > timeout_s or is_late or self.is_too_slow:
                    raise TimeoutError
        finally:
            sending.cancel()
        sending.result()


def _held_bytes(frame: AnyFrame) -> int:
    """Return the bytes that only this frame keeps in memory."""
    if isinstance(frame, frames.Orders):
        return sum(_FRAME_BYTES + len(order.so_far) for order in frame.orders)
    if isinstance(frame, host_frames.CallAnswer):
        return _FRAME_BYTES + len(frame.cells)  # cut out for each answer: a host may have one sent again and again
    if isinstance(frame, reward_frames.GiveJob):
        return _FRAME_BYTES + len(frame.body)
    if isinstance(frame, reward_frames.WorkerAnswered) and isinstance(frame.said, reward_frames.JobDone):
        return _FRAME_BYTES + len(frame.said.result)
    return _FRAME_BYTES


def _cut(text: str, num_bytes: int) -> bytes:
    """Return the beginning of a text, in whole characters: a close frame must be UTF-8."""
    return text.encode()[:num_bytes].decode(errors="ignore").encode()
