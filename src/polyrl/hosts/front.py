"""A host's front: the policy, served on the host's loopback to the harnesses that it runs.

    POST /inference/v1/generate       tokens in, tokens out; the episode is found by X-Session-ID
    POST /v1/chat/completions         OpenAI's chats, with tools
    POST /v1/completions              OpenAI's completions, of a text or of token ids
    GET  /v1/models                   the model's name, and its context
    /e/SECRET/...                     all of it for one episode: a harness that knows only a base URL

Rules kept here: a request stays open until there is an answer: the manager may be away for long. A client that hangs
up and asks again (x-stainless-retry-count, same body) gets the answer of its first call; nothing is drawn twice. A
refusal has a status that clients do not ask again for, and harms no other episode. A request without an episode, or
with the session of another run, is refused in one line.
Left out: messages to tokens (chats.py), the shapes of bodies (bodies.py, replies.py).
"""

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from aiohttp import web

from polyrl.errors import one_line
from polyrl.hosts.answering import Answering
from polyrl.hosts.bodies import FrontRefusal, Limiter
from polyrl.hosts.episode import Episode, EpisodeFailed, NoRoom
from polyrl.hosts.known_families import KnownFamily
from polyrl.hosts.replies import models_body
from polyrl.hosts.texts import ModelText
from polyrl.wire.frames import Sampling

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20
MAX_OPEN_CALLS = 256
"""Calls of one episode that wait at once."""
MAX_KEPT_ANSWERS = 16
"""Answers of an episode that are kept for a client that asks again."""
_ENDED = 410
_JSON = "application/json"
_STREAM = "text/event-stream"
_SESSION = "X-Session-ID"
_RETRIES = "x-stainless-retry-count"

FrontHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class SessionTaken(EpisodeFailed):
    """Two episodes of one session: the later one is not begun."""


class OpenEpisode:
    """An episode that can be reached at the front, until the `with` block is left."""

    def __init__(self, front: "HostFront", episode: Episode, answering: Answering) -> None:
        self._front = front
        self.secret = secrets.token_urlsafe(18)
        self.episode = episode
        self.answering = answering
        self.trouble = ""
        """Why the last request had no answer, unless the policy caused it. A reward after that means nothing."""
        self.num_calls = 0
        self.sessions: list[str] = []
        self._calls: dict[bytes, asyncio.Task[tuple[bytes, bool]]] = {}

    @property
    def base_url(self) -> str:
        """The base URL for a harness of OpenAI's API."""
        return f"{self._front.url}/e/{self.secret}/v1"

    @property
    def is_waiting(self) -> bool:
        """Whether a call has no answer yet."""
        return any(not task.done() for task in self._calls.values())

    def check(self) -> None:
        """Raise EpisodeFailed if a reward means nothing: the policy was not asked, or its last request was refused."""
        if self.trouble:
            raise EpisodeFailed(f"its last request was not answered: {self.trouble}")
        if not self.num_calls:
            raise EpisodeFailed("the policy was never asked, or there was no room for the first prompt")

    def join(self, session: str) -> None:
        """Let requests with this session reach the episode. Raises SessionTaken."""
        self._front.join(session, self)

    def calls_but_of(self, sessions: Collection[str]) -> tuple[int, ...]:
        """Return the numbers of the answered calls that were made with none of these sessions."""
        return tuple(number for number, one in enumerate(self.answering.callers) if one not in sessions)

    def __enter__(self) -> "OpenEpisode":
        return self

    def __exit__(self, *_: object) -> None:
        self._front.leave(self)
        for task in self._calls.values():
            task.cancel()

    async def answer(self, path: str, raw: bytes, *, is_retry: bool, session: str = "") -> tuple[bytes, bool]:
        """Answer a request, or wait for the answer of the one that it repeats. Raises FrontRefusal."""
        key = hashlib.blake2b(path.encode() + b"\0" + raw, digest_size=16).digest()
        task = self._calls.get(key) if is_retry else None
        if task is None:
            self._make_place()
            task = asyncio.create_task(self._answer(path, raw, session))
            self._calls.pop(key, None)
            self._calls[key] = task
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise _ended() from None
            raise

    def _make_place(self) -> None:
        done = [key for key, task in self._calls.items() if task.done()]
        if len(self._calls) - len(done) >= MAX_OPEN_CALLS:
            raise FrontRefusal(f"{MAX_OPEN_CALLS} calls of this episode are waiting already; expected fewer at once")
        for key in done[:-MAX_KEPT_ANSWERS]:
            del self._calls[key]

    async def _answer(self, path: str, raw: bytes, session: str) -> tuple[bytes, bool]:
        try:
            found = await self.answering.answer(path, raw, session)
        except NoRoom as error:
            self.trouble = ""
            raise FrontRefusal(str(error), param="prompt", code="context_length_exceeded") from error
        except FrontRefusal as refusal:
            self.trouble = str(refusal)
            raise
        except EpisodeFailed as error:
            self.trouble = str(error)
            raise FrontRefusal(f"the episode failed: {error}", status=_ENDED, code="episode_failed") from error
        except Exception as error:
            self.trouble = one_line(error)
            log.exception("a request of episode %s", self.episode.name)
            raise FrontRefusal(f"the request cannot be answered: {self.trouble}") from error
        self.trouble = ""
        self.num_calls += 1
        return found


