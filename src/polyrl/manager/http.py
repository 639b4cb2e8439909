"""The one port: it serves the table of routes.py over HTTP, and the WebSockets of workers and of the trainer.

Rules kept here: every route but health wants a token; its scope is what a token may do. A wrong request is answered
with one line of JSON, counted, and never reaches the lobby. A connection that says nothing is cut off.
"""

import asyncio
import contextlib
import errno
import importlib
import json
import os
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
from aiohttp import web

from polyrl.disk import write_whole
from polyrl.errors import Refused, UserError
from polyrl.manager import asking, opening
from polyrl.manager.dashboard import Dashboard
from polyrl.manager.peers.door import Connection, Door, Handshake
from polyrl.manager.peers.streams import FindModule, Streams
from polyrl.manager.request_log import REQUESTS
from polyrl.manager.routes import ROUTES, BadRequest, Route, RouteCall
from polyrl.manager.service import Service
from polyrl.manager.serving.answers import Answerer
from polyrl.manager.serving.requests import AskError, error_reply
from polyrl.manager.serving.texts import Served
from polyrl.not_data import NOT_DATA
from polyrl.wire.control import READ_HEADER, ErrorReply
from polyrl.wire.credentials import Scope, token_of

ADDRESS_FILE = "manager.json"
_MB = 1 << 20
_KEEPALIVE_S = 30.0
_LINGER_S = 1.0
"""How long the rest of an unwanted body is still read, so that its sender hears the answer."""
_BURST_S = 10.0
_MAX_ADDRESSES = 10_000

_STATUS_OF = {"name": 423, "full": 429, "websocket": 400}
"""Of refusals. A name, or a place, may be free soon; everything else does not fit the state: 409."""
_OPENAIS = frozenset(
    {"assistants", "audio", "batches", "chat", "completions", "embeddings", "files", "fine_tuning"}
    | {"images", "models", "moderations", "realtime", "responses", "threads", "uploads", "vector_stores"}
)
"""The first names after /v1 in the paths that OpenAI's clients know."""
_NOT_SERVED = f"is not served here; expected one of {', '.join(one.path for one in ROUTES if one.is_of_openai)}"

Middleware = Callable[[web.Request], Awaitable[web.StreamResponse]]
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


