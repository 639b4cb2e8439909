"""Ask the metadata service of a cloud, again and again, whether this machine goes.

Rules kept here: nothing is asked unless `--spot` names a cloud, or this machine's firmware does. An answer has at most
64 KiB and two seconds, redirects are not followed, no proxy is used. A service that is away, lies or hangs costs a line
in the log and nothing else: it is asked again, less and less often, and the worker works on. A notice is acted on once;
a later one only if it leaves less time.
"""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import aiohttp

from polyrl.errors import UserError, one_line
from polyrl.worker.spot import answers
from polyrl.worker.spot.answers import Notice, NoticePlace

log = logging.getLogger("polyrl.worker")

ADDRESS_VARIABLE = "POLYRL_METADATA_URL"
"""Asked in place of the cloud's own address: by tests, and where a proxy stands before it."""
_ADDRESSES: Mapping[NoticePlace, str] = {
    "aws": "http://169.254.169.254",
    "gcp": "http://169.254.169.254",
    "azure": "http://169.254.169.254",
}
_MAX_BYTES = 64 << 10
_ANSWER_S = 2.0
_EVERY_S = 1.0
_AWS_EVERY_S = 5.0
_MAX_PAUSE_S = 60.0
_TOKEN_S = 21_600
EARLIER_S = 2.0
"""The manager is told of a moment that much earlier: for its order to reach us, and for our end."""
_FIRMWARE = Path("/sys/class/dmi/id")

Tell = Callable[[str, float], None]
"""Takes why, and in how many seconds; 0: at once."""


class NoAnswer(Exception):
    """The metadata service did not say anything that can be used; the message says why."""


def read_firmware(folder: Path = _FIRMWARE) -> str:
    """Return this machine's maker, as its firmware says; empty where it says nothing."""
    said: list[str] = []
    for name in ("sys_vendor", "product_name", "bios_vendor", "chassis_asset_tag"):
        try:
            said.append((folder / name).read_text(errors="replace")[:200])
        except OSError:
            continue
    return " ".join(said)


def address_of(place: NoticePlace) -> str:
    """Raises UserError for a variable that is no address."""
    given = os.environ.get(ADDRESS_VARIABLE, "")
    if given and not given.startswith(("http://", "https://")):
        raise UserError(f"{ADDRESS_VARIABLE}: {given[:80]!r}; expected an address like http://127.0.0.1:8000")
    return given.rstrip("/") or _ADDRESSES[place]


def left_to_tell(left_s: float) -> float:
    """Return the seconds of notice that the manager is given; 0: hand over at once."""
    return max(0.0, left_s - EARLIER_S)


class Metadata:
    """One metadata service."""

    def __init__(self, address: str) -> None:
        self._address = address
        timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
        self._session = aiohttp.ClientSession(timeout=timeout, trust_env=False, cookie_jar=aiohttp.DummyCookieJar())
        self._token = ""
        self._own_name: str | None = None

    async def close(self) -> None:
        await self._session.close()

    async def look_at(self, place: NoticePlace) -> tuple[Notice | None, float]:
        """Return a notice, if there is one, and when to ask again. Raises NoAnswer."""
        match place:
            case "aws":
                return await self._look_at_aws()
            case "gcp":
                return await self._look_at_gcp(), _EVERY_S
            case "azure":
                return await self._look_at_azure(), _EVERY_S
            case _:
                raise AssertionError(f"{place} sends signals")

    async def _look_at_aws(self) -> tuple[Notice | None, float]:
        """IMDSv2. A rebalance recommendation has no deadline, and the machine often stays: it is asked more often."""
        status, body = await self._aws("spot/instance-action")
        if status == 200:
            return answers.aws_action(body, time.time()), _AWS_EVERY_S
        status, _ = await self._aws("events/recommendations/rebalance")
        return None, _EVERY_S if status == 200 else _AWS_EVERY_S

    async def _aws(self, what: str) -> tuple[int, bytes]:
        for _ in range(2):
            if not self._token:
                wish = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
                status, body, _ = await self._request("PUT", "/latest/api/token", wish)
                if status != 200 or not body.isascii() or not body.decode().isprintable() or len(body) > 1024:
                    raise NoAnswer(f"no token: status {status}")
                self._token = body.decode()
            headers = {"X-aws-ec2-metadata-token": self._token}
            status, body, _ = await self._request("GET", f"/latest/meta-data/{what}", headers)
            if status != 401:
                return _known(status), body
            self._token = ""
        raise NoAnswer("the token is refused")

    async def _look_at_gcp(self) -> Notice | None:
        found: list[Notice] = []
        asked = (("preempted", answers.gcp_preempted), ("maintenance-event", answers.gcp_maintenance))
        for what, read in asked:
            path = f"/computeMetadata/v1/instance/{what}"
            status, body, flavor = await self._request("GET", path, {"Metadata-Flavor": "Google"})
            if flavor != "Google":
                raise NoAnswer("the answer is not of Google's metadata service")
            if _known(status) == 200 and (notice := read(body)) is not None:
                found.append(notice)
        return min(found, key=lambda one: one.left_s, default=None)

    async def _look_at_azure(self) -> Notice | None:
        headers = {"Metadata": "true"}
        if self._own_name is None:
            path = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
            status, body, _ = await self._request("GET", path, headers)
            self._own_name = body.decode(errors="replace").strip() if _known(status) == 200 else ""
        status, body, _ = await self._request("GET", "/metadata/scheduledevents?api-version=2020-07-01", headers)
        return answers.azure_events(body, self._own_name, time.time()) if _known(status) == 200 else None

    async def _request(self, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, bytes, str]:
        """Return status, body and Metadata-Flavor. Raises NoAnswer."""
        asking = self._session.request(method, self._address + path, headers=headers, allow_redirects=False)
        try:
            async with asyncio.timeout(_ANSWER_S), asking as answer:
                body = bytearray()
                async for part in answer.content.iter_chunked(16 << 10):
                    body += part
                    if len(body) > _MAX_BYTES:
                        raise NoAnswer(f"it answers more than {_MAX_BYTES} bytes")
                return answer.status, bytes(body), answer.headers.get("Metadata-Flavor", "")
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise NoAnswer(one_line(error) or type(error).__name__) from error


def _known(status: int) -> int:
    """200: it is said; 404: it is not. Raises NoAnswer for others."""
    if status not in (200, 404):
        raise NoAnswer(f"status {status}")
    return status


async def watch(
    place: NoticePlace, address: str, tell: Tell, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> None:
    """Watch for ever. `tell` is called with every notice that leaves less time than the one before."""
    metadata = Metadata(address)
    goes_at, num_failures = float("inf"), 0
    try:
        while True:
            try:
                notice, pause_s = await metadata.look_at(place)
                if num_failures:
                    log.info("spot notices of %s: it answers again", place)
                num_failures = 0
            except NoAnswer as error:
                num_failures += 1
                if num_failures == 1:
                    log.warning("spot notices of %s: %s; it is asked again, and the worker works on", place, error)
                notice, pause_s = None, min(_MAX_PAUSE_S, 2.0**num_failures)
            if notice is not None and time.monotonic() + notice.left_s < goes_at - 5.0:
                goes_at = time.monotonic() + notice.left_s
                tell(notice.why, left_to_tell(notice.left_s))
            await sleep(pause_s)
    finally:
        await metadata.close()
