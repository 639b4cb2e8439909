"""Serve the page and its data over HTTP: on a port of this machine, or behind the manager's port.

    /dash                   the page; /dash/page/... its parts
    /dash/api/...           what it shows, as JSON; /dash/api/stream tells what changed, as server-sent events

Rules kept here: everything is read-only. All under /dash/api wants the token, unless the manager has checked it
already. No text of a run becomes markup: the page gets JSON, and its policy lets nothing run that is not served here.
Files are read in threads, a bounded number of requests at a time.
"""

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from polyrl.dashboard.rollouts import SampleFilter
from polyrl.dashboard.watched import WatchedRun
from polyrl.errors import PolyrlError, RequestError
from polyrl.manager import page
from polyrl.manager.request_log import REQUESTS
from polyrl.wire.credentials import token_of

ROOT = "/dash"
_TELL_EVERY_S = 1.0
_MAX_STREAMS = 32
_STALLED_S = 10.0
"""The time after which a page that reads nothing of its stream loses its place."""
_THREADS = 4
_MAX_QUERY = 4_096
_MAX_PAGE = 500
_MAX_ROWS = 200
Found = TypeVar("Found")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class DashboardServer:
    """The page of one or several runs."""

    def __init__(self, runs: Sequence[WatchedRun], token: str | None) -> None:
        """`token`: the one that requests for data must carry; None: the manager in front has checked them."""
        self._runs, self._token = runs, token
        self._threads = ThreadPoolExecutor(_THREADS, "dashboard")
        self._num_streams = 0

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard], client_max_size=1024)
        app.router.add_get(ROOT, self._page)
        app.router.add_get(f"{ROOT}/", self._page)
        app.router.add_get(f"{ROOT}/page/{{name}}", self._part)
        for name, handler in self._routes().items():
            app.router.add_get(f"{ROOT}/api/{name}", handler)
        return app

    def _routes(self) -> dict[str, Handler]:
        return {
            "runs": self._list_runs,
            "now": self._now,
            "stream": self._stream,
            "metrics": self._metrics,
            "series": self._series,
            "samples": self._samples,
            "sample": self._sample,
            "prompt": self._prompt,
            "row": self._row,
            "timeline": self._timeline,
            "story": self._story,
            "ledger": self._ledger,
            "fleet": self._fleet,
        }

    def close(self) -> None:
        for run in self._runs:
            run.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # Requests

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if request.path.startswith(f"{ROOT}/api/"):
                self._check_token(request)
            answer = await handler(request)
        except web.HTTPException as failure:
            answer = _json({"error": failure.reason}, failure.status)
        except page.NoSuchPart as error:
            answer = _json({"error": str(error)}, 404)
        except PolyrlError as error:
            answer = _json({"error": str(error)}, 400)
        if not answer.prepared:
            answer.headers.update(page.HEADERS)
        return answer

    def _check_token(self, request: web.Request) -> None:
        given = token_of(request.headers.get("Authorization"))
        if self._token is not None and not hmac.compare_digest(given.encode(errors="replace"), self._token.encode()):
            raise web.HTTPUnauthorized(reason="a valid token is needed: open the link that `polyrl dash` printed")

    async def _in_thread(self, do: Callable[[], Found]) -> Found:
        return await asyncio.get_running_loop().run_in_executor(self._threads, do)

    def _run(self, request: web.Request) -> WatchedRun:
        return self._runs[_integer(request, "run", 0, 0, len(self._runs) - 1)]

    # The page

    async def _page(self, _: web.Request) -> web.StreamResponse:
        return page.part()

    async def _part(self, request: web.Request) -> web.StreamResponse:
        return page.part(request.match_info["name"])

    # Data

    async def _list_runs(self, _: web.Request) -> web.StreamResponse:
        drains = self._token is None  # the manager's own port takes what the page asks of workers
        facts = [{"name": run.name, "live": run.live, "simulation": run.is_simulation} for run in self._runs]
        return _json([{**one, "drains": drains} for one in facts])

    async def _now(self, request: web.Request) -> web.StreamResponse:
        return _json(await self._in_thread(self._run(request).now))

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        return _json(await self._in_thread(self._run(request).metric_names))

    async def _series(self, request: web.Request) -> web.StreamResponse:
        run, names = self._run(request), request.query.getall("name", [])
        axis = _text(request, "x") or "step"
        return _json(await self._in_thread(lambda: run.series(names, axis)))

    async def _samples(self, request: web.Request) -> web.StreamResponse:
        run = self._run(request)
        wanted = SampleFilter(
            _text(request, "task"), _text(request, "outcome"), _text(request, "worker"), _text(request, "text"),
            _number(request, "low"), _number(request, "high"), _number(request, "fewest"), _number(request, "longest"),
            _text(request, "order") or "group",
        )  # fmt: skip
        step = None if not _text(request, "step") else _integer(request, "step", 0, 0, 1 << 50)
        first, most = _integer(request, "first", 0, 0, 1 << 31), _integer(request, "most", 100, 1, _MAX_PAGE)
        return _json(await self._in_thread(lambda: run.rollouts.listed(step, wanted, first, most)))

    async def _sample(self, request: web.Request) -> web.StreamResponse:
        run, step, name = self._run(request), _integer(request, "step", 0, 0, 1 << 50), _text(request, "name")
        return _json(await self._in_thread(lambda: run.rollouts.one(step, name)))

    async def _prompt(self, request: web.Request) -> web.StreamResponse:
        run = self._run(request)
        domain, prompt = _integer(request, "domain", 0, 0, 1 << 20), _integer(request, "prompt", 0, 0, 1 << 50)
        return _json(await self._in_thread(lambda: run.rollouts.prompt(domain, prompt)))

    async def _row(self, request: web.Request) -> web.StreamResponse:
        run = self._run(request)
        domain, prompt = _integer(request, "domain", 0, 0, 1 << 20), _integer(request, "prompt", 0, 0, 1 << 50)
        return _json(await self._in_thread(lambda: run.rollouts.row(domain, prompt)))

    async def _timeline(self, request: web.Request) -> web.StreamResponse:
        run = self._run(request)
        from_s, to_s = _number(request, "from") or 0.0, _number(request, "to") or 0.0
        first, most = _integer(request, "first", 0, 0, 1 << 20), _integer(request, "most", 50, 1, _MAX_ROWS)
        opened = _text(request, "open")
        found = await self._in_thread(lambda: run.follower.window(from_s, to_s, first, most, opened))
        return _json({**found._asdict(), "rows": [row._asdict() for row in found.rows]})

    async def _story(self, request: web.Request) -> web.StreamResponse:
        run, sample = self._run(request), _text(request, "sample")
        return _json(await self._in_thread(lambda: run.story(sample)))

    async def _ledger(self, request: web.Request) -> web.StreamResponse:
        return _json(await self._in_thread(self._run(request).ledger))

    async def _fleet(self, request: web.Request) -> web.StreamResponse:
        run, text = self._run(request), _text(request, "text")
        first, most = _integer(request, "first", 0, 0, 1 << 20), _integer(request, "most", 100, 1, _MAX_ROWS)
        return _json(await self._in_thread(lambda: run.fleet(text, first, most)))

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        """Tell every second what a run does, until the browser goes away."""
        run = self._run(request)
        if self._num_streams >= _MAX_STREAMS:
            raise web.HTTPServiceUnavailable(reason=f"{_MAX_STREAMS} pages look at it already")
        response = web.StreamResponse(headers={**page.HEADERS, "Content-Type": "text/event-stream"})
        self._num_streams += 1
        try:
            await response.prepare(request)
            async for told in self._told(run):
                await write_or_cut(request, response, b"data: " + told + b"\n\n", _STALLED_S)
        except (ConnectionError, asyncio.CancelledError, PolyrlError):
            pass  # the page dials again
        finally:
            self._num_streams -= 1
        return response

    async def _told(self, run: WatchedRun) -> AsyncIterator[bytes]:
        while True:
            yield _encode(await self._in_thread(run.now))
            await asyncio.sleep(_TELL_EVERY_S)


