"""Every route of the port, in one table: http.py serves it, and openapi.py describes it.

A handler gets a `RouteCall`: the request, its body in the route's type, and what it may use. It returns the route's
reply, or a response of its own where it streams. The worker's and the trainer's WebSockets are in peers/streams.py, the
answers to OpenAI's clients in serving/.

Rules kept here: handlers never touch the lobby. They ask the service, and the answer comes when its causes are in the
journal.
"""

import json
import re
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any, Literal, NamedTuple

import msgspec
from aiohttp import web

from polyrl.errors import RequestError
from polyrl.ids import HostName, WorkerName
from polyrl.manager import opening, page
from polyrl.manager.dashboard import Dashboard
from polyrl.manager.frames_in import from_hosts, host_joining, joining, reward_joining
from polyrl.manager.lobby import Lobby
from polyrl.manager.openapi import document
from polyrl.manager.peers.reward_sessions import DispatcherSession
from polyrl.manager.peers.streams import Streams
from polyrl.manager.prometheus import metrics as metrics_of
from polyrl.manager.service import Service
from polyrl.manager.serving import replies
from polyrl.manager.serving.answers import Answerer
from polyrl.manager.serving.requests import ChatRequest, CompletionRequest
from polyrl.manager.status import status as status_of
from polyrl.scheduling.core import events as e
from polyrl.wire import control
from polyrl.wire.control import SESSION_HEADER, WORKER_NAME
from polyrl.wire.credentials import Scope
from polyrl.wire.frames import PROTOCOL


