"""One connection's receiving half: frames go straight from the socket's reader to who takes them.

With aiohttp's own, every frame wakes a task that waits for it. That is a third of what a frame of a few tokens costs.

Rules kept here:
- Frames are handed on in order. One for which there is no room waits in aiohttp's queue, and so do all behind it; a
  queue that is full stops the reading.
- Whatever is no binary frame (text, pings, goodbyes, what is wrong with a peer) is received as ever. Masks, sizes and
  fragments are aiohttp's reader's business.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import WSMessage, WSMsgType, web
from aiohttp._websocket.reader import WebSocketDataQueue, WebSocketReader
from aiohttp.web_request import BaseRequest

_QUEUED_BYTES = 1 << 16
_CLOSE_S = 5.0


_BINARY = WSMsgType.BINARY  # an enumeration looks its members up in Python


class _Queue(WebSocketDataQueue):
    take: Callable[[bytes], bool] | None = None
    is_behind = False
    """One is waiting, or on its way to who receives it: taking it out makes aiohttp read on, before it is there."""

    def feed_data(self, data: Any, size: int) -> None:
        """Called by the reader with each message. What `take` raises would be lost: it had better not."""
        take = self.take
        if take is None or self.is_behind or data.type is not _BINARY or not take(data.data):
            self.is_behind = True
            super().feed_data(data, size)


class Inlet(web.WebSocketResponse):
    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_msg_size=max_bytes, compress=False, heartbeat=None, timeout=_CLOSE_S)
        self._max_bytes = max_bytes

    def give_to(self, take: Callable[[bytes], bool]) -> None:
        """Hand each frame on as it is read. `receive` gets what is not taken, for want of room."""
        if isinstance(self._reader, _Queue):
            self._reader.take = take

    async def receive(self, timeout: float | None = None) -> WSMessage:
        """Whoever comes back for more has handed on what it had before."""
        if isinstance(self._reader, _Queue):
            self._reader.is_behind = bool(self._reader._buffer)
        return await super().receive(timeout)

    def keep(self) -> None:
        """Hand nothing on any more."""
        if isinstance(self._reader, _Queue):
            self._reader.take = None

    def _post_start(self, request: BaseRequest, protocol: str | None, writer: Any) -> None:
        """As aiohttp's, which cannot be told to use another queue."""
        try:
            queue = _Queue(request.protocol, _QUEUED_BYTES, loop=asyncio.get_running_loop())
            parser = WebSocketReader(queue, self._max_bytes, compress=False, decode_text=True)
        except TypeError:  # a later aiohttp has changed them: then everything is received as ever
            super()._post_start(request, protocol, writer)
            return
        self._ws_protocol, self._writer = protocol, writer
        self._reader, self._parser = queue, parser
        request.protocol.set_parser(parser)
        request.protocol.keep_alive(False)
