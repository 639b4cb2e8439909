"""Messages that never end: what has come of them is bounded, and who sends them is cut off by name, run or no run."""

import asyncio
import logging
import struct
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from aiohttp.base_protocol import BaseProtocol
from tests.integration.live import CONFIG, QUICK, Peer, honest_worker, manager, play_round, run, trainer, until

from polyrl.manager.peers.inlet import Unfinished, _Queue, _Reader
from polyrl.manager.settings import LimitSettings, ManagerSettings
from polyrl.scheduling.core.fleet import MAX_DEPARTED
from polyrl.scheduling.core.parameters import FleetRules
from polyrl.wire import frames
from polyrl.wire.control import JoinReply, JoinRequest
from polyrl.wire.dial import Dialer, Unreachable

MB = 1 << 20


def limited(**limits: float) -> ManagerSettings:
    changed = msgspec.structs.replace(LimitSettings(request_timeout_s=5.0, joins_per_s=1000.0), **limits)
    return msgspec.structs.replace(QUICK, limits=changed)


async def begin_message(peer: Peer, num_sent: int, num_claimed: int = 15 * MB) -> None:
    """The head of a binary message of so many bytes, masked, and the first of them."""
    transport = peer.socket._response.connection.transport  # type: ignore[union-attr]
    assert transport is not None
    transport.write(b"\x82\xff" + struct.pack(">Q", num_claimed) + bytes(4))
    await go_on(peer, num_sent)