class BadRequest(RequestError):
    """A request is refused with this status. `kind` is the name under which refusals are counted."""

    def __init__(self, code: int, kind: str, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.kind = kind


class RouteCall(NamedTuple):
    """A request to one of the routes, after its token and its body were checked."""

    http: web.Request
    scope: Scope | None
    """The scope of the request's token."""
    body: Any
    service: Service
    answerer: Answerer
    streams: Streams
    dashboard: Dashboard

    @property
    def name(self) -> WorkerName:
        return WorkerName(self.http.match_info["name"])

    @property
    def session_before(self) -> str:
        return self.http.headers.get(SESSION_HEADER, "")

    @property
    def session_key(self) -> str:
        """The session that a stream belongs to. Raises BadRequest where there is none."""
        key = self.http.headers.get(SESSION_HEADER)
        if key is None:
            raise BadRequest(400, "session", f"there is no {SESSION_HEADER}: join, or open the run, first")
        return key


Handler = Callable[[RouteCall], Awaitable[msgspec.Struct | web.StreamResponse]]


class Route(NamedTuple):
    method: Literal["GET", "POST"]
    path: str
    scope: Scope | None
    """The scope of the tokens that may use the route, beside the admin's; None: no token is needed."""
    handle: Handler
    """Its name is the operation's id."""
    summary: str
    body: type[msgspec.Struct] | None = None
    reply: type[msgspec.Struct] | None = None
    """The type of a reply in JSON."""
    errors: tuple[int, ...] = ()
    """Refusals beside those that every route has for its token, its body and its session."""
    kind: Literal["json", "text", "events", "page", "socket"] = "json"
    """Text, JSON or server-sent events; a file of the page; or a WebSocket."""
    is_limited: bool = False
    """Requests of one address are bounded a second (limits.joins_per_s)."""
    may_be_empty: bool = False
    """The body may be left out."""

    @property
    def is_of_openai(self) -> bool:
        """Whether OpenAI's clients know the route, and read its refusals."""
        return self.scope == "generate"


# Control


async def health(_: RouteCall) -> control.HealthReply:
    return control.HealthReply()


async def openapi(_: RouteCall) -> web.Response:
    return web.Response(body=_description(), content_type="application/json")


async def join(call: RouteCall) -> control.JoinReply:
    wanted: control.JoinRequest = call.body
    _check_protocol(wanted.protocol)
    if wanted.local and call.scope != "admin":
        raise BadRequest(403, "scope", "only who has the admin token may join as the trainer's own worker")
    before, address = call.session_before, call.http.remote or ""
    return await call.service.call(lambda lobby: joining.join(lobby, wanted, before, address))


async def host_join(call: RouteCall) -> control.HostJoinReply:
    wanted: control.HostJoinRequest = call.body
    _check_protocol(wanted.protocol)
    before = call.session_before
    return await call.service.call(lambda lobby: host_joining.join(lobby, wanted, before))


async def reward_join(call: RouteCall) -> control.RewardJoinReply:
    wanted: control.RewardJoinRequest = call.body
    _check_protocol(wanted.protocol)
    return await call.service.call(lambda lobby: reward_joining.join(lobby, wanted))


async def look_up(call: RouteCall) -> control.NameReply:
    name, before = call.name, call.session_before
    if not re.fullmatch(WORKER_NAME, name):
        raise BadRequest(404, "worker", f"no worker is called {name!r}")
    found = await call.service.call(lambda lobby: joining.look_up(lobby, name, before))
    if found.refusal:
        call.service.count_refusal("name")
    return found


async def open_run(call: RouteCall) -> control.RunReply:
    wanted: control.RunRequest = call.body
    _check_protocol(wanted.protocol)
    return await call.service.call(lambda lobby: opening.open_run(lobby, wanted))


def _check_protocol(protocol: int) -> None:
    if protocol != PROTOCOL:
        raise BadRequest(409, "protocol", control.other_protocol(PROTOCOL, protocol))


async def status(call: RouteCall) -> control.Status:
    return await call.service.call(lambda lobby: status_of(lobby, call.service.uptime_s))


async def metrics(call: RouteCall) -> web.Response:
    text = await call.service.call(lambda lobby: metrics_of(lobby, call.service.uptime_s))
    return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def drain(call: RouteCall) -> control.DrainReply:
    name, wanted = WorkerName(call.name), call.body

    def drain_it(lobby: Lobby) -> bool:
        session = lobby.workers.get(name)
        if session is not None and session.facts.local:
            raise BadRequest(409, "worker", f"{name} is the trainer's own: without it the run ends; stop the trainer")
        return joining.drain(lobby, name, wanted.reason, wanted.notice_s)

    if not await call.service.call(drain_it):
        raise BadRequest(404, "worker", f"there is no worker {name!r}")
    return control.DrainReply(draining=name)


async def drain_host(call: RouteCall) -> control.DrainReply:
    name, reason = HostName(call.name), call.body.reason

    def drain_it(lobby: Lobby) -> bool:
        session = lobby.hosts.get(name)
        if session is not None:
            from_hosts.drain(lobby, session, reason)
        return session is not None

    if not await call.service.call(drain_it):
        raise BadRequest(404, "host", f"there is no host {name!r}")
    return control.DrainReply(draining=name)


async def drain_reward_worker(call: RouteCall) -> control.DrainReply:
    name, reason = call.name, call.body.reason
    if not await call.service.call(lambda lobby: reward_joining.drain(lobby, name, reason)):
        raise BadRequest(404, "reward_worker", f"there is no reward worker {name!r}")
    return control.DrainReply(draining=name)


async def pause(call: RouteCall) -> control.PauseReply:
    await call.service.call(lambda lobby: lobby.need_run().tell(e.PlacingPaused()))
    return control.PauseReply(paused=True)


async def resume(call: RouteCall) -> control.PauseReply:
    await call.service.call(lambda lobby: lobby.need_run().tell(e.PlacingResumed()))
    return control.PauseReply(paused=False)


# Streams


async def worker_stream(call: RouteCall) -> web.StreamResponse:
    key = call.session_key
    session = await call.service.call(lambda lobby: joining.find_worker(lobby, key))
    stream = await (call.streams.see_off(call.http, key) if session is None else call.streams.run(call.http, session))
    if stream is None:
        raise BadRequest(410, "session", "that session is over: join again")
    return stream


async def host_stream(call: RouteCall) -> web.StreamResponse:
    key = call.session_key
    session = await call.service.call(lambda lobby: host_joining.find_host(lobby, key))
    if session is None:
        raise BadRequest(410, "session", "that session is over: join again")
    return await call.streams.run(call.http, session)


async def trainer_stream(call: RouteCall) -> web.StreamResponse:
    key = call.session_key
    session = await call.service.call(lambda lobby: opening.find_trainer(lobby, key))
    if session is None:
        raise BadRequest(410, "session", "that session is over: open the run again")
    return await call.streams.run(call.http, session)


async def reward_stream(call: RouteCall) -> web.StreamResponse:
    key = call.session_key
    session = await call.service.call(lambda lobby: reward_joining.find(lobby, key))
    if session is None:
        raise BadRequest(410, "session", "that session is over: join again")
    return await call.streams.run(call.http, session)


async def dispatcher_stream(call: RouteCall) -> web.StreamResponse:
    key = call.session_key
    if await call.service.call(lambda lobby: opening.find_trainer(lobby, key)) is None:
        raise BadRequest(410, "session", "that session is over: open the run again")
    return await call.streams.run(call.http, DispatcherSession())


# The page


async def dash(_: RouteCall) -> web.Response:
    return page.part()


async def dash_page(_: RouteCall) -> web.Response:
    return page.part()


async def dash_part(call: RouteCall) -> web.Response:
    try:
        return page.part(call.http.match_info["name"])
    except page.NoSuchPart as error:
        raise BadRequest(404, "route", str(error)) from error


async def dash_data(call: RouteCall) -> web.StreamResponse:
    return await call.dashboard.pass_on(call.http)


# Answers


async def models(call: RouteCall) -> replies.ModelList:
    return call.answerer.models()


async def complete(call: RouteCall) -> web.StreamResponse:
    return await call.answerer.complete(call.http, call.body)


async def chat(call: RouteCall) -> web.StreamResponse:
    return await call.answerer.chat(call.http, call.body)


ROUTES = (
    Route("GET", "/v1/health", None, health, "Whether the port is open.", reply=control.HealthReply),
    Route("GET", "/v1/openapi.json", "worker", openapi, "This description, as OpenAPI 3.1."),
    Route(
        "POST", "/v1/join", "worker", join,
        "Join the fleet. The name of a worker that is gone or silent, or whose session is shown, is taken over.",
        control.JoinRequest, control.JoinReply, errors=(409, 423), is_limited=True,
    ),
    Route(
        "GET", "/v1/workers/{name}", "worker", look_up,
        "Whether a worker that is about to start will be let in under this name; `refusal` says why not.",
        reply=control.NameReply, errors=(404,),
    ),
    Route("GET", "/v1/worker", "worker", worker_stream, "A worker's stream of frames.", kind="socket"),
    Route(
        "POST", "/v1/hosts/join", "host", host_join, "Join as a host, which plays an environment's episodes.",
        control.HostJoinRequest, control.HostJoinReply, errors=(409, 423), is_limited=True,
    ),
    Route("GET", "/v1/host", "host", host_stream, "A host's stream of frames.", kind="socket"),
    Route(
        "POST", "/v1/hosts/{name}/drain", "admin", drain_host,
        "Have a host play its episodes to their end and leave.",
        control.DrainRequest, control.DrainReply, errors=(404,), may_be_empty=True,
    ),
    Route(
        "POST", "/v1/reward-workers/join", "reward", reward_join, "Join as a reward worker, which scores answers.",
        control.RewardJoinRequest, control.RewardJoinReply, errors=(409, 423), is_limited=True,
    ),
    Route("GET", "/v1/reward-worker", "reward", reward_stream, "A reward worker's stream of frames.", kind="socket"),
    Route(
        "POST", "/v1/reward-workers/{name}/drain", "admin", drain_reward_worker,
        "Have a reward worker finish what it scores, or hand it back, and leave.",
        control.DrainRequest, control.DrainReply, errors=(404,), may_be_empty=True,
    ),
    Route(
        "GET", "/v1/rewards", "admin", dispatcher_stream, "The trainer's stream of jobs for reward workers.",
        kind="socket",
    ),
    Route(
        "POST", "/v1/run", "admin", open_run,
        "Open the run, or come back to it with the same configuration.",
        control.RunRequest, control.RunReply, errors=(409,),
    ),
    Route(
        "GET", "/v1/trainer", "admin", trainer_stream,
        "The trainer's stream of frames. A second trainer ends the first one's.", kind="socket",
    ),
    Route(
        "GET", "/v1/status", "admin", status,
        "Who is there, what runs, who waits for whom: what `polyrl status` shows, and more.", reply=control.Status,
    ),
    Route("GET", "/v1/metrics", "admin", metrics, "Metrics in Prometheus' text format.", kind="text"),
    Route(
        "POST", "/v1/workers/{name}/drain", "admin", drain,
        "Have a remote worker hand everything over and leave: now, or shortly before `notice_s` are over.",
        control.DrainRequest, control.DrainReply, errors=(404, 409), may_be_empty=True,
    ),
    Route(
        "POST", "/v1/pause", "admin", pause, "Give no more leases; running ones go on.",
        reply=control.PauseReply, errors=(409,),
    ),
    Route("POST", "/v1/resume", "admin", resume, "Give leases again.", reply=control.PauseReply, errors=(409,)),
    Route(
        "GET", "/dash/api/{name}", "view", dash_data,
        "The dashboard's data: `now`, `samples`, `timeline` and so on.", errors=(400, 404, 409, 429),
    ),
    Route(
        "GET", "/dash", None, dash,
        "The dashboard: a page for browsers, without anything of the run in it.", kind="page",
    ),
    Route("GET", "/dash/", None, dash_page, "The same.", kind="page"),
    Route("GET", "/dash/page/{name}", None, dash_part, "Parts of the dashboard's page.", errors=(404,), kind="page"),
    Route(
        "GET", "/v1/models", "generate", models,
        "The model that answers, as OpenAI's clients ask for it.", reply=replies.ModelList,
    ),
    Route(
        "POST", "/v1/completions", "generate", complete, "Go on after a prompt, in text or token ids.",
        CompletionRequest, replies.Completion, errors=(404, 429, 500, 503), kind="events",
    ),
    Route(
        "POST", "/v1/chat/completions", "generate", chat, "Answer a chat, with the model's template.",
        ChatRequest, replies.ChatReply, errors=(404, 429, 500, 503), kind="events",
    ),
)  # fmt: skip


@cache
def _description() -> bytes:
    return json.dumps(document(ROUTES), indent=1).encode()
