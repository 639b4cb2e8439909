"""Reaching a manager: what is at the address may be something else."""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType

import pytest
from tests.integration.live import ENGINE, manager, run, until

from polyrl.engines.emulated import EmulatedEngine
from polyrl.errors import UserError
from polyrl.wire import frames
from polyrl.wire.control import JoinReply, JoinRequest
from polyrl.wire.dial import Dialer, Unreachable
from polyrl.wire.frames import PROTOCOL
from polyrl.worker.agent import WorkerAgent, WorkerOptions

PAGE = b"<html>It works!</html>"


def http(status: str, body: bytes = PAGE) -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (status.encode(), len(body), body)


@asynccontextmanager
async def answering(answer: bytes, at: Mapping[str, bytes] = MappingProxyType({})) -> AsyncIterator[str]:
    """Something on loopback that gives everybody the same answer, but at the paths that have their own; its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        num_bytes = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
        await reader.readexactly(0 if num_bytes is None else int(num_bytes[1]))
        writer.write(at.get(head.split()[1], answer))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield "http://{}:{}".format(*server.sockets[0].getsockname())
    finally:
        server.close()


STRANGERS = {
    "a page": (http("200 OK"), "/v1/openapi.json: not an answer of a PolyRL manager: JSON is malformed"),
    "another description": (
        http("200 OK", b'{"info": {"title": "a shop"}}'),
        "/v1/openapi.json: not an answer of a PolyRL manager: Invalid enum value 'a shop'",
    ),
    "another protocol": (
        http("200 OK", b'{"info": {"title": "PolyRL manager", "x-protocol": 0}}'),
        f": this manager speaks protocol 0, not {PROTOCOL}: install the same PolyRL",
    ),
    "nothing there": (http("404 Not Found"), ": is no PolyRL manager: HTTP 404"),
    "no text": (http("404 Not Found", b'{"error": "\xff"}'), ": is no PolyRL manager: HTTP 404"),
    "no such method": (http("501 Unsupported method"), ": is no PolyRL manager: HTTP 501"),
    "a login": (http("401 Unauthorized"), ": is no PolyRL manager: HTTP 401"),
    "no HTTP": (b"SSH-2.0-OpenSSH_9.6\r\n", ": is no PolyRL manager: it does not speak HTTP"),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_worker_ends_in_a_line_at_what_is_no_manager(name: str):
    answer, said = STRANGERS[name]

    async def scenario() -> None:
        async with answering(answer) as url:
            left = await WorkerAgent(EmulatedEngine(ENGINE), Dialer(url, "token"), WorkerOptions(name="w")).run()
            assert not left.ok
            assert str(left).startswith(f"{url}{said}") and "\n" not in str(left)

    run(scenario())


def test_a_worker_joins_a_manager_that_knows_nothing_of_asking_for_a_name():
    older = {
        "/v1/openapi.json": http("200 OK", b'{"info": {"title": "PolyRL manager"}}'),
        "/v1/join": http("409 Conflict", b'{"error": "install the same PolyRL"}'),
    }

    async def scenario() -> None:
        async with answering(http("404 Not Found", b'{"error": "Not Found"}'), older) as url:
            left = await WorkerAgent(EmulatedEngine(ENGINE), Dialer(url, "token"), WorkerOptions(name="w")).run()
            assert str(left) == f"{url}: install the same PolyRL"

    run(scenario())


@pytest.mark.parametrize("status", ["502 Bad Gateway", "503 Service Unavailable", "504 Gateway Timeout"])
def test_a_proxy_whose_manager_is_away_is_tried_again(status: str):
    async def scenario() -> None:
        async with answering(http(status)) as url, Dialer(url, "token") as dialer:
            with pytest.raises(Unreachable, match=f"HTTP {status[:3]}"):
                await dialer.knock()

    run(scenario())


def test_what_accepts_and_stays_mute_is_named_so_and_tried_again():
    async def scenario() -> None:
        async def stay_mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        async with await asyncio.start_server(stay_mute, "127.0.0.1", 0) as server:
            url = "http://{}:{}".format(*server.sockets[0].getsockname())
            async with Dialer(url, "token", timeout_s=0.1) as dialer:
                with pytest.raises(Unreachable) as mute:
                    await dialer.knock()
        said = "it accepted the connection and did not answer within 0.1 s; is that a PolyRL manager?"
        assert str(mute.value) == f"{url}: {said}"

    run(scenario())


def test_a_token_of_another_run_is_named_by_where_it_was_found():
    async def scenario() -> None:
        refusal = http("401 Unauthorized", b'{"error": "a valid token is needed: Authorization: Bearer TOKEN"}')
        async with answering(refusal) as url:
            for token_from, said in (("other/admin.token", " (other/admin.token)"), ("", "")):
                async with Dialer(url, "token", token_from=token_from) as dialer:
                    with pytest.raises(UserError) as refused:
                        await dialer.knock()
                assert str(refused.value) == f"{url}: that is not a token of this run{said}"

    run(scenario())


def test_what_takes_the_place_of_a_manager_while_an_engine_loads_is_no_manager_either():
    async def scenario() -> None:
        async with answering(http("501 Unsupported method")) as url, Dialer(url, "token") as dialer:
            with pytest.raises(UserError, match="is no PolyRL manager: HTTP 501"):
                await dialer.post("/v1/join", None, JoinReply)

    run(scenario())


def test_one_dialer_holds_more_streams_than_an_http_client_has_connections_by_itself(tmp_path: Path):
    """Aiohttp's own limit is 100: the next stream would wait for one to end."""
    num = 110

    async def scenario() -> None:
        async with manager(tmp_path) as live, Dialer(live.url, live.token("worker")) as dialer:

            async def connect(number: int) -> None:
                request = JoinRequest(name=f"w{number}", protocol=PROTOCOL, engine="none", slots=1)
                reply = await dialer.post("/v1/join", request, JoinReply)
                socket = await dialer.stream("/v1/worker", reply.session, 1 << 20)
                await socket.send_bytes(frames.encode(frames.Hello(-1, b"")))

            await asyncio.gather(*map(connect, range(num)))
            await until(lambda: len(live.service.lobby.workers) == num, "all have joined")

    run(scenario(), timeout_s=60.0)
