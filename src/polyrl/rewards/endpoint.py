"""An HTTP service that rewards ask: a pool of connections, bounded replies, and errors by what can be done about them.

    TryAgain       a time-out, a broken connection, 408, 409, 425, 429, 5xx, a reply that is no JSON
    BadQuestion    400, 413, 422: this one request is refused, others may not be
    RewardStops    anything else, 401 and 404 for example: nothing helps but another setting

Rules kept here: a reply has at most 1 MiB, and is not decompressed; its cookies are not kept. No redirect is followed:
it would carry the key elsewhere. The key is in no error message, not even if the service repeats it.
"""

import math
import os
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import msgspec

from polyrl.errors import plain, shorten
from polyrl.not_data import NOT_DATA
from polyrl.rewards.retrying import BadQuestion, TryAgain
from polyrl.rewards.reward import RewardStops

MAX_REPLY_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 16
_CONNECT_S = 10.0
_AGAIN = (408, 409, 425, 429)
_OF_THE_QUESTION = (400, 413, 422)
_OK, _SERVER_ERROR = 200, 500
_NO_MONEY = "insufficient_quota"
"""OpenAI's error code for an account without credit. It comes with 429, but waiting does not help."""


class ServiceRefused(RewardStops):
    """The service refuses all requests, until a setting is changed."""

    def __init__(self, line: str, status: int) -> None:
        super().__init__(line)
        self.status = status


class Endpoint:
    """`url` is what paths are added to. `hint` ends the line of an error that only another setting can mend."""

    def __init__(
        self, url: str, *, key: str = "", hint: str = "", connections: int = 0, tls: ssl.SSLContext | None = None
    ) -> None:
        self.url, self._key, self._hint, self._tls = url.rstrip("/"), key, hint, tls
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, path: str, timeout_s: float) -> Any:
        return await self._request("GET", path, None, timeout_s)

    async def post(self, path: str, body: Mapping[str, Any], timeout_s: float) -> Any:
        """Return the decoded reply. Raises TryAgain, BadQuestion, RewardStops."""
        return await self._request("POST", path, msgspec.json.encode(body, enc_hook=str), timeout_s)

    async def _request(self, method: str, path: str, data: bytes | None, timeout_s: float) -> Any:
        place = self.url + path
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(_CONNECT_S, timeout_s))
        try:
            async with self._open().request(method, place, data=data, timeout=timeout, allow_redirects=False) as reply:
                raw, status, after = await _bounded(reply), reply.status, reply.headers.get("Retry-After")
        except TimeoutError as error:
            raise TryAgain(f"no reply within {timeout_s:.3g} s") from error
        except aiohttp.ClientSSLError as error:
            raise RewardStops(f"{place}: {self._line(str(error))}; {self._hint}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise TryAgain(self._line(str(error)) or type(error).__name__) from error
        if status == _OK:
            return _decode(raw)
        raise self._error(place, status, raw, after)

    def _error(self, place: str, status: int, raw: bytes, after: str | None) -> Exception:
        said, code = _said(raw)
        line = self._line(f"answered {status}{said and f': {said}'}")
        if status in _OF_THE_QUESTION:
            return BadQuestion(line)
        if (status in _AGAIN and code != _NO_MONEY) or status >= _SERVER_ERROR:
            return TryAgain(line, seconds_of(after))
        return ServiceRefused(f"{place} {line}; {self._hint}", status)

    def _line(self, text: str) -> str:
        return shorten(plain(text.replace(self._key, "(the key)") if self._key else text))[:160]

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
            if self._key:
                headers["Authorization"] = f"Bearer {self._key}"
            connector = aiohttp.TCPConnector(limit=self._connections, ssl=True if self._tls is None else self._tls)
            self._session = aiohttp.ClientSession(
                connector=connector, headers=headers, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
            )
        return self._session


def key_of(variable: str) -> str:
    """Return the key in an environment variable; empty for none. Raises RewardStops if it is not there."""
    key = os.environ.get(variable, "").strip() if variable else ""
    if variable and not key:
        raise RewardStops(
            f"args.api_key_env: {variable} is not in the environment of rewards; set it, and name it in "
            "rewards.environment"
        )
    return key


async def _bounded(reply: aiohttp.ClientResponse) -> bytes:
    """Read a reply. Raises TryAgain for one that is too large; its connection is not used again."""
    found = bytearray()
    async for chunk in reply.content.iter_chunked(_CHUNK_BYTES):
        found += chunk
        if len(found) > MAX_REPLY_BYTES:
            reply.close()
            raise TryAgain(f"a reply of more than {MAX_REPLY_BYTES:,} bytes")
    return bytes(found)


def _decode(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except NOT_DATA as error:
        raise TryAgain("a reply that is no JSON") from error


def _said(raw: bytes) -> tuple[str, str]:
    """Return the message and the code of an error: services wrap them in {"error": {"message": ...}}, or otherwise."""
    text = raw[:_CHUNK_BYTES].decode(errors="replace")
    try:
        body = msgspec.json.decode(raw)
    except NOT_DATA:
        return text, ""
    inner = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
    if isinstance(inner, dict):
        return str(inner.get("message", inner)), str(inner.get("code", ""))
    return str(inner), ""


def seconds_of(header: str | None) -> float | None:
    """Return the seconds of a Retry-After header, a number or a date; None: there is none that can be read."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(header) - datetime.now(UTC)).total_seconds()
        except (TypeError, ValueError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