async def write_or_cut(request: web.Request, response: web.StreamResponse, data: bytes, within_s: float) -> None:
    """Write, and cut off a reader that takes nothing for `within_s` seconds. Raises ConnectionResetError then."""
    try:
        async with asyncio.timeout(within_s):
            await response.write(data)
    except TimeoutError as error:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(f"the page took nothing for {within_s:g} s") from error


@contextlib.asynccontextmanager
async def serving(
    server: DashboardServer, site: Callable[[web.AppRunner], web.BaseSite]
) -> AsyncIterator[web.BaseSite]:
    """Serve on a site: a port, or a socket. Raises OSError."""
    runner = web.AppRunner(
        server.app(),
        handle_signals=False,
        shutdown_timeout=1.0,
        access_log=None,
        handler_cancellation=True,
        logger=REQUESTS,
    )
    await runner.setup()
    try:
        made = site(runner)
        await made.start()
        yield made
    finally:
        server.close()
        await runner.cleanup()


_encoder = msgspec.json.Encoder()


def _encode(value: Any) -> bytes:
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:  # the name of a file, or of somebody's own code, that is no text
        return _encoder.encode(_written_out(msgspec.to_builtins(value, str_keys=True)))


def _written_out(value: Any) -> Any:
    match value:
        case str():
            return value.encode(errors="backslashreplace").decode()
        case dict():
            return {_written_out(name): _written_out(one) for name, one in value.items()}
        case list() | tuple():
            return [*map(_written_out, value)]
        case _:
            return value


def _json(value: Any, code: int = 200) -> web.Response:
    return web.Response(body=_encode(value), status=code, content_type="application/json")


def _text(request: web.Request, name: str) -> str:
    value = request.query.get(name, "")
    if len(value) > _MAX_QUERY:
        raise RequestError(f"{name}: is longer than {_MAX_QUERY} characters")
    return value


def _integer(request: web.Request, name: str, default: int, low: int, high: int) -> int:
    text = _text(request, name)
    try:
        value = int(text) if text else default
    except ValueError as error:
        raise RequestError(f"{name}: {text[:20]!r} is no integer") from error
    if not low <= value <= high:
        raise RequestError(f"{name}: {value} is not between {low} and {high}")
    return value


def _number(request: web.Request, name: str) -> float | None:
    text = _text(request, name)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError as error:
        raise RequestError(f"{name}: {text[:20]!r} is no number") from error
    if not abs(value) < 1e18:
        raise RequestError(f"{name}: {text[:20]!r} is no finite number")
    return value
