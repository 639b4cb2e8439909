"""Requests to a server on this machine, its event streams, and its figures.

Every request has a deadline, and every error is one line.

A stream has no deadline: an answer may wait for its turn for long. It ends with its server, which `keeper` watches.
"""

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

import aiohttp
import msgspec

from polyrl.engines.engine import EngineError
from polyrl.not_data import NOT_DATA

_CONNECT_S = 5.0
_UNAUTHORIZED = 401
_KEEPALIVE_S = 2.0
"""These servers close what was idle for five seconds, also while a request is on its way."""
_LARGEST_EVENT_BYTES = 64 << 20
_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode

Part = TypeVar("Part")


class ServerUnreachable(EngineError):
    """The server cannot be reached, or broke off in the middle."""


class ServerAnswered(EngineError):
    """The server answered with an error."""

    def __init__(self, path: str, status: int, said: str) -> None:
        super().__init__(f"{path} answered {status}: {said}")
        self.status, self.said = status, said


class Http:
    """Speaks with one server, which knows us by `key`. `close` ends all that is under way."""

    def __init__(self, url: str, key: str = "") -> None:
        self.url = url.rstrip("/")
        self.key = key
        self.is_refused = False
        """Its last answer was that this is not its key."""
        self.trouble = ""
        """Why the last question had no answer."""
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False

    @property
    def _open(self) -> aiohttp.ClientSession:
        if self._is_closed:
            raise ServerUnreachable("the server is not used any more")
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
            headers = {"Authorization": f"Bearer {self.key}"} if self.key else None
            self._session = aiohttp.ClientSession(connector=connector, headers=headers, read_bufsize=1 << 20)
        return self._session

    async def close(self) -> None:
        self._is_closed = True
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, path: str, *, timeout_s: float, text: bool = False) -> Any:
        """Return the answer decoded, or as text. Raises ServerUnreachable or ServerAnswered."""
        return await self._request("GET", path, None, timeout_s, text=text)

    async def post(
        self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float, text: bool = False
    ) -> Any:
        return await self._request("POST", path, body, timeout_s, text=text)

    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float, *, text: bool
    ) -> Any:
        data, headers = (None, None) if body is None else (_encode(body), {"Content-Type": "application/json"})
        timeout = aiohttp.ClientTimeout(total=timeout_s, connect=_CONNECT_S)
        try:
            async with self._open.request(
                method, self.url + path, data=data, headers=headers, timeout=timeout
            ) as reply:
                raw = await reply.read()
                self.trouble = ""
                self.is_refused = reply.status == _UNAUTHORIZED
                if reply.status >= 400:
                    raise ServerAnswered(path, reply.status, _error_line(raw))
        except TimeoutError as error:
            self.trouble = f"{path} did not answer within {timeout_s:g} s"
            raise ServerUnreachable(self.trouble) from error
        except (aiohttp.ClientError, OSError) as error:
            self.trouble = f"{path}: {_line(error)}"
            raise ServerUnreachable(self.trouble) from error
        if text:
            return raw.decode(errors="replace")
        if not raw.strip():
            return None
        try:
            return _decode(raw)
        except NOT_DATA as error:
            raise ServerAnswered(path, 200, f"no JSON: {error}") from error

    @asynccontextmanager
    async def events(
        self, path: str, body: Mapping[str, Any], decode: Callable[[bytes], Sequence[Part]]
    ) -> AsyncIterator["EventStream[Part]"]:
        """Open a stream of events, for as long as the context lasts. Raises ServerUnreachable or ServerAnswered."""
        timeout = aiohttp.ClientTimeout(total=None, connect=_CONNECT_S)
        headers = {"Content-Type": "application/json"}
        try:
            reply = await self._open.post(self.url + path, data=_encode(body), headers=headers, timeout=timeout)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ServerUnreachable(f"{path}: {_line(error)}") from error
        async with reply:
            if reply.status >= 400:
                raise ServerAnswered(path, reply.status, _error_line(await reply.read()))
            yield EventStream(path, reply.content, decode)