class HostFront:
    """Serves the policy to harnesses. `text` is None where the host has no tokenizer: tokens alone are served."""

    def __init__(
        self,
        *,
        max_context: int,
        text: ModelText | None = None,
        family: KnownFamily | None = None,
        model: str = "policy",
        sampling: Sampling | None = None,
        chat_options: Mapping[str, Any] | None = None,
    ) -> None:
        """`chat_options` are arguments of the chat template, such as `enable_thinking`; a request may give others."""
        self.text = text
        self._chat_options = dict(chat_options or {})
        self.model = model
        self.max_context = max_context
        self._family = family
        self._limiter = Limiter(Sampling() if sampling is None else sampling)
        self._created = int(time.time())
        self._by_secret: dict[str, OpenEpisode] = {}
        self._by_session: dict[str, OpenEpisode] = {}
        self._runner: web.AppRunner | None = None
        self._url = ""

    @property
    def url(self) -> str:
        """Where it is, without a slash at the end. Raises RuntimeError before `start`."""
        if not self._url:
            raise RuntimeError("the front is not started")
        return self._url

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_refusals])
        for before in ("", "/e/{secret}"):
            app.router.add_get(f"{before}/v1/models", self._models)
            for path in ("/inference/v1/generate", "/v1/chat/completions", "/v1/completions"):
                app.router.add_post(f"{before}{path}", self._handle(path))
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self._url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        for one in list(self._by_secret.values()):
            one.__exit__()
        if self._runner is not None:
            await self._runner.cleanup()

    # Episodes

    def open(self, episode: Episode, session: str = "") -> OpenEpisode:
        """Make an episode reachable, by a base URL of its own and by its session. Raises SessionTaken."""
        answering = Answering(episode, self.text, self._family, self._limiter, self.model, self._chat_options)
        made = OpenEpisode(self, episode, answering)
        if session:
            self.join(session, made)
        self._by_secret[made.secret] = made
        return made

    def join(self, session: str, opened: OpenEpisode) -> None:
        other = self._by_session.get(session, opened)
        if other is not opened:
            raise SessionTaken(
                f"session {session[:80]}: episode {other.episode.name} has it; {opened.episode.name} needs its own"
            )
        self._by_session[session] = opened
        opened.sessions.append(session)

    def leave(self, opened: OpenEpisode) -> None:
        self._by_secret.pop(opened.secret, None)
        for session in opened.sessions:
            self._by_session.pop(session, None)

    # Requests

    def _handle(self, path: str) -> FrontHandler:
        async def handle(request: web.Request) -> web.StreamResponse:
            opened = self._episode_of(request)
            raw = await request.read()
            is_retry = request.headers.get(_RETRIES, "0") != "0"
            session = request.headers.get(_SESSION, "")
            body, is_streamed = await opened.answer(path, raw, is_retry=is_retry, session=session)
            return web.Response(body=body, content_type=_STREAM if is_streamed else _JSON)

        return handle

    def _episode_of(self, request: web.Request) -> OpenEpisode:
        secret = request.match_info.get("secret")
        if secret is not None:
            found = self._by_secret.get(secret)
            if found is None:
                raise FrontRefusal("no episode has this base URL; it ended, or is of another run", status=404)
            return found
        session = request.headers.get(_SESSION, "")
        if not session:
            raise FrontRefusal(f"{_SESSION}: missing; expected the session of an episode, or its own base URL")
        found = self._by_session.get(session)
        if found is None:
            raise FrontRefusal(
                f"{_SESSION}: no episode has the session {session[:80]}; it ended, or is of another run", status=404
            )
        return found

    async def _models(self, request: web.Request) -> web.StreamResponse:
        if "secret" in request.match_info:
            self._episode_of(request)
        return web.Response(body=models_body(self.model, self.max_context, self._created), content_type=_JSON)


def _ended() -> FrontRefusal:
    return FrontRefusal("the episode ended", status=_ENDED, code="episode_ended")


@web.middleware
async def _refusals(request: web.Request, handler: FrontHandler) -> web.StreamResponse:
    """Tell refusals in OpenAI's shape."""
    try:
        return await handler(request)
    except FrontRefusal as refusal:
        return web.Response(status=refusal.status, body=refusal.body(), content_type=_JSON)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        log.debug("%s %s: %s", request.method, request.path, error.reason)
        refusal = FrontRefusal(f"{request.method} {request.path[:80]}: {error.reason}", status=error.status)
        return web.Response(status=error.status, body=refusal.body(), content_type=_JSON)