class Front:
    """The port and its connections, and which token may use which route."""

    def __init__(
        self, service: Service, served: Served | None = None, find: FindModule = importlib.import_module
    ) -> None:
        self._service = service
        self._answerer = Answerer(service, served)
        self._streams = Streams(service, find)
        self._dashboard = Dashboard(service)
        self._limits = service.settings.limits
        self._joins = JoinLimit(self._limits.joins_per_s)
        self._door = Door(self._limits.connections_per_address, service.count_refusal)
        self._listener: asyncio.Server | None = None
        self._runner: web.AppRunner | None = None

    def app(self) -> web.Application:
        app = web.Application(
            middlewares=[self._guard], client_max_size=int(self._limits.max_body_mb * _MB), handler_args={}
        )
        for route in ROUTES:
            serve = self._server(route)
            if route.method == "GET":
                app.router.add_get(route.path, serve)
            else:
                app.router.add_post(route.path, serve)
        return app

    @property
    def model_name(self) -> str:
        """The name that clients give the model."""
        return self._answerer.name

    async def open_run(self) -> None:
        """Open a run without a trainer, if none is open: workers answer with the weights they were started with."""
        config = asking.config_of(self._service.settings)
        await self._service.call(lambda lobby: opening.open_run_without_trainer(lobby, config))

    # The port

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None) -> ListenAddress:
        """Open the port. Raises UserError if it cannot be had."""
        runner = web.AppRunner(self.app(), handle_signals=False, shutdown_timeout=2.0)
        await runner.setup()
        server, loop = runner.server, asyncio.get_running_loop()
        assert server is not None

        timeout_s = self._limits.request_timeout_s

        def connected() -> Connection:
            return Connection(
                self._door,
                timeout_s,
                server,
                access_log=None,
                logger=REQUESTS,
                keepalive_timeout=_KEEPALIVE_S,
                lingering_time=_LINGER_S,
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
        self._streams.close(why)
        self._answerer.close(why)
        await self._dashboard.close()
        if self._listener is not None:
            self._listener.close()
        await asyncio.sleep(0.05)  # goodbyes go out
        if self._runner is not None:
            await self._runner.cleanup()
        with contextlib.suppress(OSError):
            (self._service.run_dir / ADDRESS_FILE).unlink()

    # A request

    @web.middleware
    async def _guard(self, request: web.Request, handler: Middleware) -> web.StreamResponse:
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
        except BadRequest as failure:
            self._service.count_refusal(failure.kind)
            return _refusal(request, failure.code, str(failure))
        except Refused as refused:
            self._service.count_refusal(refused.kind)
            return _refusal(request, _STATUS_OF.get(refused.kind, 409), str(refused))
        except AskError as failure:
            self._service.count_refusal("ask")
            return _reply(failure.reply(), failure.status)
        finally:
            if request.protocol.transport is not None:
                self._door.rest(request.protocol)
                self._door.watch(request.protocol, _KEEPALIVE_S + self._limits.request_timeout_s)

    def _server(self, route: Route) -> Middleware:
        """Return what serves a route: it checks the token, reads the body, and encodes the reply."""

        async def serve(request: web.Request) -> web.StreamResponse:
            scope = self._service.tokens.scope_of(token_of(request.headers.get("Authorization")))
            if route.scope is not None:
                _check_scope(route.scope, scope)
                self._door.work(request.protocol)
            if route.is_limited and not self._joins.allows(request.remote or "", time.monotonic()):
                raise BadRequest(429, "join_rate", "too many joins from this address; try again in a second")
            body = None if route.body is None else await self._body(request, route, route.body)
            answer = await route.handle(
                RouteCall(request, scope, body, self._service, self._answerer, self._streams, self._dashboard)
            )
            return _reply(answer) if isinstance(answer, msgspec.Struct) else answer

        return serve

    async def _body(self, request: web.Request, route: Route, kind: type[StructT]) -> StructT:
        if route.may_be_empty and not request.can_read_body:
            return kind()
        try:
            async with asyncio.timeout(self._limits.request_timeout_s):
                body = await request.read()
        except TimeoutError as failure:
            raise BadRequest(408, "slow", "the body did not come in time") from failure
        try:
            return msgspec.json.decode(body, type=kind)
        except NOT_DATA as failure:
            raise BadRequest(400, "body", f"the body is not what was expected: {failure}") from failure


def _check_scope(wanted: Scope, has: Scope | None) -> None:
    if has is None:
        raise BadRequest(401, "token", "a valid token is needed: Authorization: Bearer TOKEN")
    if has not in (wanted, "admin"):
        raise BadRequest(403, "scope", f"the {has} token may not do this; the {wanted} token may")


def _reply(body: msgspec.Struct, code: int = 200) -> web.Response:
    return web.Response(body=_encode(body), status=code, content_type="application/json")


def _starting(request: web.Request, share: float) -> web.Response:
    answer = _refusal(request, 503, f"the manager starts again: {share:.0%} of its run is read")
    answer.headers["Retry-After"], answer.headers[READ_HEADER] = "1", f"{share:.4f}"
    return answer


def _refusal(request: web.Request, code: int, text: str) -> web.Response:
    return _reply(error_reply(code, text) if _is_of_openai(request) else ErrorReply(error=text), code)


def _is_of_openai(request: web.Request) -> bool:
    """Return whether OpenAI's clients read the refusal. All other paths under /v1 are our own peers'."""
    parts = request.path.split("/")
    return len(parts) > 2 and parts[1] == "v1" and parts[2] in _OPENAIS


def _no_route(request: web.Request, failure: web.HTTPException) -> str:
    if failure.status == 404 and _is_of_openai(request):
        return f"{request.path} {_NOT_SERVED}"
    return failure.reason


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


class PortTaken(UserError):
    """Another process listens on the port."""


async def check_that_it_can_listen(host: str, port: int) -> None:
    """Raise UserError if a manager could not have the port now; PortTaken if another process has it."""
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
    """Write the address at once: others wait for the file, and read it as soon as it is there."""
    facts = {"url": address.url, "pid": os.getpid()}
    try:
        write_whole(run_dir / ADDRESS_FILE, f"{json.dumps(facts)}\n".encode())
    except OSError as error:
        raise UserError(f"{run_dir / ADDRESS_FILE}: cannot be written: {error.strerror or error}") from error
