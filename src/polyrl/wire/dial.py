"""How a worker, a trainer or the command line reaches the manager: requests, streams, and trying again.

Rules kept here: every wait has a deadline. A problem that waiting cannot solve (a wrong token, another protocol,
something that is no manager) is a UserError at once. A problem that may pass (no listener, a broken connection, a proxy
whose manager is away) is `Unreachable`, and the caller tries again.
"""

import asyncio
import logging
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from polyrl.errors import UserError
from polyrl.not_data import NOT_DATA
from polyrl.wire.control import READ_HEADER, SESSION_HEADER, Description, ErrorReply, other_protocol
from polyrl.wire.credentials import bearer
from polyrl.wire.frames import PROTOCOL

_REQUEST_TIMEOUT_S = 20.0
_CONNECT_TIMEOUT_S = 10.0
_PING_EVERY_S = 4.0
"""A stream on which nothing is answered for this long and half as long again is broken."""
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0

StructT = TypeVar("StructT")


class Unreachable(Exception):
    """The manager could not be reached, or the connection broke."""


class Starting(Unreachable):
    """The manager is there, and reads its run: it can be waited for as long as it goes on with that."""

    def __init__(self, message: str, share: float) -> None:
        super().__init__(message)
        self.share = share


class NameTaken(Unreachable):
    """A worker of that name is connected. It may be one that has died, and is not missed yet."""


class NotKnown(UserError):
    """The manager has nothing at that path. It may be older than the client."""


class SessionOver(Exception):
    """The manager does not know the session any more: join, or open the run, again."""


class Dialer:
    """Dials one manager with one token. Use it as an async context manager."""

    def __init__(
        self,
        url: str,
        token: str,
        tls: ssl.SSLContext | None = None,
        *,
        token_from: str = "",
        timeout_s: float = _REQUEST_TIMEOUT_S,
    ) -> None:
        """`token_from`: the file, or what else the person named, that the token was found in."""
        if not url.startswith(("http://", "https://")):
            raise UserError(f"{url}: expected a URL like http://HOST:5000")
        self.url = url.rstrip("/")
        self._headers = bearer(token)
        self._token_from, self._timeout_s = token_from, timeout_s
        self._tls: ssl.SSLContext | bool = True if tls is None else tls
        self._http: aiohttp.ClientSession | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the traffic can be read on the way."""
        return self.url.startswith("http://")

    async def __aenter__(self) -> "Dialer":
        self._http = aiohttp.ClientSession(
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=_CONNECT_TIMEOUT_S),
            connector=aiohttp.TCPConnector(limit=0),  # a stream holds its connection: the 101st would wait for ever
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http is not None:
            await self._http.close()

    async def knock(self) -> None:
        """Ask whether it is a manager that knows the token, and speaks as we do; nothing changes by it.

        Raises UserError when it is not.
        """
        found = await self.get("/v1/openapi.json", Description)
        if found.info.protocol not in (None, PROTOCOL):
            raise UserError(f"{self.url}: {other_protocol(found.info.protocol, PROTOCOL)}")

    async def post(self, path: str, body: msgspec.Struct | None, kind: type[StructT], session: str = "") -> StructT:
        """Post a request. `session`: what we were given before, if there is something to show for it."""
        return await self._request("POST", path, body, kind, session)

    async def get(self, path: str, kind: type[StructT], session: str = "") -> StructT:
        return await self._request("GET", path, None, kind, session)

    async def _request(
        self, method: str, path: str, body: msgspec.Struct | None, kind: type[StructT], session: str
    ) -> StructT:
        assert self._http is not None
        data = None if body is None else msgspec.json.encode(body)
        try:
            shown = {SESSION_HEADER: session} if session else {}
            async with self._http.request(method, self.url + path, data=data, headers=shown, ssl=self._tls) as answer:
                content = await answer.read()
                if answer.status >= 300:
                    raise self._refusal(answer.status, _error_in(content), answer.headers)
                return msgspec.json.decode(content, type=kind)
        except TimeoutError as error:
            if isinstance(error, aiohttp.ServerTimeoutError):  # it could not even connect
                raise self._unreachable(error) from error
            said = f"it accepted the connection and did not answer within {self._timeout_s:g} s"
            raise Unreachable(f"{self.url}: {said}; is that a PolyRL manager?") from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._unreachable(error) from error
        except NOT_DATA as error:
            raise UserError(f"{self.url}{path}: not an answer of a PolyRL manager: {error}") from error

    async def stream(self, path: str, session: str, max_frame_bytes: int) -> aiohttp.ClientWebSocketResponse:
        assert self._http is not None
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                return await self._http.ws_connect(
                    self.url + path,
                    headers={SESSION_HEADER: session},
                    max_msg_size=max_frame_bytes,
                    heartbeat=_PING_EVERY_S,
                    compress=0,
                    ssl=self._tls,
                )
        except aiohttp.WSServerHandshakeError as error:
            if error.status == 410:
                raise SessionOver("the manager has given this session up") from error
            if error.status >= 300:
                raise self._refusal(
                    error.status, f"HTTP {error.status}", error.headers or {}
                ) from error  # what it says is not kept
            raise self._unreachable(error) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise self._unreachable(error) from error

    def _refusal(self, status: int, said: str | None, headers: Mapping[str, str]) -> UserError | Unreachable:
        """Return the error for a refused request. `said` is the manager's line; None if the reply is not a manager's.

        A 5xx counts as unreachable: it may come from a proxy whose manager is down.
        """
        if status == 503 and (share := _share_in(headers)) is not None:
            return Starting(f"{self.url}: the manager starts again: {share:.0%} of its run is read", share)
        if status == 423 and said is not None:
            return NameTaken(f"{self.url}: {said}")
        if status in (408, 429) or (status >= 500 and status != 501):
            return Unreachable(f"{self.url}: {f'HTTP {status}' if said is None else said}")
        if said is None:
            return UserError(f"{self.url}: is no PolyRL manager: HTTP {status}")
        if status == 401:  # it speaks of headers, to those who write them
            place = f" ({self._token_from})" if self._token_from else ""
            return UserError(f"{self.url}: that is not a token of this run{place}")
        if status == 404:
            return NotKnown(f"{self.url}: {said}")
        return UserError(f"{self.url}: {said}")

    def _unreachable(self, error: BaseException) -> Unreachable:
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            why = getattr(error.certificate_error, "verify_message", None) or error
            raise UserError(f"{self.url}: its certificate is not trusted: {why} (--ca names whom to trust)") from error
        if isinstance(error, ssl.SSLError) and "WRONG_VERSION_NUMBER" in str(error):
            raise UserError(f"{self.url}: it does not speak TLS; is it http://?") from error
        if type(error) is aiohttp.ClientResponseError:  # of an answer that cannot be read
            raise UserError(f"{self.url}: is no PolyRL manager: it does not speak HTTP") from error
        said = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if isinstance(error, aiohttp.ServerDisconnectedError) and self.is_plain:  # so does one that is stopped
            said += " (if it goes on: is it https://?)"
        return Unreachable(f"{self.url}: {said}")


def _share_in(headers: Mapping[str, str]) -> float | None:
    """Return how much of its run a restarted manager has read, by its own word."""
    try:
        share = float(headers.get(READ_HEADER, "nan"))
    except ValueError:
        return None
    return share if 0.0 <= share <= 1.0 else None


class Patience:
    """The time limit of retries, counted from the last progress; each step of a manager that starts is progress."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.since = time.monotonic()
        self._share = -1.0

    def renew(self) -> None:
        self.since, self._share = time.monotonic(), -1.0

    def is_over(self, error: Unreachable) -> bool:
        if isinstance(error, Starting) and error.share != self._share:
            self.since, self._share = time.monotonic(), error.share
        return self.away_s > self.seconds

    @property
    def away_s(self) -> float:
        return time.monotonic() - self.since


