"""A trainer's line to the manager: dialled again after any break; statements are resent until they are on file.

Rules kept here: statements are numbered and go out in order. After a break, all that was not acknowledged goes out
again before anything new. A fault that waiting cannot mend (a wrong token, another trainer) is a UserError.

Left out: what statements and frames mean (fleet.py).
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import aiohttp

from polyrl.errors import UserError
from polyrl.not_data import NOT_DATA
from polyrl.wire import frames
from polyrl.wire.dial import Dialer, Patience, SessionOver, Starting, Unreachable, pauses

log = logging.getLogger("polyrl.client")


class Line:
    def __init__(
        self,
        dialer: Dialer,
        give_up_after_s: float,
        hear: Callable[[frames.ToTrainer], Awaitable[None]],
        broke: Callable[[], None],
    ) -> None:
        """`hear` is given every frame; `broke` is called when a connection is over, before there is another."""
        self._dialer, self._give_up_after_s, self._hear, self._broke = dialer, give_up_after_s, hear, broke
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._greeted = False
        """The backlog is sent: each statement goes out by itself."""
        self._unacknowledged: deque[tuple[int, frames.Statement]] = deque()
        self.last_said = 0
        """The number of the last statement."""

    async def state(self, make: Callable[[int], frames.Statement]) -> None:
        """Say it, or leave it to the next connection."""
        self.last_said += 1
        statement = make(self.last_said)
        self._unacknowledged.append((self.last_said, statement))
        if self._socket is None or self._socket.closed or not self._greeted:
            return
        with contextlib.suppress(aiohttp.ClientError, ConnectionError, OSError):
            await self._socket.send_bytes(frames.encode(statement))

    def is_on_file(self, number: int) -> bool:
        """Return whether the manager has this statement, and all before it."""
        return not self._unacknowledged or self._unacknowledged[0][0] > number

    async def again(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Retry until the manager can be reached or patience is over."""
        patience = Patience(self._give_up_after_s)
        for pause in pauses():
            try:
                return await call()
            except Unreachable as error:
                if isinstance(error, Starting):
                    log.info("%s; waiting for it", error)
                if patience.is_over(error):
                    raise UserError(f"{error}; given up after {self._give_up_after_s:.0f} s") from error
                await asyncio.sleep(pause)
        raise AssertionError("pauses never end")

    async def keep(self, session: str) -> None:
        """Connected, or about to be, until it is cancelled."""
        while True:
            await self.again(lambda: self._stay_connected(session))
            await asyncio.sleep(next(pauses()))

    async def close(self) -> None:
        if self._socket is not None:
            await self._socket.close()

    async def _stay_connected(self, session: str) -> None:
        try:
            self._socket = await self._dialer.stream("/v1/trainer", session, frames.MAX_TRAINER_FRAME_BYTES)
        except SessionOver as error:  # a manager forgets no session by itself; opening again would end the other's
            raise UserError(f"{self._dialer.url}: another trainer has opened the run, or it is another run") from error
        try:
            await self._socket.send_bytes(frames.encode(frames.TrainerHello()))
            await self._send_backlog(self._socket)
            async for message in self._socket:
                if message.type is not aiohttp.WSMsgType.BINARY:
                    break
                frame = self._decode(message.data)
                if isinstance(frame, frames.Ack):
                    self._acknowledge(frame.seq)
                await self._hear(frame)
        except (aiohttp.ClientError, ConnectionError, OSError) as error:
            log.info("the connection to the manager broke: %s", error)
        finally:
            self._greeted = False
            self._broke()

    async def _send_backlog(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Send the statements of before, in order; new ones wait behind them."""
        sent = 0
        while waiting := [one for one in self._unacknowledged if one[0] > sent]:
            for number, statement in waiting:
                await socket.send_bytes(frames.encode(statement))
                sent = number
        self._greeted = True

    def _decode(self, data: bytes) -> frames.ToTrainer:
        try:
            return frames.decode_to_trainer(data)
        except NOT_DATA as error:
            raise UserError(f"{self._dialer.url}: what it sent is no frame of this PolyRL: {error}") from error

    def _acknowledge(self, number: int) -> None:
        while self._unacknowledged and self._unacknowledged[0][0] <= number:
            self._unacknowledged.popleft()
