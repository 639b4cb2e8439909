"""The one port: HTTP/JSON for control, a WebSocket for each worker and for the trainer. openapi.json describes it.

Rules kept here: every route but health wants a token; what a token may do is its scope. A request that is wrong is
answered with one line of JSON, counted, and never reaches the executor. Who connects and says nothing is cut off.
"""

import asyncio
import contextlib
import errno
import importlib.resources
import json
import logging
import os
import re
import ssl
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
from aiohttp import WebSocketError, WSMsgType, web

from polyrl.disk import write_whole
from polyrl.errors import Refused, RequestError, UserError
from polyrl.ids import WorkerName
from polyrl.manager import asking, opening
from polyrl.manager.frames_in import from_trainer, from_workers, joining
from polyrl.manager.peers.door import Connection, Door, Handshake
from polyrl.manager.peers.inlet import Inlet, Unfinished
from polyrl.manager.peers.link import Link
from polyrl.manager.peers.sessions import TrainerSession, WorkerSession
from polyrl.manager.service import Service
from polyrl.manager.serving.failures import AskError, error_reply
from polyrl.manager.serving.requests import ChatRequest, CompletionRequest
from polyrl.manager.serving.routes import Answerer
from polyrl.manager.serving.texts import Served
from polyrl.manager.status import metrics, status
from polyrl.scheduling.core import events as e
from polyrl.wire import frames
from polyrl.wire.control import (
    READ_HEADER,
    SESSION_HEADER,
    WORKER_NAME,
    DrainRequest,
    ErrorReply,
    JoinRequest,
    RunRequest,
    other_protocol,
)
from polyrl.wire.credentials import Scope, token_of

log = logging.getLogger("polyrl.manager")

ADDRESS_FILE = "manager.json"
_MB = 1 << 20
_KEEPALIVE_S = 30.0
_LINGER_S = 1.0
"""How long the rest of a body that nobody wants is still read, so that its sender hears the answer."""
_BURST_S = 10.0
_MAX_ADDRESSES = 10_000

_MAY: dict[Scope, tuple[Scope, ...]] = {
    "worker": ("worker", "admin"),
    "generate": ("generate", "admin"),
    "admin": ("admin",),
}
_ASKED_AT = ("/v1/models", "/v1/completions", "/v1/chat/completions")
_OPENAIS = frozenset(
    {"assistants", "audio", "batches", "chat", "completions", "embeddings", "files", "fine_tuning"}
    | {"images", "models", "moderations", "realtime", "responses", "threads", "uploads", "vector_stores"}
)
"""What follows /v1 in the paths that its clients know."""
_NOT_SERVED = f"is not served here; expected one of {', '.join(_ASKED_AT)}"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
StructT = TypeVar("StructT", bound=msgspec.Struct)
_encode = msgspec.json.Encoder().encode


class ListenAddress(NamedTuple):
    host: str
    port: int
    tls: bool

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"


def reply(body: msgspec.Struct, code: int = 200) -> web.Response:
    return web.Response(body=_encode(body), status=code, content_type="application/json")


def error(code: int, text: str) -> web.Response:
    return reply(ErrorReply(error=text), code)