class EventStream(Generic[Part]):
    """Server-sent events. They gather here until the reader takes all that have come.

    A task that wakes for every event of 32 streams took 64 µs a token; one that reads them all every 25 ms takes 39.
    """

    def __init__(self, path: str, content: aiohttp.StreamReader, decode: Callable[[bytes], Sequence[Part]]) -> None:
        self._path, self._content, self._decode = path, content, decode
        self._rest = b""

    def on_end(self, call: Callable[[], None]) -> None:
        """Have `call` called when the last of it is here. Reading finds out that a stream broke."""
        self._content.on_eof(call)

    def read(self) -> list[Part]:
        """Return the events since the last reading. Raises ServerUnreachable when the stream is over without an end."""
        try:
            raw = self._content.read_nowait()
        except (aiohttp.ClientError, OSError) as error:
            raise ServerUnreachable(f"{self._path}: {_line(error)}") from error
        if not raw and self._content.at_eof():
            raise ServerUnreachable(f"{self._path}: the stream ended without an end")
        *lines, self._rest = (self._rest + raw).split(b"\n")
        if len(self._rest) > _LARGEST_EVENT_BYTES:
            raise ServerUnreachable(f"{self._path}: an event without an end")
        parts: list[Part] = []
        try:
            for line in lines:  # an event is one line in what these servers send
                if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                    parts += self._decode(data)
        except NOT_DATA as error:
            raise ServerAnswered(self._path, 200, f"an event that is no JSON: {error}") from error
        return parts


def _line(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno:
        return os.strerror(error.os_error.errno)
    said = str(error).strip().partition("\n")[0]
    return said or type(error).__name__


def _error_line(raw: bytes) -> str:
    """Return an error's message: these servers wrap it in {"error": {"message": ...}}, or in other ways."""
    text = raw.decode(errors="replace").strip()
    try:
        body = _decode(raw)
    except NOT_DATA:
        body = None
    if isinstance(body, dict):
        inner = body.get("error", body.get("detail", body))
        text = str(inner.get("message", inner) if isinstance(inner, dict) else inner)
    return " ".join(text.split())[:500] or "nothing"


def read_gauges(page: str, prefix: str) -> dict[str, list[float]]:
    """Return the figures of a Prometheus page by name, without the prefix: a list, one of each engine of a server."""
    figures: dict[str, list[float]] = {}
    for line in page.splitlines():
        if not line.startswith(prefix):
            continue
        name = line[len(prefix) :].partition("{")[0].partition(" ")[0]
        try:
            value = float(line.rpartition(" ")[2])
        except ValueError:
            continue
        if math.isfinite(value):
            figures.setdefault(name, []).append(value)
    return figures


_EVERY_S = 0.025
"""Half of a worker's flush interval."""
_MANY = 4
_MANY_EVERY_S = 0.05
_READ_S = 0.008
"""The part of that time in which sockets are read."""


class Pause:
    """How long streams are left alone before all that came of them is read. `rests`: the event loop may stand still.

    A server that writes 32 answers sends 32 chunks a step, one by one, and waking for each costs more than reading it:
    of two cores that server and worker shared, the server lost a tenth. So with many answers the whole event loop
    stands still, and what gathers in the sockets meanwhile is read in one go. A pause of 40 ms harms nothing else in a
    worker: everything that computes there does so in threads.
    """

    def __init__(self, *, rests: bool = True) -> None:
        self._rests = rests
        self._rested_at = 0.0

    async def take(self, num_answers: int) -> None:
        """Wait until the streams of `num_answers` answers should be read."""
        if num_answers < _MANY or not self._rests:
            await asyncio.sleep(_EVERY_S)
            return
        time.sleep(max(0.0, self._rested_at + _MANY_EVERY_S - time.monotonic()))
        self._rested_at = time.monotonic()
        await asyncio.sleep(_READ_S)