def _error_in(content: bytes) -> str | None:
    """Return a manager's reason for a refusal; None if the reply is not from a manager."""
    try:
        return msgspec.json.decode(content, type=ErrorReply).error
    except NOT_DATA:
        return None


def url_of_run(run_dir: Path) -> str:
    """Return the address that a run's manager wrote into the run's directory, for programs of this machine.

    Raises OSError, ValueError, LookupError or TypeError where there is none.
    """
    url: str = msgspec.json.decode((run_dir / "manager.json").read_bytes())["url"]
    return url.replace("//0.0.0.0:", "//127.0.0.1:")


def is_loopback(url: str) -> bool:
    """Return whether a manager's URL is of this machine alone."""
    return is_loopback_host(urlsplit(url).hostname or "")


def is_loopback_host(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def pauses() -> Iterator[float]:
    """Yield the seconds between one try and the next: longer each time, up to a bound, and never in step with
    others."""
    pause = _FIRST_PAUSE_S
    while True:
        yield pause * random.uniform(0.5, 1.0)
        pause = min(_LONGEST_PAUSE_S, pause * 1.6)


async def stay_connected(
    connect: Callable[[], Awaitable[None]],
    forget_session: Callable[[], None],
    patience: Patience,
    name_patience_s: float,
    log: logging.Logger,
) -> str:
    """Connect, and again after every break, until it is given up. Returns why.

    `connect` joins first if there is no session, and returns when its connection breaks; all other errors of it are
    the caller's. `name_patience_s`: how long another may hold our name.
    """
    waits = pauses()
    while True:
        try:
            await connect()
            waits = pauses()
            patience.renew()
        except SessionOver:
            log.info("the manager has given us up; joining again")
            forget_session()
        except NameTaken as error:
            if patience.away_s > name_patience_s:
                return str(error)
            await asyncio.sleep(next(waits))
        except Unreachable as error:
            if patience.is_over(error):
                return f"{error}; given up after {patience.seconds:.0f} s"
            log.info("%s; trying again", error)
            await asyncio.sleep(next(waits))