class Front:
    """Routes, and who may use them."""

    def __init__(self, service: Service, served: Served | None = None) -> None:
        self._service = service
        self._answerer = Answerer(service, served)
        self._limits = service.settings.limits
        self._joins = JoinLimit(self._limits.joins_per_s)
        self._door = Door(self._limits.connections_per_address, service.count_refusal)
        self._unfinished = Unfinished(int(self._limits.max_unfinished_mb * _MB), self._limits.message_timeout_s)
        self._links: set[Link] = set()
        self._listener: asyncio.Server | None = None
        self._runner: web.AppRunner | None = None

    def app(self) -> web.Application:
        app = web.Application(
            middlewares=[self._guard], client_max_size=int(self._limits.max_body_mb * _MB), handler_args={}
        )
        app.add_routes(
            [
                web.get("/v1/health", self._health),
                web.get("/v1/openapi.json", self._scoped("worker", self._openapi)),
                web.post("/v1/join", self._scoped("worker", self._join)),
                web.get("/v1/workers/{name}", self._scoped("worker", self._look_up)),
                web.get("/v1/worker", self._scoped("worker", self._worker)),
                web.post("/v1/run", self._scoped("admin", self._open_run)),
                web.get("/v1/trainer", self._scoped("admin", self._trainer)),
                web.get("/v1/status", self._scoped("admin", self._status)),
                web.get("/v1/metrics", self._scoped("admin", self._metrics)),
                web.post("/v1/workers/{name}/drain", self._scoped("admin", self._drain)),
                web.post("/v1/pause", self._scoped("admin", self._pause)),
                web.post("/v1/resume", self._scoped("admin", self._resume)),
                web.get("/v1/models", self._scoped("generate", self._models)),
                web.post("/v1/completions", self._scoped("generate", self._complete)),
                web.post("/v1/chat/completions", self._scoped("generate", self._chat)),
            ]
        )
        return app

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self._answerer.name

    # The port

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None) -> ListenAddress:
        """Raises UserError if the port cannot be had."""
        runner = web.AppRunner(self.app(), handle_signals=False, shutdown_timeout=2.0)
        await runner.setup()
        server, loop = runner.server, asyncio.get_running_loop()
        assert server is not None

        timeout_s = self._limits.request_timeout_s

        def connected() -> Connection:
            return Connection(
                self._door, timeout_s, server, access_log=None, keepalive_timeout=_KEEPALIVE_S, lingering_time=_LINGER_S
            )

        def accepted() -> asyncio.Protocol:
            return connected() if tls is None else Handshake(self._door, timeout_s, tls, connected)

        try:
            self._listener = await loop.create_server(accepted, host, port, backlog=1024)
        except OSError as failure:
            await runner.cleanup()
            raise UserError(_cannot_listen(host, port, failure)) from failure
        self._runner = runner
        address = ListenAddress(host, self._listener.sockets[0].getsockname()[1], tls is not None)
        _write_address(self._service.run_dir, address)
        return address

    async def close(self, why: str) -> None:
        for link in self._links:
            link.close(why)
        self._answerer.close(why)
        if self._listener is not None:
            self._listener.close()
        await asyncio.sleep(0.05)  # goodbyes go out
        if self._runner is not None:
            await self._runner.cleanup()
        with contextlib.suppress(OSError):
            (self._service.run_dir / ADDRESS_FILE).unlink()

    # Who may

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._door.heard(request.protocol)
        share = self._service.share_read
        if share is not None:
            return _starting(request, share)
        try:
            return await handler(request)
        except web.HTTPException as failure:
            is_large = isinstance(failure, web.HTTPRequestEntityTooLarge)
            self._service.count_refusal("body" if is_large else "route")
            most = f"the body is larger than {self._limits.max_body_mb:g} MB (limits.max_body_mb)"
            answer = _refusal(request, failure.status, most if is_large else _no_route(request, failure))
            if "Allow" in failure.headers:
                answer.headers["Allow"] = failure.headers["Allow"]
            return answer
        except _BadRequest as failure:
            self._service.count_refusal(failure.kind)
            return _refusal(request, failure.code, str(failure))
        except AskError as failure:
            self._service.count_refusal("ask")
            return reply(failure.reply(), failure.status)
        finally:
            if request.protocol.transport is not None:
                self._door.rest(request.protocol)
                self._door.watch(request.protocol, _KEEPALIVE_S + self._limits.request_timeout_s)

    def _scope(self, request: web.Request) -> Scope | None:
        return self._service.tokens.scope_of(token_of(request.headers.get("Authorization")))

    def _scoped(self, scope: Scope, handler: Handler) -> Handler:
        async def checked(request: web.Request) -> web.StreamResponse:
            has = self._scope(request)
            if has is None:
                raise _BadRequest(401, "token", "a valid token is needed: Authorization: Bearer TOKEN")
            if has not in _MAY[scope]:
                raise _BadRequest(403, "scope", f"the {has} token may not do this; the {scope} token may")
            self._door.work(request.protocol)
            return await handler(request)

        return checked

    async def _read(self, request: web.Request, kind: type[StructT]) -> StructT:
        try:
            async with asyncio.timeout(self._limits.request_timeout_s):
                body = await request.read()
        except TimeoutError as failure:
            raise _BadRequest(408, "slow", "the body did not come in time") from failure
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as failure:
            raise _BadRequest(400, "body", f"the body is not what was expected: {failure}") from failure

    # Control

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _openapi(self, _: web.Request) -> web.Response:
        return web.Response(text=openapi_text(), content_type="application/json")

    async def _join(self, request: web.Request) -> web.Response:
        if not self._joins.allows(request.remote or "", time.monotonic()):
            raise _BadRequest(429, "join_rate", "too many joins from this address; try again in a second")
        wanted = await self._read(request, JoinRequest)
        _check_protocol(wanted.protocol)
        if wanted.local and self._scope(request) != "admin":
            raise _BadRequest(403, "scope", "only who has the admin token may join as the trainer's own worker")
        before, address = request.headers.get(SESSION_HEADER, ""), request.remote or ""
        try:
            return reply(await self._service.ask(lambda lobby: joining.join(lobby, wanted, before, address)))
        except Refused as refused:
            status = {"name": 423, "full": 429}.get(refused.kind, 409)  # a name, or a place, may be free soon
            raise _BadRequest(status, refused.kind, str(refused)) from refused

    async def _look_up(self, request: web.Request) -> web.Response:
        name = WorkerName(request.match_info["name"])
        if not re.fullmatch(WORKER_NAME, name):
            raise _BadRequest(404, "worker", f"no worker is called {name!r}")
        before = request.headers.get(SESSION_HEADER, "")
        found = await self._service.ask(lambda lobby: joining.look_up(lobby, name, before))
        if found.refusal:
            self._service.count_refusal("name")
        return reply(found)

    async def _open_run(self, request: web.Request) -> web.Response:
        wanted = await self._read(request, RunRequest)
        _check_protocol(wanted.protocol)
        try:
            return reply(await self._service.ask(lambda lobby: opening.open_run(lobby, wanted)))
        except Refused as refused:
            raise _BadRequest(409, refused.kind, str(refused)) from refused

    async def _status(self, _: web.Request) -> web.Response:
        return reply(await self._service.ask(lambda lobby: status(lobby, self._service.uptime_s)))

    async def _metrics(self, _: web.Request) -> web.Response:
        text = await self._service.ask(lambda lobby: metrics(lobby, self._service.uptime_s))
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _drain(self, request: web.Request) -> web.Response:
        name = WorkerName(request.match_info["name"])
        wanted = await self._read(request, DrainRequest) if request.can_read_body else DrainRequest()
        if not await self._service.ask(lambda lobby: joining.drain(lobby, name, wanted.reason, wanted.notice_s)):
            raise _BadRequest(404, "worker", f"there is no worker {name!r}")
        return web.json_response({"draining": name})

    async def _pause(self, _: web.Request) -> web.Response:
        return await self._set_paused(e.PlacingPaused())

    async def _resume(self, _: web.Request) -> web.Response:
        return await self._set_paused(e.PlacingResumed())

    async def _set_paused(self, event: e.PlacingPaused | e.PlacingResumed) -> web.Response:
        try:
            await self._service.ask(lambda lobby: lobby.need_run().tell(event))
        except Refused as refused:
            raise _BadRequest(409, refused.kind, str(refused)) from refused
        return web.json_response({"paused": isinstance(event, e.PlacingPaused)})

    # Whoever asks

    async def _models(self, _: web.Request) -> web.Response:
        return reply(self._answerer.models())

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        return await self._answerer.complete(request, await self._read(request, CompletionRequest))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answerer.chat(request, await self._read(request, ChatRequest))

    async def open_run(self) -> None:
        """A run without a trainer, if there is none: whoever asks is answered by workers as they were started."""
        config = asking.config_of(self._service.settings)
        await self._service.ask(lambda lobby: opening.open_run_without_trainer(lobby, config))

    # Streams

    async def _worker(self, request: web.Request) -> web.StreamResponse:
        key = _session_key(request)
        session = await self._service.ask(lambda lobby: joining.find_worker(lobby, key))
        if session is None:
            return await self._see_off(request, key)
        return await self._stream(request, session, frames.MAX_WORKER_FRAME_BYTES)

    async def _see_off(self, request: web.Request, key: str) -> web.StreamResponse:
        """A worker whose session is over joins again, unless it was given up for good."""
        farewell = await self._service.ask(lambda lobby: lobby.farewells.get(key))
        socket = web.WebSocketResponse(timeout=_LINGER_S)
        if farewell is None or not socket.can_prepare(request):
            raise _BadRequest(410, "session", "that session is over: join again")
        await socket.prepare(request)
        await socket.send_bytes(frames.encode(farewell))
        await socket.close()
        return socket

    async def _trainer(self, request: web.Request) -> web.StreamResponse:
        key = _session_key(request)
        session = await self._service.ask(lambda lobby: opening.find_trainer(lobby, key))
        if session is None:
            raise _BadRequest(410, "session", "that session is over: open the run again")
        return await self._stream(request, session, frames.MAX_TRAINER_FRAME_BYTES)

    async def _stream(
        self, request: web.Request, session: WorkerSession | TrainerSession, max_bytes: int
    ) -> web.StreamResponse:
        service = self._service
        socket = self._inlet(request, session, max_bytes)
        if not socket.can_prepare(request):
            raise _BadRequest(400, "websocket", "expected a WebSocket")
        await socket.prepare(request)
        link = Link(socket, int(service.settings.stream.max_queued_mb * _MB), request.remote or "")
        self._links.add(link)
        service.post(lambda _: session.connect(link))
        pump = asyncio.create_task(link.pump(request.transport, service.settings.stream.send_timeout_s))
        pump.add_done_callback(lambda sent: sent.result() or _abort(request))
        try:
            async with asyncio.timeout(self._limits.request_timeout_s):
                first = await socket.receive()
            hearer = from_workers.said if isinstance(session, WorkerSession) else from_trainer.said
            socket.give_to(partial(service.hear, hearer, session, link))
            while first.type is WSMsgType.BINARY:  # the first, and those for which there was no room
                service.post((hearer, session, link, first.data))
                await service.wait_for_room()
                first = await socket.receive()
            if first.type is WSMsgType.TEXT:
                service.count_refusal("frame")
                link.close("frames are binary", code=1003)
            elif isinstance(first.data, WebSocketError):
                service.count_refusal("frame")  # too large, or no WebSocket frame at all; it was told
        except TimeoutError:
            service.count_refusal("silent")
            link.close("no Hello came", code=1008)
        finally:
            socket.keep()
            if isinstance(session, WorkerSession):
                service.post(lambda _: from_workers.gone(session, link))
            else:
                service.post(lambda lobby: from_trainer.gone(lobby, session, link))
            link.close("the connection is over")
            self._links.discard(link)
            await pump
            if link.is_too_slow:
                service.count_refusal("slow_reader")
        return socket

    def _inlet(self, request: web.Request, session: WorkerSession | TrainerSession, max_bytes: int) -> Inlet:
        """Where what a worker has begun to say is bounded; a trainer is ours, and what it says is large."""
        if isinstance(session, TrainerSession):
            return Inlet(max_bytes)

        def cut(why: str) -> None:
            log.warning("worker %s is cut off: %s", session.name, why)
            self._service.count_refusal("unfinished")
            _abort(request)

        return Inlet(max_bytes, self._unfinished, cut)