async def go_on(peer: Peer, num_sent: int) -> None:
    transport = peer.socket._response.connection.transport  # type: ignore[union-attr]
    assert transport is not None
    for _ in range(num_sent // MB):
        transport.write(bytes(MB))
        await asyncio.sleep(0)


def test_messages_that_never_end_are_bounded_in_all_and_the_oldest_makes_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Each below the largest that a message may be, and together far above what there is for them."""

    async def scene() -> None:
        async with manager(tmp_path, limited(max_unfinished_mb=40.0)) as live, honest_worker(live):
            peers = [Peer(live, f"mallory-{number}") for number in range(8)]
            for peer in peers:
                await peer.enter()
                await begin_message(peer, 12 * MB)
            await until(lambda: live.refused.get("unfinished", 0) >= 5, "those that were first are cut off")
            assert live.refused["unfinished"] <= 6
            for peer in peers:
                await peer.__aexit__()
            async with trainer(live) as fleet:
                await fleet.publish(0)
                assert len(await play_round(fleet, 0)) == CONFIG.domains[0].prompts_per_step

    with caplog.at_level(logging.WARNING, logger="polyrl"):
        run(scene(), timeout_s=90.0)
    assert "worker mallory-0 is cut off: messages that do not end take too much memory" in caplog.text
    assert "worker honest is cut off" not in caplog.text


def test_where_there_is_too_much_the_largest_makes_way_and_not_the_one_that_was_begun_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    async def scene() -> None:
        async with manager(tmp_path, limited(max_unfinished_mb=40.0)) as live:
            slow, peers = Peer(live, "slow"), [Peer(live, f"mallory-{number}") for number in range(4)]
            await slow.enter()
            await begin_message(slow, 2 * MB, 3 * MB)
            for peer in peers:
                await peer.enter()
                await begin_message(peer, 12 * MB)
            await until(lambda: live.refused.get("unfinished", 0) >= 1, "one is cut off")
            await go_on(slow, MB)  # no frame: refused, but heard as a whole
            assert (await slow.fate()).why.startswith("refused: not a frame")
            for peer in (slow, *peers):
                await peer.__aexit__()

    with caplog.at_level(logging.WARNING, logger="polyrl"):
        run(scene(), timeout_s=90.0)
    assert "worker slow is cut off" not in caplog.text


def test_what_comes_behind_the_end_of_a_message_is_counted(tmp_path: Path):
    """In one read: a whole message, and the beginning of one that never ends."""

    async def scene() -> None:
        cut: list[str] = []
        unfinished = Unfinished(MB, 0.2)
        queue = _Queue(BaseProtocol(asyncio.get_running_loop()), MB, loop=asyncio.get_running_loop())
        queue.take = lambda _: True
        reader = queue.reader = _Reader(queue, 16 * MB, compress=False, decode_text=True)
        reader.watch(queue, unfinished, cut.append)
        whole = b"\x82\xfe" + struct.pack(">H", 1000) + bytes(4 + 1000)
        begun = b"\x82\xff" + struct.pack(">Q", 9 * MB) + bytes(4 + MB // 8)
        reader.feed_data(whole * 3 + begun[:5])
        assert unfinished.num_bytes == 0
        reader.feed_data(begun[5:])
        assert MB // 8 <= unfinished.num_bytes <= MB // 8 + 32
        reader.feed_data(bytes(9 * MB - MB // 8) + whole * 200)
        assert unfinished.num_bytes == 0
        reader.feed_data(whole + begun)
        assert MB // 8 <= unfinished.num_bytes <= MB // 8 + 32
        await until(lambda: bool(cut), "it is cut off")
        assert cut == ["a message did not end within 0.2 s; 0.1 MB of one had come"]

    run(scene())


def test_a_message_that_takes_too_long_is_cut_off_while_no_run_is_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    async def scene() -> None:
        async with manager(tmp_path, limited(message_timeout_s=0.5)) as live, Peer(live) as peer:
            await peer.enter()
            await begin_message(peer, 2 * MB)
            await until(lambda: live.refused == {"unfinished": 1}, "it is cut off")

    with caplog.at_level(logging.WARNING, logger="polyrl"):
        run(scene())
    assert "worker mallory is cut off: a message did not end within 0.5 s; 2.1 MB of one had come" in caplog.text


def test_pings_in_the_middle_of_a_message_do_not_hide_it(tmp_path: Path):
    """In fragments, with a ping after each: no frame is large, and none of the message's ends."""

    async def scene() -> None:
        async with manager(tmp_path, limited(message_timeout_s=1.0)) as live, Peer(live) as peer:
            await peer.enter()
            transport = peer.socket._response.connection.transport  # type: ignore[union-attr]
            assert transport is not None
            part = b"\xff" + struct.pack(">Q", MB // 4) + bytes(4 + MB // 4)
            for number in range(200):
                transport.write((b"\x00" if number else b"\x02") + part + b"\x89\x80" + bytes(4))
                await asyncio.sleep(0.02)
                if "unfinished" in live.refused:
                    break
            assert live.refused == {"unfinished": 1}

    run(scene(), timeout_s=60.0)


def test_a_large_message_that_ends_is_heard_and_nothing_is_left_of_it(tmp_path: Path):
    async def scene() -> None:
        async with manager(tmp_path, limited(message_timeout_s=2.0)) as live, Peer(live) as peer:
            await peer.enter()
            await peer.send(bytes(9 * MB))  # no frame: refused, but heard as a whole
            assert (await peer.fate()).why.startswith("refused: not a frame")
            assert live.refused == {"frame": 1}

    run(scene())


def test_there_are_so_many_workers_at_once(tmp_path: Path):
    async def scene() -> None:
        async with manager(tmp_path, limited(max_workers=3)) as live:
            for number in range(3):
                async with Peer(live, f"worker-{number}") as peer:
                    await peer.join()
            async with Peer(live, "worker-3") as peer:
                with pytest.raises(Unreachable, match="3 workers are here; expected fewer than 3"):
                    await peer.join()
            assert live.refused == {"full": 1}

    run(scene())


def test_the_workers_of_one_address_leave_room_for_others(tmp_path: Path):
    async def scene() -> None:
        async with manager(tmp_path, limited(max_workers_per_address=2)) as live:
            for number in range(2):
                async with Peer(live, f"worker-{number}") as peer:
                    await peer.join()
            async with Peer(live, "worker-2") as peer:
                with pytest.raises(Unreachable, match=r"worker 'worker-2': 2 workers have joined from 127.0.0.1"):
                    await peer.join()

    run(scene())


def test_names_that_come_and_go_leave_little_behind(tmp_path: Path):
    """Each is another one, by a worker that never connects, and is given up for want of a heartbeat."""
    num = MAX_DEPARTED + 200
    config = msgspec.structs.replace(CONFIG, fleet_rules=FleetRules(heartbeat_timeout_s=0.5))
    settings = msgspec.structs.replace(limited(joins_per_s=1e6), restart_grace_s=0.1)

    async def scene() -> None:
        async with manager(tmp_path, settings) as live, trainer(live, config) as fleet:
            async with Dialer(live.url, live.token("worker")) as dialer:
                for number in range(num):
                    facts = JoinRequest(name=f"w{number}", protocol=frames.PROTOCOL, engine="script", slots=1)
                    await dialer.post("/v1/join", facts, JoinReply)
            lobby = live.service.lobby
            await until(lambda: not lobby.workers, "all are given up")
            assert len(lobby.need_run().scheduler.ledger.workers) <= MAX_DEPARTED + 1
            assert len(lobby.need_run().desk.state.fleet.last_incarnations) <= MAX_DEPARTED
            assert (await fleet.status()).ledger["workers_joined"] == num

    run(scene(), timeout_s=100.0)
    verify = [sys.executable, "-m", "polyrl", "ledger", str(tmp_path), "--verify"]
    done = subprocess.run(verify, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verified" in done.stdout
