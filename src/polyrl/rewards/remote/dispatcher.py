"""The trainer's connection to its reward workers: it dials the manager, sends jobs, and hands on what is answered.

Rules kept here: dialled again after any break, for as long as the run lasts. A frame that cannot be sent is dropped:
places.py sends a job again when its worker is there again. A fault that waiting cannot mend is told, and does not end
the run: the trainer's own line (client/line.py) meets it too.
"""

import asyncio
import contextlib
import logging

import aiohttp

from polyrl.errors import UserError
from polyrl.not_data import NOT_DATA
from polyrl.rewards.remote.places import RemotePlaces
from polyrl.telemetry.repeats import Repeats
from polyrl.wire import frames
from polyrl.wire import reward_frames as r
from polyrl.wire.dial import Dialer, SessionOver, Unreachable, pauses

log = logging.getLogger("polyrl.rewards")

_LOOK_EVERY_S = 1.0


class Dispatcher:
    """`session` is the trainer's. `run` lasts until it is cancelled."""

    def __init__(self, places: RemotePlaces, dialer: Dialer, session: str, terms: bytes, num_local: int) -> None:
        self._places, self._dialer, self._session = places, dialer, session
        self._hello = r.DispatcherHello(r.RewardRules(places.era, terms), num_local)
        self._outbox: asyncio.Queue[r.FromDispatcher] = asyncio.Queue()
        self._faults = Repeats()

    async def run(self) -> None:
        waits = pauses()
        async with self._dialer:
            while True:
                try:
                    await self._stay_connected()
                    waits = pauses()
                except (Unreachable, SessionOver) as error:
                    log.debug("the connection for reward workers: %s", error)
                except UserError as error:
                    if (often := self._faults.again(str(error))) is not None:
                        log.warning("no reward worker can be reached: %s%s", error, often)
                await asyncio.sleep(next(waits))

    async def _stay_connected(self) -> None:
        socket = await self._dialer.stream("/v1/rewards", self._session, frames.MAX_TRAINER_FRAME_BYTES)
        self._outbox = asyncio.Queue()
        tasks = [asyncio.create_task(one) for one in (self._send_all(socket), self._look())]
        try:
            await socket.send_bytes(frames.encode(self._hello))
            self._places.connected(self._outbox.put_nowait)
            async for message in socket:
                if message.type is not aiohttp.WSMsgType.BINARY:
                    break
                self._hear(message.data)
        except (aiohttp.ClientError, ConnectionError, OSError) as error:
            log.info("the connection for reward workers broke: %s", error)
        finally:
            self._places.disconnected()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await socket.close()

    async def _send_all(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        with contextlib.suppress(aiohttp.ClientError, ConnectionError, OSError):
            while True:
                await socket.send_bytes(frames.encode(await self._outbox.get()))

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            self._places.look(asyncio.get_running_loop().time())

    def _hear(self, data: bytes) -> None:
        try:
            frame = r.decode_to_dispatcher(data)
        except NOT_DATA as error:
            raise UserError(f"{self._dialer.url}: what it sent is no frame of this PolyRL: {error}") from error
        match frame:
            case r.RewardFleet():
                self._places.hear_fleet(frame.seats)
            case r.WorkerAnswered():
                self._places.hear(frame.worker, frame.life, frame.said)
            case frames.Release():
                raise UserError(f"the manager refused us: {frame.why}")
