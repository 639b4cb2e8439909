"""Workers that pass weights on and mean harm, through a real manager: nobody is held, blamed or dialled."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from tests.integration.live import CONFIG, ENGINE, Live, Peer, manager, run, until
from tests.integration.test_versions import SETTINGS, trainer
from tests.weights.forging import forge
from tests.weights.stage import held_by

from polyrl.engines.emulated import EmulatedEngine
from polyrl.ids import WorkerName
from polyrl.scheduling.core.fleet import Worker
from polyrl.scheduling.core.parameters import FleetRules, WeightDeliveryConfig
from polyrl.scheduling.rules.weight_delivery import TRAINER
from polyrl.weights.chunks import HashName
from polyrl.weights.manifest import Spec, lay_out
from polyrl.weights.peer import WeightPeer
from polyrl.weights.server import Offer, WeightServer
from polyrl.weights.settings import WeightSettings
from polyrl.wire import frames
from polyrl.wire.dial import Dialer
from polyrl.worker.agent import WorkerAgent, WorkerOptions

SMALL = lay_out([Spec("weights", "float32", (64, 64))], architecture="test")
BIG = lay_out([Spec("weights", "float32", (1024, 1024))], architecture="test")
"""Four megabytes."""
ONE_AT_A_TIME = structs.replace(
    CONFIG,
    weight_delivery=WeightDeliveryConfig(trainer_uploads=1, retry_s=0.1),
    fleet_rules=FleetRules(heartbeat_timeout_s=60.0),
)


def seat(live: Live, name: str) -> Worker:
    scheduler = live.service.lobby.need_run().scheduler
    fleet = scheduler.desk.state.fleet
    return fleet.seats[fleet.by_name[WorkerName(name)]]


@asynccontextmanager
async def worker(
    live: Live, name: str, peers: dict[str, WeightPeer], settings: WeightSettings = SETTINGS
) -> AsyncIterator[None]:
    def peer_of(key: bytes) -> WeightPeer:
        peers[name] = WeightPeer(settings, key)
        return peers[name]

    dialer = Dialer(live.url, live.token("worker"))
    agent = WorkerAgent(EmulatedEngine(ENGINE), dialer, WorkerOptions(name), peer_of=peer_of)
    life = asyncio.create_task(agent.run())
    try:
        await until(lambda: name in peers, f"{name} has joined")
        yield
    finally:
        agent.drain("the test is over")
        await life


@asynccontextmanager
async def relay(live: Live, addresses: tuple[str, ...], name: str = "mallory") -> AsyncIterator[Peer]:
    """A worker made of a script that says it passes weights on, at these addresses."""
    async with Peer(live, name, version=None) as peer:
        peer.facts = structs.replace(peer.facts, relays=True)
        await peer.join()
        await peer.dial()
        await peer.say(frames.Hello(-1, b"", weight_addresses=addresses))
        yield peer


def fill(out: memoryview) -> None:
    out[:] = np.random.default_rng(0).integers(0, 256, len(out), np.uint8).tobytes()


def publish_big(server: WeightServer) -> Offer:
    return server.publish(0, BIG, fill)


def test_nobody_is_sent_to_an_address_that_is_not_the_workers_own(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    trap = socket.create_server(("127.0.0.2", 0))
    trap.settimeout(1.0)
    address = f"127.0.0.2:{trap.getsockname()[1]}"

    async def scene() -> None:
        peers: dict[str, WeightPeer] = {}
        async with manager(tmp_path) as live, trainer(live, ONE_AT_A_TIME) as ours, relay(live, (address,)) as mallory:
            digest = await ours.publish(0)
            await mallory.hear(frames.PullOrder)
            async with worker(live, "honest", peers):
                await until(lambda: peers["honest"].held == (0, digest), "it has the version, from the trainer")
            assert live.refused["address"] == 1

    with trap, caplog.at_level(logging.WARNING, logger="polyrl"):
        run(scene())
        with pytest.raises(TimeoutError):
            trap.accept()
    assert f"worker mallory at 127.0.0.1: no worker is sent to {address} for weights" in caplog.text


def test_a_slow_relay_is_left_and_named_and_the_version_comes_from_the_trainer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    slow = structs.replace(SETTINGS, egress_mb_s=0.1, shared_memory=False, chunk_bytes=65536, stall_s=30.0)
    quick = structs.replace(SETTINGS, relay_patience_s=0.5, shared_memory=False, stall_s=30.0)

    async def scene() -> None:
        peers: dict[str, WeightPeer] = {}
        async with manager(tmp_path) as live, trainer(live, ONE_AT_A_TIME) as ours:
            key = bytes.fromhex(ours.fleet.opened.weights_key) if ours.fleet.opened is not None else b""
            offer = await asyncio.to_thread(publish_big, ours.server)
            crawling = await asyncio.to_thread(WeightPeer, slow, key)
            try:
                held = await asyncio.to_thread(crawling.pull, 0, offer.digest, offer.addresses, 20.0)
                held.close()
                async with relay(live, crawling.addresses) as mallory:
                    await ours.fleet.publish(0, offer.digest, offer.addresses)
                    await mallory.hear(frames.PullOrder)  # and says nothing of it: whoever is next is sent to it
                    async with worker(live, "victim", peers, quick):
                        await until(lambda: seat(live, "mallory").accused_by == ["victim"], "the victim says so")
                        await until(lambda: peers["victim"].held == (0, offer.digest), "it has it from the trainer")
                        assert seat(live, "mallory").may_relay
            finally:
                await asyncio.to_thread(crawling.close)

    with caplog.at_level(logging.INFO, logger="polyrl"):
        run(scene(), timeout_s=60.0)
    assert "worker victim could not install version 0: too slow for a relay" in caplog.text


def test_a_relay_without_an_address_is_nobodys_source(tmp_path: Path):
    """It says that it passes weights on, and not where: whoever was to pull from it counts as the trainer's."""

    async def scene() -> None:
        async with manager(tmp_path) as live, trainer(live, ONE_AT_A_TIME) as ours, relay(live, ()) as mallory:
            await ours.publish(0)
            await mallory.hear(frames.PullOrder)  # from the trainer, for as long as the test
            async with relay(live, (), "second") as second:
                pull = await second.hear(frames.PullOrder)
                assert (pull.source, pull.addresses) == ("", ours.server.addresses)
                assert seat(live, "second").source == TRAINER
                assert seat(live, "mallory").accused_by == ["second"]
                async with relay(live, (), "third") as third:
                    await third.hear(frames.PullOrder)
                    assert not seat(live, "mallory").may_relay or not seat(live, "second").may_relay
                    await third.say(frames.InstallFailed(0, "no disk"))  # at the trainer: it accuses nobody
                    await until(lambda: seat(live, "third").num_pull_failures == 1, "it was heard")
                    accused = [one for name in ("mallory", "second") for one in seat(live, name).accused_by]
                    assert accused.count(WorkerName("third")) <= 1

    run(scene())


