"""Peers that read slowly are waited for; those that read nothing are cut off. What is large comes in several frames."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from aiohttp import web
from tests.integration.live import (
    CONFIG,
    ENGINE,
    PATIENCE_S,
    Peer,
    check_right,
    honest_worker,
    manager,
    play_round,
    run,
    trainer,
    until,
)

from polyrl.client import Prompt
from polyrl.manager.peers.link import Link
from polyrl.manager.settings import LimitSettings, ManagerSettings, StreamSettings
from polyrl.scheduling.core.parameters import FleetRules
from polyrl.wire import frames, host_frames

SEND_TIMEOUT_S = 1.0
IMPATIENT = ManagerSettings(
    stream=StreamSettings(flush_interval_s=0.01, heartbeat_interval_s=0.1, send_timeout_s=SEND_TIMEOUT_S),
    limits=LimitSettings(request_timeout_s=1.0),
)


# A link alone


class Ends(NamedTuple):
    """Both ends of a connection: what sends, and a socket from which nobody reads by itself."""

    link: Link
    pump: "asyncio.Task[bool]"
    reader: socket.socket


@asynccontextmanager
async def connected(max_queued_bytes: int = 1 << 30) -> AsyncIterator[Ends]:
    found: asyncio.Future[Ends] = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)

    async def serve(request: web.Request) -> web.StreamResponse:
        response = web.WebSocketResponse()
        await response.prepare(request)
        link = Link(response, max_queued_bytes)
        pump = asyncio.create_task(link.pump(request.transport, SEND_TIMEOUT_S))
        found.set_result(Ends(link, pump, reader))
        await pump
        if request.transport is not None:
            request.transport.abort()
        return response

    app = web.Application()
    app.router.add_get("/", serve)
    runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    reader.setblocking(False)
    await loop.sock_connect(reader, runner.addresses[0])
    upgrade = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    key = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    await loop.sock_sendall(reader, f"GET / HTTP/1.1\r\nHost: a\r\n{upgrade}{key}\r\n".encode())
    try:
        yield await found
    finally:
        reader.close()
        await runner.cleanup()


def big_frame(num_bytes: int) -> frames.Delivered:
    return frames.Delivered(0, 1, frames.Origin(0, 0, 0), (frames.SamplePayload(1, bytes(num_bytes), (), "stop", 0.0),))


def test_a_peer_that_reads_slowly_is_waited_for_however_much_there_is():
    num_bytes = 32 << 20

    async def scenario() -> None:
        async with connected() as ends:
            loop = asyncio.get_running_loop()
            began_at = loop.time()
            ends.link.send(big_frame(num_bytes // 2))
            ends.link.send(big_frame(num_bytes // 2))
            num_read = 0
            while num_read < num_bytes:
                num_read += len(await loop.sock_recv(ends.reader, 1 << 20))
                await asyncio.sleep(0.01)
            assert loop.time() - began_at > 2 * SEND_TIMEOUT_S, "it was not slow enough to show anything"
            assert not ends.pump.done()
            assert not ends.link.is_too_slow

    run(scenario())


def test_a_peer_that_reads_nothing_is_cut_off_in_time():
    async def scenario() -> None:
        async with connected() as ends:
            ends.link.send(big_frame(32 << 20))
            async with asyncio.timeout(10 * SEND_TIMEOUT_S):
                assert not await ends.pump
            assert ends.link.is_too_slow

    run(scenario())


def test_who_is_told_goodbye_gets_what_was_queued_before():
    async def scenario() -> None:
        async with connected() as ends:
            loop = asyncio.get_running_loop()
            ends.link.send(big_frame(4 << 20))
            ends.link.close("it is over")
            ends.link.send(frames.Ack(1))
            num_read = 0
            async with asyncio.timeout(PATIENCE_S):
                while data := await loop.sock_recv(ends.reader, 1 << 20):
                    num_read += len(data)
                    if num_read > 4 << 20:
                        ends.reader.shutdown(socket.SHUT_WR)
            assert 4 << 20 < num_read < (4 << 20) + 2000

    run(scenario())


@pytest.mark.parametrize(
    "made_for_it",
    [
        frames.Orders((frames.Order(1, 1024, b"abcd", bytes(1 << 18), 9, 9, frames.Sampling()),)),
        host_frames.CallAnswer(1, 1, 0, bytes(1 << 18), "stop"),
    ],
    ids=["an order", "an answer to a call"],
)
def test_what_waits_beside_payload_is_bounded(made_for_it: frames.Orders | host_frames.CallAnswer):
    """Answers are kept anyway, and do not count; what is made for this peer alone does."""

    async def scenario() -> None:
        async with connected(max_queued_bytes=1 << 20) as ends:
            for _ in range(100):
                ends.link.send(big_frame(1 << 20))
            assert not ends.link.is_too_slow
            for _ in range(5):
                ends.link.send(made_for_it)
            assert ends.link.is_too_slow
            async with asyncio.timeout(PATIENCE_S):
                assert not await ends.pump

    run(scenario())


# In a fleet


def test_a_worker_that_never_reads_is_cut_off_and_its_samples_move_on(tmp_path: Path):
    big = Prompt([9] * 1_000_000)
    rules = FleetRules(heartbeat_timeout_s=6 * SEND_TIMEOUT_S)  # cut off for what it does not read, and then given up
    engine = msgspec.structs.replace(ENGINE, slots=2, prefill_tokens_per_s=1e9)

    async def scenario() -> None:
        async with (
            manager(tmp_path, IMPATIENT) as live,
            honest_worker(live, engine=engine),
            trainer(live, msgspec.structs.replace(CONFIG, fleet_rules=rules), prompts=lambda *_: big) as fleet,
            Peer(live, slots=6) as peer,
        ):
            await fleet.publish(0)
            await peer.enter()
            playing = asyncio.create_task(play_round(fleet, 0))
            await until(lambda: live.refused == {"slow_reader": 1}, "it is cut off: its six orders are 24 MB")
            groups = await playing
            check_right(groups, {group.id: big for group in groups}, engine=engine)

    run(scenario())
