"""The dashboard behind the manager's port: a process of its own reads the run and makes the page; this passes it on.

    browser --> the manager's port --> a socket in a private folder --> polyrl dash --socket

Rules kept here: the manager reads no file of the run for the page, and its scheduler is asked for its state once every
two seconds, only while a browser has the page open. The process is started at the first request, and ended after a
while without requests, or with the manager. Requests are bounded; a browser that does not read holds up its own request
alone, for a minute.
"""

import asyncio
import contextlib
import functools
import shutil
import signal
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web

from polyrl.errors import Refused
from polyrl.manager import page
from polyrl.manager.service import Service
from polyrl.manager.status import status as status_of
from polyrl.parent import end_with_parent

_TELL_EVERY_S = 2.0
_REST_S = 120.0
"""How long the process is kept without requests."""
_READY_S = 120.0
"""The time for the process to start and to import, on a machine whose cores all train."""
_MAX_REQUESTS = 64
_STALLED_S = 60.0
"""How long a browser may take nothing of what is sent to it."""
_SILENT_S = 600.0
"""How long the process may take to answer; a sample's story out of a large journal takes minutes."""
_PASSED_ON = ("Content-Type", *page.HEADERS)
_encode = msgspec.json.Encoder().encode


class Dashboard:
    """Passes requests on to the process that makes the page."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._starting = asyncio.Lock()
        self._process: Process | None = None
        self._session: aiohttp.ClientSession | None = None
        self._folder: Path | None = None
        self._teller: asyncio.Task[None] | None = None
        self._num_requests = 0
        self._asked_at = 0.0
        self._is_closed = False

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        """Answer a request. Raises Refused where the page cannot be had."""
        if self._num_requests >= _MAX_REQUESTS:
            raise Refused("full", f"{_MAX_REQUESTS} requests of the page are under way; try again")
        with self._counted():
            session = await self._ready()
            try:
                async with session.get(f"http://dash{request.rel_url}", allow_redirects=False) as answer:
                    return await _copy(answer, request)
            except aiohttp.ClientError as error:
                raise Refused("dashboard", f"the page cannot be had: {error}") from error

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self._num_requests += 1
        try:
            yield
        finally:
            self._num_requests -= 1
            self._asked_at = time.monotonic()

    async def _ready(self) -> aiohttp.ClientSession:
        async with self._starting:
            if self._is_closed:
                raise Refused("dashboard", "the manager ends")
            if self._process is not None and self._process.returncode is not None:
                await self._end()
            if self._session is None:
                self._session = await self._start()
                self._teller = asyncio.create_task(self._tell())
            return self._session

    async def _start(self) -> aiohttp.ClientSession:
        self._folder = Path(tempfile.mkdtemp(prefix="polyrl-dash-"))
        socket = self._folder / "socket"
        words = ("-m", "polyrl", "dash", str(self._service.run_dir), "--socket", str(socket))
        is_ready = b""
        try:
            async with asyncio.timeout(_READY_S):
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *words,
                    stdin=PIPE,
                    stdout=PIPE,
                    stderr=asyncio.subprocess.DEVNULL,
                    preexec_fn=functools.partial(end_with_parent, signal.SIGTERM),  # it removes its folder then
                )
                assert self._process.stdout is not None
                is_ready = await self._process.stdout.readline()
        except OSError:  # a TimeoutError is one; so are too many processes or open files
            pass
        except asyncio.CancelledError:
            await self._end()
            raise
        if not is_ready:
            await self._end()
            raise Refused("dashboard", "the page's process did not start; `polyrl dash RUN` says why")
        connector = aiohttp.UnixConnector(str(socket), limit=_MAX_REQUESTS)
        return aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None, connect=10.0, sock_read=_SILENT_S)
        )

    async def _tell(self) -> None:
        """Send the process the manager's state, while a browser has the page open."""
        process = self._process
        assert process is not None and process.stdin is not None
        try:
            with contextlib.suppress(ConnectionError):
                while self._num_requests or time.monotonic() - self._asked_at < _REST_S:
                    state = await self._service.call(lambda lobby: status_of(lobby, self._service.uptime_s))
                    process.stdin.write(_encode(state) + b"\n")
                    await process.stdin.drain()
                    await asyncio.sleep(_TELL_EVERY_S)
        finally:
            if self._process is process:  # otherwise it was ended by somebody else
                self._teller = None
                await self._end()

    async def _end(self) -> None:
        process, session, folder, teller = self._process, self._session, self._folder, self._teller
        self._process = self._session = self._folder = self._teller = None
        if teller is not None:
            teller.cancel()
        if session is not None:
            await session.close()
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    async def close(self) -> None:
        self._is_closed = True
        await self._end()


async def _copy(answer: aiohttp.ClientResponse, request: web.Request) -> web.StreamResponse:
    """Pass an answer on. If either side breaks off, or takes nothing for long, the browser's connection ends."""
    headers = {name: answer.headers[name] for name in _PASSED_ON if name in answer.headers}
    response = web.StreamResponse(status=answer.status, headers=headers)
    try:
        await response.prepare(request)
        async for chunk in answer.content.iter_any():
            async with asyncio.timeout(_STALLED_S):
                await response.write(chunk)
        await response.write_eof()
    except (aiohttp.ClientError, ConnectionError, TimeoutError):
        if request.transport is not None:
            request.transport.abort()
    return response