def _starting(request: web.Request, share: float) -> web.Response:
    answer = _refusal(request, 503, f"the manager starts again: {share:.0%} of its run is read")
    answer.headers["Retry-After"], answer.headers[READ_HEADER] = "1", f"{share:.4f}"
    return answer


def _refusal(request: web.Request, code: int, text: str) -> web.Response:
    return reply(error_reply(code, text), code) if _is_of_openai(request) else error(code, text)


def _is_of_openai(request: web.Request) -> bool:
    """What is refused has OpenAI's shape. All else under /v1 is ours: workers that are newer ask for more of it."""
    parts = request.path.split("/")
    return len(parts) > 2 and parts[1] == "v1" and parts[2] in _OPENAIS


def _no_route(request: web.Request, failure: web.HTTPException) -> str:
    if failure.status == 404 and _is_of_openai(request):
        return f"{request.path} {_NOT_SERVED}"
    return failure.reason


class _BadRequest(RequestError):
    def __init__(self, code: int, kind: str, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.kind = kind


class JoinLimit:
    """A bucket of joins for each address, filled at a steady rate."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._buckets: dict[str, tuple[float, float]] = {}

    def allows(self, address: str, now: float) -> bool:
        full = max(1.0, self._per_s * _BURST_S)
        left, at = self._buckets.get(address, (full, now))
        left = min(full, left + (now - at) * self._per_s)
        if len(self._buckets) > _MAX_ADDRESSES:
            self._buckets.clear()
        self._buckets[address] = (max(0.0, left - 1.0), now)
        return left >= 1.0


def _session_key(request: web.Request) -> str:
    key = request.headers.get(SESSION_HEADER)
    if key is None:
        raise _BadRequest(400, "session", f"there is no {SESSION_HEADER}: join, or open the run, first")
    return key


def _abort(request: web.Request) -> None:
    """End a connection now. A close would wait until the peer has read what is buffered for it."""
    if request.transport is not None:
        request.transport.abort()


def _check_protocol(protocol: int) -> None:
    if protocol != frames.PROTOCOL:
        raise _BadRequest(409, "protocol", other_protocol(frames.PROTOCOL, protocol))


def openapi_text() -> str:
    return importlib.resources.files("polyrl.manager").joinpath("openapi.json").read_text(encoding="utf-8")


class PortTaken(UserError):
    """Somebody else listens there."""


async def check_that_it_can_listen(host: str, port: int) -> None:
    """Raises UserError if a manager could not have the port now; PortTaken if somebody else has it."""
    try:
        listener = await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port)
    except OSError as failure:
        kind = PortTaken if failure.errno == errno.EADDRINUSE else UserError
        raise kind(_cannot_listen(host, port, failure)) from failure
    listener.close()
    await listener.wait_closed()


def _cannot_listen(host: str, port: int, failure: OSError) -> str:
    why = failure.strerror or str(failure)
    if failure.errno == errno.EADDRINUSE:  # asyncio's words have the address once more
        why = "address already in use; another port will do, 0 is any that is free"
    return f"the manager cannot listen on {host}:{port}: {why}"


def _write_address(run_dir: Path, address: ListenAddress) -> None:
    """Whole: others wait for the file, and read it as soon as it is there."""
    facts = {"url": address.url, "pid": os.getpid()}
    try:
        write_whole(run_dir / ADDRESS_FILE, f"{json.dumps(facts)}\n".encode())
    except OSError as error:
        raise UserError(f"{run_dir / ADDRESS_FILE}: cannot be written: {error.strerror or error}") from error