def test_one_lying_complaint_takes_no_relay_from_the_others(tmp_path: Path):
    async def scene() -> None:
        peers: dict[str, WeightPeer] = {}
        async with manager(tmp_path) as live, trainer(live, ONE_AT_A_TIME) as ours, worker(live, "good", peers):
            digest = await ours.publish(0)
            await until(lambda: seat(live, "good").version == 0, "it has the version")
            async with relay(live, (), "busy") as busy, relay(live, ()) as mallory:
                await busy.hear(frames.PullOrder)  # from the trainer, for as long as the test
                assert (await mallory.hear(frames.PullOrder)).source == "good"
                await mallory.say(frames.InstallFailed(0, "it lied to me"))
                await until(lambda: seat(live, "good").accused_by == ["mallory"], "it was heard")
                async with relay(live, (), "next") as third:
                    assert (await third.hear(frames.PullOrder)).source == "good"
                await mallory.hear(frames.PullOrder)
            assert digest

    run(scene())


@pytest.mark.parametrize(
    ("hash", "one_machine", "is_fooled"),
    [("xxh3-128", False, False), ("xxh3-128", True, True), ("blake3", False, False), ("blake3", True, False)],
)
def test_forged_chunks_are_installed_by_nobody_who_cannot_trust_its_neighbours(
    tmp_path: Path, hash: HashName, one_machine: bool, is_fooled: bool
):
    """A relay replaces most of a version, chunk by chunk, by bytes of the same xxh3-128 digest.

    Where all of a run is on one machine, neighbours are believed, and this is what belief is worth.
    """
    quick = structs.replace(SETTINGS, hash=hash, shared_memory=False, one_machine=one_machine)

    async def scene() -> None:
        peers: dict[str, WeightPeer] = {}
        async with manager(tmp_path) as live, trainer(live, ONE_AT_A_TIME) as ours:
            key = bytes.fromhex(ours.fleet.opened.weights_key) if ours.fleet.opened is not None else b""
            server, forger = WeightServer(quick, key), await asyncio.to_thread(WeightPeer, quick, key)
            server.start()
            try:
                offer = await asyncio.to_thread(server.publish, 0, SMALL, fill)
                (await asyncio.to_thread(forger.pull, 0, offer.digest, offer.addresses, 20.0)).close()
                right = bytes(held_by(forger))
                held_by(forger)[:] = forged(right)
                assert bytes(held_by(forger)) != right
                async with relay(live, forger.addresses) as mallory:
                    await ours.fleet.publish(0, offer.digest, offer.addresses)
                    await mallory.hear(frames.PullOrder)
                    async with worker(live, "victim", peers, quick):
                        await until(lambda: peers["victim"].held == (0, offer.digest), "it has the version")
                        assert (bytes(held_by(peers["victim"])) != right) == is_fooled
                        assert seat(live, "mallory").accused_by == ([] if is_fooled else ["victim"])
            finally:
                await asyncio.to_thread(forger.close)
                await asyncio.to_thread(server.close)

    run(scene(), timeout_s=60.0)


def forged(data: bytes) -> bytes:
    size = SETTINGS.chunk_bytes
    return b"".join(forge(data[start : start + size]) for start in range(0, len(data), size))
