"""The receiving half of a connection: frames go straight to who takes them, in order; the rest is received as ever."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType

import pytest
from aiohttp import ClientSession, ClientWebSocketResponse, WebSocketError, WSMsgType, web
from tests.integration.live import CONFIG, honest_worker, manager, play_round, run, trainer, until

from polyrl.manager.peers.inlet import Inlet

MAX_BYTES = 1 << 17


class Taker:
    """Takes frames, while it has room."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        self.room = True

    def take(self, data: bytes) -> bool:
        if self.room:
            self.taken.append(data)
        return self.room


@asynccontextmanager
async def connected(taker: Taker) -> AsyncIterator[tuple[Inlet, ClientWebSocketResponse]]:
    found: asyncio.Future[Inlet] = asyncio.get_running_loop().create_future()
    over = asyncio.Event()

    async def serve(request: web.Request) -> web.StreamResponse:
        inlet = Inlet(MAX_BYTES)
        await inlet.prepare(request)
        inlet.give_to(taker.take)
        found.set_result(inlet)
        await over.wait()
        return inlet

    app = web.Application()
    app.router.add_get("/", serve)
    runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    try:
        async with ClientSession() as session, session.ws_connect(f"http://{host}:{port}/") as peer:
            yield await found, peer
            over.set()
    finally:
        over.set()
        await runner.cleanup()


def test_frames_go_straight_to_who_takes_them() -> None:
    async def live() -> None:
        taker = Taker()
        async with connected(taker) as (_, peer):  # nobody receives
            sent = [b"%d" % number * (number + 1) for number in range(100)]
            for data in sent:
                await peer.send_bytes(data)
            await until(lambda: len(taker.taken) == len(sent), "all are taken")
            assert taker.taken == sent

    run(live())


def test_frames_that_stalled_the_reader_keep_their_order_when_there_is_room_again() -> None:
    async def live() -> None:
        taker = Taker()
        async with connected(taker) as (inlet, peer):
            taker.room = False
            sent = [bytes([number]) * (120_000 if number % 2 else 10) for number in range(40)]
            sending = asyncio.create_task(_send(peer, sent))
            await until(lambda: bool(inlet._reader._stalled_reader), "the reader has stalled")  # type: ignore[union-attr]
            taker.room = True
            receiving = asyncio.create_task(inlet.receive())
            while len(taker.taken) < len(sent):
                if (await asyncio.wait((receiving,), timeout=0.01))[0]:
                    taker.taken.append(receiving.result().data)
                    receiving = asyncio.create_task(inlet.receive())
            receiving.cancel()
            await sending
            assert [data[0] for data in taker.taken] == list(range(40))

    run(live())


async def _send(peer: ClientWebSocketResponse, sent: list[bytes]) -> None:
    for data in sent:
        await peer.send_bytes(data)


def test_a_frame_without_room_waits_and_so_do_all_behind_it() -> None:
    async def live() -> None:
        taker = Taker()
        async with connected(taker) as (inlet, peer):
            await peer.send_bytes(b"first")
            await until(lambda: taker.taken == [b"first"], "it is taken")
            taker.room = False
            await peer.send_bytes(b"second")
            second = asyncio.create_task(inlet.receive())
            assert (await second).data == b"second"
            await peer.send_bytes(b"third")
            await peer.send_str("text is no frame")
            await asyncio.sleep(0.05)
            taker.room = True
            await peer.send_bytes(b"fourth")
            await asyncio.sleep(0.05)  # all of them are there
            received = [(await inlet.receive()).data for _ in range(3)]
            assert received == [b"third", "text is no frame", b"fourth"]
            more = asyncio.create_task(inlet.receive())  # who comes back for more has handed on what it had
            await asyncio.sleep(0)
            await peer.send_bytes(b"fifth")
            await until(lambda: taker.taken == [b"first", b"fifth"], "the way is free again")
            assert not more.done()
            more.cancel()

    run(live())


def test_what_there_is_no_room_for_stops_the_reading() -> None:
    async def live() -> None:
        taker = Taker()
        taker.room = False
        async with connected(taker) as (inlet, peer):
            num_frames, data = 2000, bytes(1 << 15)  # more than the buffers of a connection hold
            sending = asyncio.create_task(send_all(peer, data, num_frames))
            await asyncio.sleep(0.3)
            assert not sending.done()
            for _ in range(num_frames):
                assert (await inlet.receive()).data == data
            await sending
            assert taker.taken == []

    run(live())


async def send_all(peer: ClientWebSocketResponse, data: bytes, num: int) -> None:
    for _ in range(num):
        await peer.send_bytes(data)


def test_goodbyes_and_what_is_wrong_are_received() -> None:
    async def live() -> None:
        taker = Taker()
        async with connected(taker) as (inlet, peer):
            await peer.send_bytes(bytes(MAX_BYTES + 1))
            said = await inlet.receive()
            assert isinstance(said.data, WebSocketError)
        async with connected(taker) as (inlet, peer):
            await peer.send_bytes(b"last")
            await peer.ping()
            closing = asyncio.create_task(peer.close())
            assert (await inlet.receive()).type is WSMsgType.CLOSE
            await closing
        assert taker.taken == [b"last"]

    run(live())


def test_nothing_is_handed_on_once_it_is_kept() -> None:
    async def live() -> None:
        taker = Taker()
        async with connected(taker) as (inlet, peer):
            inlet.keep()
            await peer.send_bytes(b"late")
            assert (await inlet.receive()).data == b"late"
            assert taker.taken == []

    run(live())


def no_reader(name: str) -> ModuleType:
    raise ModuleNotFoundError("No module named 'aiohttp._websocket'", name=name)


def test_a_manager_whose_aiohttp_has_another_reader_says_so_once_and_hears_everybody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def live() -> None:
        async with (
            manager(tmp_path, find=no_reader) as one,
            honest_worker(one),
            honest_worker(one, name="another"),
            trainer(one) as fleet,
        ):
            await fleet.publish(0)
            assert len(await play_round(fleet, 0)) == CONFIG.domains[0].prompts_per_step
            assert one.refused == {}

    with caplog.at_level(logging.WARNING, logger="polyrl"):
        run(live())
    (warning,) = [line for line in caplog.messages if "aiohttp" in line]
    assert "No module named 'aiohttp._websocket'; expected the reader of aiohttp 3.14" in warning
