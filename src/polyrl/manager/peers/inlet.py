"""A connection's receiving half: frames go straight from the socket's reader to the service.

With aiohttp's own, every frame wakes a task that waits for it: docs/results/relay.md has what that costs. streams.py
says what happens where aiohttp lacks the classes that this module builds on.

Rules kept here:
- Frames are handed on in order. A frame for which there is no room waits in aiohttp's queue, and so do all behind it;
  a full queue stops the reading.
- Everything but binary frames (text, pings, goodbyes, errors of a peer) is received as aiohttp has it. Masks, sizes and
  fragments are aiohttp's reader's business.
- The part of an unfinished message that has come is in our memory before it was checked. So it is counted,
  for all connections together (`Unfinished`): a message that takes too long is cut off with its connection, and where
  there is too much of them, the largest.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import WSMessage, WSMsgType, web
from aiohttp._websocket.reader import WebSocketDataQueue, WebSocketReader
from aiohttp.web_request import BaseRequest

_QUEUED_BYTES = 1 << 16
_CLOSE_S = 5.0
_SMALL_BYTES = 1 << 15
"""An unfinished message below this is not counted. Nearly all frames are smaller."""
_HEAD_BYTES = 6
"""Of a client's frame, at the least."""

_BINARY = WSMsgType.BINARY  # an enumeration looks its members up in Python


class Unfinished:
    """The unfinished messages of all connections."""

    def __init__(self, max_bytes: int, timeout_s: float) -> None:
        self._max_bytes, self._timeout_s = max_bytes, timeout_s
        self._begun: dict[_Reader, float] = {}
        """When each became large; the oldest first."""
        self._timer: asyncio.TimerHandle | None = None
        self.num_bytes = 0

    def grew(self, reader: "_Reader") -> None:
        """Count a message that has grown, and is not small."""
        loop = asyncio.get_running_loop()
        self._begun.setdefault(reader, loop.time())
        self.num_bytes += reader.num_unfinished - reader.num_counted
        reader.num_counted = reader.num_unfinished
        while self.num_bytes > self._max_bytes:
            largest = max(self._begun, key=lambda one: one.num_counted)
            self._cut(largest, "messages that do not end take too much memory")
        if self._timer is None and self._begun:
            self._timer = loop.call_later(self._timeout_s, self._cut_slow)

    def ended(self, reader: "_Reader") -> None:
        self._begun.pop(reader, None)
        self.num_bytes -= reader.num_counted
        reader.num_counted = 0

    def _cut_slow(self) -> None:
        now = asyncio.get_running_loop().time()
        self._timer = None
        while self._begun and next(iter(self._begun.values())) + self._timeout_s <= now:
            self._cut(next(iter(self._begun)), f"a message did not end within {self._timeout_s:g} s")
        if self._begun:
            next_at = next(iter(self._begun.values())) + self._timeout_s
            self._timer = asyncio.get_running_loop().call_at(next_at, self._cut_slow)

    def _cut(self, reader: "_Reader", why: str) -> None:
        self.ended(reader)
        reader.cut(f"{why}; {reader.num_unfinished / 1e6:.1f} MB of one had come")


class _Reader(WebSocketReader):
    """aiohttp's reader, which also counts what has come since the last whole message."""

    __slots__ = ("_queue", "_unfinished", "cut", "num_counted", "num_ended", "num_unfinished")

    def watch(self, queue: "_Queue", unfinished: Unfinished, cut: Callable[[str], None]) -> None:
        self._queue, self._unfinished, self.cut = queue, unfinished, cut
        self.num_unfinished = self.num_counted = 0
        self.num_ended = 0
        """Bytes of the messages that ended in what was read last. Pings end none, even in the middle of one."""

    def feed_data(self, data: Any) -> Any:
        self.num_ended = 0
        fed = WebSocketReader.feed_data(self, data)  # super() takes longer, and this is done for every frame
        if not self.num_ended:
            self.num_unfinished += len(data)
            if self.num_unfinished > _SMALL_BYTES:
                self._unfinished.grew(self)
        elif self.num_unfinished or len(data) > _SMALL_BYTES:
            self._begin_another(self.num_unfinished + len(data) - self.num_ended)
        return fed

    def _begin_another(self, num_left: int) -> None:
        """Count the bytes behind a message's end for the next message, unless that one waits for room in the queue."""
        self.forget()
        if num_left > _SMALL_BYTES:
            self.num_unfinished = num_left
            if self._queue._size <= self._queue._limit:
                self._unfinished.grew(self)

    def forget(self) -> None:
        """Count nothing as unfinished any more."""
        self.num_unfinished = 0
        self._unfinished.ended(self)


class _Queue(WebSocketDataQueue):
    take: Callable[[bytes], bool] | None = None
    reader: "_Reader | None" = None
    is_behind = False
    """Whether a frame waits, or is on its way to its receiver: taking it out makes aiohttp read on before that."""

    def feed_data(self, data: Any, size: int) -> None:
        """Take a message from the reader. `take` must not raise: aiohttp would drop it."""
        if data.type is _BINARY:
            if (reader := self.reader) is not None:
                reader.num_ended += size + _HEAD_BYTES
            take = self.take
            if take is not None and not self.is_behind and take(data.data):
                return
        self.is_behind = True
        super().feed_data(data, size)


class Inlet(web.WebSocketResponse):
    def __init__(
        self, max_bytes: int, unfinished: Unfinished | None = None, cut: Callable[[str], None] = lambda _: None
    ) -> None:
        """`cut` ends the connection of a peer whose message is not waited for any longer, and is told why. Without
        `unfinished`, messages may take as long as they like."""
        super().__init__(max_msg_size=max_bytes, compress=False, heartbeat=None, timeout=_CLOSE_S)
        self._max_bytes = max_bytes
        self._unfinished, self._cut = unfinished, cut

    def give_to(self, take: Callable[[bytes], bool]) -> None:
        """Hand each frame on as it is read. `receive` gets those for which there was no room."""
        if isinstance(self._reader, _Queue):
            self._reader.take = take

    async def receive(self, timeout: float | None = None) -> WSMessage:
        """Receive a frame that was not taken. The caller has handed on the one before."""
        if isinstance(self._reader, _Queue):
            self._reader.is_behind = bool(self._reader._buffer)
        return await super().receive(timeout)

    def keep(self) -> None:
        """Hand nothing on any more."""
        if isinstance(self._reader, _Queue):
            self._reader.take = None
            if self._reader.reader is not None:
                self._reader.reader.forget()

    def _post_start(self, request: BaseRequest, protocol: str | None, writer: Any) -> None:
        """Start as aiohttp does, which cannot be told to use another queue."""
        try:
            queue = _Queue(request.protocol, _QUEUED_BYTES, loop=asyncio.get_running_loop())
            kind = WebSocketReader if self._unfinished is None else _Reader
            parser = kind(queue, self._max_bytes, compress=False, decode_text=True)
            if isinstance(parser, _Reader) and self._unfinished is not None:
                parser.watch(queue, self._unfinished, self._cut)
                queue.reader = parser
        except TypeError:  # a later aiohttp has changed them: then everything is received as it has it
            super()._post_start(request, protocol, writer)
            return
        self._ws_protocol, self._writer = protocol, writer
        self._reader, self._parser = queue, parser
        request.protocol.set_parser(parser)
        request.protocol.keep_alive(False)
