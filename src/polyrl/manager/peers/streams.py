"""The WebSockets of workers and of the trainer: each connection hands its frames to the service, and sends its link's.

Rules kept here: a connection that says no Hello in time is cut off. A frame for which the service has no room waits,
and with it the reading. A worker's message that does not end is bounded (inlet.py); a trainer is ours, and what it says
is large. inlet.py builds on classes that aiohttp does not promise to keep: where they are gone, frames are received as
aiohttp has it, and one warning says what that costs.
"""

import asyncio
import importlib
import logging
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import WebSocketError, WSMsgType, web

from polyrl.errors import Refused
from polyrl.manager.frames_in import from_dispatcher, from_hosts, from_reward_workers, from_trainer, from_workers
from polyrl.manager.peers.link import Link
from polyrl.manager.peers.reward_sessions import DispatcherSession, RewardSession
from polyrl.manager.peers.sessions import HostSession, TrainerSession, WorkerSession
from polyrl.manager.service import Service
from polyrl.wire import frames
from polyrl.wire.reward_frames import MAX_DISPATCHER_FRAME_BYTES, MAX_REWARD_WORKER_FRAME_BYTES

if TYPE_CHECKING:
    from polyrl.manager.peers.inlet import Inlet

log = logging.getLogger("polyrl.manager")

_MB = 1 << 20
_FAREWELL_S = 1.0
_CLOSE_S = 5.0

FindModule = Callable[[str], ModuleType]
AnySession = WorkerSession | TrainerSession | HostSession | RewardSession | DispatcherSession


class PlainInlet(web.WebSocketResponse):
    """A connection's receiving half as aiohttp has it: `receive` gets every frame."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_msg_size=max_bytes, compress=False, heartbeat=None, timeout=_CLOSE_S)

    def give_to(self, take: Callable[[bytes], bool]) -> None:
        """Hand nothing on."""

    def keep(self) -> None:
        """Hand nothing on any more."""


def find_inlet(find: FindModule = importlib.import_module) -> Any:
    """Return the module inlet.py; None, with a warning, where this aiohttp lacks the classes that it builds on."""
    try:
        return find("polyrl.manager.peers.inlet")
    except ImportError as error:
        log.warning(
            "aiohttp %s: %s; expected the reader of aiohttp 3.14. Frames are received as aiohttp has it: each takes "
            "more CPU, and limits.max_unfinished_mb and limits.message_timeout_s are not kept",
            aiohttp.__version__, error,
        )  # fmt: skip
        return None


class Streams:
    """All connections of workers and trainers."""

    def __init__(self, service: Service, find: FindModule = importlib.import_module) -> None:
        self._service = service
        limits = service.settings.limits
        self._hello_timeout_s = limits.request_timeout_s
        self._fast = find_inlet(find)
        if self._fast is not None:
            self._unfinished = self._fast.Unfinished(int(limits.max_unfinished_mb * _MB), limits.message_timeout_s)
        self._links: set[Link] = set()

    def close(self, why: str) -> None:
        for link in self._links:
            link.close(why)

    async def see_off(self, request: web.Request, key: str) -> web.StreamResponse | None:
        """Repeat its release to a worker that was given up for good; None for another, which may join again."""
        farewell = await self._service.call(lambda lobby: lobby.farewells.get(key))
        socket = web.WebSocketResponse(timeout=_FAREWELL_S)
        if farewell is None or not socket.can_prepare(request):
            return None
        await socket.prepare(request)
        await socket.send_bytes(frames.encode(farewell))
        await socket.close()
        return socket

    async def run(self, request: web.Request, session: AnySession) -> web.StreamResponse:
        """Serve a connection until it ends."""
        service, settings = self._service, self._service.settings.stream
        socket = self._inlet(request, session)
        if not socket.can_prepare(request):
            raise Refused("websocket", "expected a WebSocket")
        await socket.prepare(request)
        link = Link(socket, int(settings.max_queued_mb * _MB), request.remote or "")
        self._links.add(link)
        service.post(lambda _: session.connect(link))
        pump = asyncio.create_task(link.pump(request.transport, settings.send_timeout_s))
        pump.add_done_callback(lambda sent: sent.result() or _abort(request))
        try:
            await self._receive(socket, session, link)
        except TimeoutError:
            service.count_refusal("silent")
            link.close("no Hello came", code=1008)
        finally:
            socket.keep()
            _post_gone(service, session, link)
            link.close("the connection is over")
            self._links.discard(link)
            await pump
            if link.is_too_slow:
                service.count_refusal("slow_reader")
        return socket

    async def _receive(self, socket: "Inlet | PlainInlet", session: AnySession, link: Link) -> None:
        """Hand frames on until the connection ends. Raises TimeoutError where no Hello comes."""
        service = self._service
        async with asyncio.timeout(self._hello_timeout_s):
            message = await socket.receive()
        hearer = _HEARERS[type(session)]
        socket.give_to(partial(service.hear, hearer, session, link))
        while message.type is WSMsgType.BINARY:  # the first, and those that were not taken for want of room
            if not service.hear(hearer, session, link, message.data):
                service.post((hearer, session, link, message.data))
                await service.wait_for_room()
            message = await socket.receive()
        if message.type is WSMsgType.TEXT:
            service.count_refusal("frame")
            link.close("frames are binary", code=1003)
        elif isinstance(message.data, WebSocketError):
            service.count_refusal("frame")  # too large, or no WebSocket frame at all; the peer was told

    def _inlet(self, request: web.Request, session: AnySession) -> "Inlet | PlainInlet":
        if isinstance(session, TrainerSession | DispatcherSession):
            is_trainer = isinstance(session, TrainerSession)
            most = frames.MAX_TRAINER_FRAME_BYTES if is_trainer else MAX_DISPATCHER_FRAME_BYTES
            return (PlainInlet if self._fast is None else self._fast.Inlet)(most)
        is_reward = isinstance(session, RewardSession)
        most = MAX_REWARD_WORKER_FRAME_BYTES if is_reward else frames.MAX_WORKER_FRAME_BYTES
        if self._fast is None:
            return PlainInlet(most)

        def cut(why: str) -> None:
            log.warning("worker %s is cut off: %s", session.name, why)
            self._service.count_refusal("unfinished")
            _abort(request)

        return self._fast.Inlet(most, self._unfinished, cut)


_HEARERS: dict[type, Any] = {
    WorkerSession: from_workers.said,
    TrainerSession: from_trainer.said,
    HostSession: from_hosts.said,
    RewardSession: from_reward_workers.said,
    DispatcherSession: from_dispatcher.said,
}


def _post_gone(service: Service, session: AnySession, link: Link) -> None:
    """Tell the owner that a connection is over."""
    match session:
        case WorkerSession():
            service.post(lambda _: from_workers.gone(session, link))
        case HostSession():
            service.post(lambda _: from_hosts.gone(session, link))
        case RewardSession():
            service.post(lambda lobby: from_reward_workers.gone(lobby, session, link))
        case DispatcherSession():
            service.post(lambda lobby: from_dispatcher.gone(lobby, session))
        case TrainerSession():
            service.post(lambda lobby: from_trainer.gone(lobby, session, link))


def _abort(request: web.Request) -> None:
    """End a connection now. A close would wait until the peer has read what is buffered for it."""
    if request.transport is not None:
        request.transport.abort()
