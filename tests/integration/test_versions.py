"""Versions with weights, through a real manager: workers fetch and verify them; every token is bound to a digest."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from tests.integration.live import CONFIG, ENGINE, Live, Peer, manager, run, tokens, until

from polyrl.client import Fleet, Prompt, connect
from polyrl.engines.emulated import EmulatedEngine
from polyrl.engines.engine import Weights
from polyrl.errors import UserError
from polyrl.ids import Version, WorkerName
from polyrl.scheduling.core.parameters import FleetRules, SchedulerConfig, WeightDeliveryConfig
from polyrl.weights.manifest import Spec, lay_out
from polyrl.weights.peer import WeightPeer
from polyrl.weights.server import WeightServer
from polyrl.weights.settings import WeightSettings
from polyrl.weights.shelf import HostCopy
from polyrl.wire import columns, frames
from polyrl.wire.control import DrainRequest, JoinReply, JoinRequest
from polyrl.wire.dial import Dialer
from polyrl.worker.agent import WorkerAgent, WorkerOptions

SETTINGS = WeightSettings(interfaces=("127.0.0.0/8",), chunk_bytes=4096)
LAYOUT = lay_out([Spec("embed", "float32", (64, 32)), Spec("head", "float32", (32, 64))], architecture="test")


def fill(version: int):
    def write(out: memoryview) -> None:
        out[:] = np.random.default_rng(version).integers(0, 256, LAYOUT.num_bytes, np.uint8).tobytes()

    return write


class Trainer:
    """A client and its weights."""

    def __init__(self, fleet: Fleet) -> None:
        assert fleet.opened is not None
        self.fleet = fleet
        self.server = WeightServer(SETTINGS, bytes.fromhex(fleet.opened.weights_key))
        self.server.start()

    async def publish(self, version: int, *, seed: int | None = None, replaces: Sequence[str] = ()) -> str:
        offer = await asyncio.to_thread(self.server.publish, version, LAYOUT, fill(version if seed is None else seed))
        await self.fleet.publish(version, offer.digest, offer.addresses, replaces=replaces)
        return offer.digest


@asynccontextmanager
async def trainer(live: Live, config: SchedulerConfig = CONFIG) -> AsyncIterator[Trainer]:
    def prompt_of(domain: int, prompt: int, epoch: int) -> Prompt:
        return Prompt([1, 2, 3])

    async with connect(live.url, live.token("admin"), config, prompts=prompt_of, has_weights=True) as fleet:
        one = Trainer(fleet)
        try:
            yield one
        finally:
            one.server.close()


@asynccontextmanager
async def worker(
    live: Live, name: str, peers: list[WeightPeer], kind: type[WeightPeer] = WeightPeer
) -> AsyncIterator[None]:
    def peer_of(key: bytes) -> WeightPeer:
        peers.append(kind(SETTINGS, key))
        return peers[-1]

    dialer = Dialer(live.url, live.token("worker"))
    agent = WorkerAgent(EmulatedEngine(ENGINE), dialer, WorkerOptions(name), peer_of=peer_of)
    life = asyncio.create_task(agent.run())
    try:
        yield
    finally:
        agent.drain("the test is over")
        assert (await life).ok


def test_workers_fetch_every_version_and_each_segment_carries_its_digest(tmp_path: Path):
    async def scenario() -> None:
        peers: list[WeightPeer] = []
        async with manager(tmp_path) as live, trainer(live) as ours:
            digests: dict[int, str] = {}
            async with worker(live, "a", peers), worker(live, "b", peers):
                for step in range(3):
                    digests[step] = await ours.publish(step)
                    async for group in ours.fleet.round(step):
                        for sample in group.samples:
                            assert [one.digest for one in sample.segments] == [digests[step]] * len(sample.segments)
                        await ours.fleet.take(group)
                    await ours.fleet.step_done(step)
                await until(lambda: all(peer.held == (2, digests[2]) for peer in peers), "both hold the last one")

    run(scenario())


def test_a_worker_that_started_with_weights_of_its_own_does_not_write_before_it_has_fetched_ours(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, trainer(live) as ours, Peer(live, version=0) as peer:
            await peer.enter()
            digest = await ours.publish(0)
            await ours.fleet._state(lambda seq: frames.RequestRound(seq, 0))
            pull = await peer.hear(frames.PullOrder)
            assert (pull.version, pull.digest) == (0, digest)
            assert pull.addresses == ours.server.addresses
            assert peer.orders == []
            await peer.say(frames.Installed(0, digest))
            await peer.until_ordered()

    run(scenario())


@pytest.mark.parametrize("digest", ["", "ab" * 32])
def test_a_worker_that_installed_something_else_is_cut_off(tmp_path: Path, digest: str):
    async def scenario() -> None:
        async with manager(tmp_path) as live, trainer(live) as ours, Peer(live, version=None) as peer:
            await peer.enter()
            await ours.publish(0)
            await peer.hear(frames.PullOrder)
            await peer.say(frames.Installed(0, digest))
            assert f"version 0 with {digest or 'no digest'}; expected " in (await peer.fate()).why
            assert live.refused["digest"] == 1

    run(scenario())


def test_a_version_without_a_digest_is_refused_in_a_run_with_weights(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, trainer(live) as ours:
            await ours.fleet.publish(0)
            with pytest.raises(UserError, match="a digest is expected"):
                await ours.fleet.settled()

    run(scenario())


def test_a_group_of_a_version_that_the_trainer_did_not_publish_is_rejected(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, trainer(live) as ours, worker(live, "a", []):
            await ours.publish(0)
            known = ours.fleet.digests.pop(0)
            groups = []
            async for group in ours.fleet.round(0):
                groups.append(group)
                await ours.fleet.take(group)
            assert groups == []
            lobby = live.service.lobby
            dropped = lobby.need_run().desk.ledger.prompts_dropped
            assert sum(dropped.values()) >= CONFIG.domains[0].prompts_per_step
            ours.fleet.digests[0] = known

    run(scenario())


def test_offers_survive_a_restart_of_the_manager(tmp_path: Path):
    async def scenario() -> None:
        peers: list[WeightPeer] = []
        async with manager(tmp_path) as live, trainer(live) as ours:
            digest = await ours.publish(0)
            await ours.fleet.settled()
        async with manager(tmp_path) as live:
            assert live.service.lobby.need_run().payload.digest_of(0) == digest
            async with trainer(live) as ours:  # another process: it serves from elsewhere, and says so
                await ours.publish(0)
                async with worker(live, "late", peers):
                    await until(lambda: bool(peers) and peers[0].held == (0, digest), "the late one has it")

    run(scenario())


def test_a_version_that_was_published_never_becomes_another(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, trainer(live) as ours:
            digest = await ours.publish(0)
            await ours.fleet.publish(0, "ab" * 32, ours.server.addresses)
            with pytest.raises(UserError, match=f"version 0 is {digest}"):
                await ours.fleet.settled()
            assert live.service.lobby.need_run().payload.digest_of(0) == digest

    run(scenario())


# A trainer that trained its steps again, and not to the same bits


async def write_some(peer: Peer, ours: Trainer, digest: str) -> None:
    """Of two samples: two tokens of the first, and all of the second."""
    await peer.hear(frames.PullOrder)
    await peer.say(frames.Installed(0, digest))
    await ours.fleet.request(0)
    while len(peer.orders) < 2:
        await peer.hear(frames.Orders)
    first, second = peer.orders[:2]
    await peer.say(tokens(first.lease, ids=(7, 8)))
    await peer.say(tokens(second.lease, ids=(7, 8, 9), ended=(frames.Ended(second.lease, 3, "stop"),)))


async def digests_by_sample(ours: Trainer) -> dict[int, list[tuple[int, str, str]]]:
    """Where each segment of each sample begins, who wrote it, and its digest."""
    found: dict[int, list[tuple[int, str, str]]] = {}
    async for group in ours.fleet.round(0):
        await ours.fleet.take(group)
        for sample in group.samples:
            found[sample.id] = [(one.from_token, one.worker, one.digest) for one in sample.segments]
    return found


def test_what_a_replaced_version_wrote_keeps_its_digest_and_late_news_of_it_harms_nobody(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, Peer(live, version=None) as peer:
            await peer.enter()
            async with trainer(live) as ours:
                before = await ours.publish(0)
                await write_some(peer, ours, before)
                payload = live.service.lobby.need_run().payload
                await until(lambda: sum(len(one.cells) for one in payload.tokens.values()) == 5 * 8, "all has come")
            first, second = peer.orders[:2]
            async with trainer(live) as ours:
                ours.fleet.digests[0] = (before,)
                after = await ours.publish(0, seed=100, replaces=(before,))
                pull = await peer.hear(frames.PullOrder)
                assert (pull.version, pull.digest) == (0, after) and before != after
                await peer.say(tokens(first.lease, offset=2))  # it was on its way
                await peer.say(frames.Installed(0, before))
                await until(lambda: live.refused.get("late_lease", 0) == 1, "they are late")
                assert live.service.lobby.workers[WorkerName("mallory")].greeted
                peer.orders.clear()
                await peer.say(frames.Installed(0, after))
                while all(one.sample != first.sample for one in peer.orders):
                    await peer.hear(frames.Orders)
                again = next(one for one in peer.orders if one.sample == first.sample)
                assert again.so_far == columns.pack_tokens([7, 8])
                await peer.say(tokens(again.lease, offset=2, ended=(frames.Ended(again.lease, 3, "stop"),)))
                await peer.say(frames.Goodbye("it has done enough"))
                async with worker(live, "honest", []):
                    found = await digests_by_sample(ours)
                assert found[first.sample] == [(0, "mallory", before), (2, "mallory", after)]
                assert found[second.sample] == [(0, "mallory", before)]
                others = [one for sample in found.keys() - {first.sample, second.sample} for one in found[sample]]
                assert {(name, digest) for _, name, digest in others} == {("honest", after)}

    run(scenario())


def test_a_replaced_version_is_remembered_by_the_next_manager(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, Peer(live, version=None) as peer, trainer(live) as ours:
            await peer.enter()
            before = await ours.publish(0)
            await write_some(peer, ours, before)
            payload = live.service.lobby.need_run().payload
            await until(lambda: sum(len(one.cells) for one in payload.tokens.values()) == 5 * 8, "all has come")
            first, second = peer.orders[:2]
        async with manager(tmp_path) as live, trainer(live) as ours:
            after = await ours.publish(0, seed=100, replaces=("cd" * 32, before))
            await ours.fleet.settled()
        async with manager(tmp_path) as live, trainer(live) as ours, worker(live, "honest", []):
            assert live.service.lobby.need_run().payload.digest_of(0) == after
            ours.fleet.digests[0] = (before, after)
            await ours.publish(0, seed=100, replaces=(before, after))
            found = await digests_by_sample(ours)
            assert found[first.sample] == [(0, "mallory", before), (2, "honest", after)]
            assert found[second.sample] == [(0, "mallory", before)]

    run(scenario())


def test_a_worker_that_holds_what_was_replaced_fetches_it_anew(tmp_path: Path):
    async def scenario() -> None:
        peers: list[WeightPeer] = []
        async with manager(tmp_path) as live, worker(live, "a", peers), worker(live, "b", peers):
            async with trainer(live) as ours:
                before = await ours.publish(0)
                await until(lambda: len(peers) == 2 and all(one.held == (0, before) for one in peers), "both have it")
            async with trainer(live) as ours:
                after = await ours.publish(0, seed=100, replaces=(before,))
                await until(lambda: all(one.held == (0, after) for one in peers), "both have the other one")
                found = await digests_by_sample(ours)
                assert {digest for segments in found.values() for _, _, digest in segments} == {after}
            assert live.refused == {}

    run(scenario())


def test_only_what_is_known_of_a_version_can_be_replaced(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, trainer(live) as ours:
            digest = await ours.publish(0)
            await ours.publish(0, seed=100, replaces=("ab" * 32,))
            with pytest.raises(UserError, match=f"version 0 is {digest}"):
                await ours.fleet.settled()
            assert live.service.lobby.need_run().payload.digest_of(0) == digest

    run(scenario())


def test_a_run_with_weights_is_not_opened_again_without(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live:
            async with trainer(live) as ours:
                await ours.publish(0)
            with pytest.raises(UserError, match="the run is open with weights"):
                async with connect(live.url, live.token("admin"), CONFIG, prompts=lambda *_: Prompt([1])):
                    pass

    run(scenario())


@pytest.mark.parametrize("says", [frames.Installed(5), frames.Hello(5, b"")], ids=["installed", "hello"])
def test_a_version_that_was_skipped_is_nobodys(tmp_path: Path, says: frames.Installed | frames.Hello):
    """Its number is below the newest one, and nothing is known of it."""

    async def scenario() -> None:
        async with manager(tmp_path) as live, trainer(live) as ours, Peer(live, version=None) as peer:
            await ours.publish(9)
            await ours.fleet.settled()
            if isinstance(says, frames.Installed):
                await peer.enter()
                await peer.say(says)
                why = (await peer.fate()).why
                assert "version 5 with no digest; expected a version that was published by its number" in why
                return
            await peer.join()
            await peer.dial()
            await peer.say(says)
            await peer.hear(frames.PullOrder)
            worker = live.service.lobby.need_run().seat_of(live.service.lobby.workers[WorkerName("mallory")])
            assert worker is not None and worker.version == -1

    run(scenario())


def test_a_version_that_cannot_be_held_in_memory_fails_and_is_tried_again(tmp_path: Path):
    class Small(WeightPeer):
        num_tries = 0

        def pull(self, *args: Any, **kwargs: Any) -> HostCopy:
            self.num_tries += 1
            if self.num_tries == 1:
                raise UserError("no memory for 5 bytes of weights: 4 are left")
            return super().pull(*args, **kwargs)

    async def scenario() -> None:
        peers: list[WeightPeer] = []
        async with manager(tmp_path) as live, trainer(live) as ours, worker(live, "a", peers, Small):
            digest = await ours.publish(0)
            await until(lambda: bool(peers) and peers[0].held == (0, digest), "it has it at last")

    run(scenario())


@pytest.mark.parametrize("addresses", [(), ("127.0.0.1:1",), (f"{'a' * 64}:1",)], ids=["none", "nobody", "no name"])
def test_a_relay_that_cannot_be_reached_costs_a_retry(tmp_path: Path, addresses: tuple[str, ...]):
    async def scenario() -> None:
        peers: list[WeightPeer] = []
        config = structs.replace(
            CONFIG,
            weight_delivery=WeightDeliveryConfig(trainer_uploads=1, retry_s=0.1),
            fleet_rules=FleetRules(heartbeat_timeout_s=30.0),
        )
        async with (
            manager(tmp_path) as live,
            trainer(live, config) as ours,
            Peer(live, "relay", version=None) as relay,
        ):
            relay.facts = structs.replace(relay.facts, relays=True)
            await relay.join()
            await relay.dial()
            await relay.say(frames.Hello(-1, b"", weight_addresses=addresses))
            digest = await ours.publish(0)
            assert (await relay.hear(frames.PullOrder)).addresses == ours.server.addresses
            async with worker(live, "late", peers):
                await until(lambda: bool(peers), "it has joined")
                await asyncio.sleep(0.3)
                await relay.say(frames.Installed(0, digest))
                await until(lambda: peers[0].held == (0, digest), "it comes from somewhere else")

    run(scenario())


def test_a_worker_whose_source_is_gone_does_not_wait_for_it(tmp_path: Path):
    """It is told of another source, for the same version, while it still waits for an answer of the first."""

    async def scenario() -> None:
        peers: list[WeightPeer] = []
        config = structs.replace(
            CONFIG,
            weight_delivery=WeightDeliveryConfig(trainer_uploads=1),
            fleet_rules=FleetRules(heartbeat_timeout_s=30.0),
        )
        silent = socket.create_server(("127.0.0.1", 0))
        async with (
            manager(tmp_path) as live,
            trainer(live, config) as ours,
            Peer(live, "relay", version=None) as relay,
        ):
            relay.facts = structs.replace(relay.facts, relays=True)
            await relay.join()
            await relay.dial()
            await relay.say(frames.Hello(-1, b"", weight_addresses=(f"127.0.0.1:{silent.getsockname()[1]}",)))
            digest = await ours.publish(0)
            await relay.hear(frames.PullOrder)
            async with worker(live, "late", peers):
                heard, _ = await asyncio.to_thread(silent.accept)
                await relay.say(frames.Goodbye("it goes"))
                await until(lambda: peers[0].held == (0, digest), "it comes from the trainer", SETTINGS.stall_s / 2)
                heard.close()
        silent.close()

    run(scenario())


# The trainer's own worker


def test_only_who_has_the_admin_token_may_join_as_the_trainers_own_worker(tmp_path: Path):
    async def scenario() -> None:
        facts = JoinRequest(name="local", protocol=frames.PROTOCOL, engine="script", slots=4, local=True)
        async with manager(tmp_path) as live:
            async with Dialer(live.url, live.token("worker")) as dialer:
                with pytest.raises(UserError, match="admin token"):
                    await dialer.post("/v1/join", facts, JoinReply)
            async with Dialer(live.url, live.token("admin")) as dialer:
                assert (await dialer.post("/v1/join", facts, JoinReply)).worker == "local"

    run(scenario())


def test_a_local_worker_generates_then_turns_to_training_when_nothing_is_left(tmp_path: Path):
    async def scenario() -> None:
        turns: list[str] = []

        async def set_duty(duty: frames.Duty) -> None:
            turns.append(duty)

        async with manager(tmp_path) as live, trainer(live) as ours:
            dialer = Dialer(live.url, live.token("admin"))
            options = WorkerOptions("local", is_local=True, relays=False)
            engine = EmulatedEngine(ENGINE)
            agent = WorkerAgent(engine, dialer, options, set_duty=set_duty)
            life = asyncio.create_task(agent.run())
            await until(lambda: bool(turns), "it has joined")
            for step in range(2):
                await engine.install(Weights(Version(step), in_place=True))
                await ours.publish(step)
                groups = [group async for group in ours.fleet.round(step)]
                await until(lambda step=step: turns[-2:] == ["generating", "training"], "it trains")
                await ours.fleet.take(*groups)
                await ours.fleet.micro_batch_done(step)
                await ours.fleet.step_done(step)
            await until(lambda: turns[-1] == "generating", "it generates again when the step is trained")
            with pytest.raises(UserError, match="local is the trainer's own: without it the run ends"):
                await dialer.post("/v1/workers/local/drain", DrainRequest(), dict)
            agent.drain("the test is over")
            assert (await life).ok

    run(scenario())


def test_a_local_worker_whose_connection_broke_is_told_its_turn_again(tmp_path: Path):
    async def scenario() -> None:
        turns: list[str] = []

        async def set_duty(duty: frames.Duty) -> None:
            turns.append(duty)
            if len(turns) == 1:
                session = live.service.lobby.workers[WorkerName("local")]
                before = session.link
                assert before is not None
                before.close("a break")
                await until(lambda: session.greeted and session.link is not before, "it is back")

        async with manager(tmp_path) as live, trainer(live) as ours:
            dialer = Dialer(live.url, live.token("admin"))
            engine = EmulatedEngine(ENGINE)
            options = WorkerOptions("local", is_local=True, relays=False)
            agent = WorkerAgent(engine, dialer, options, set_duty=set_duty)
            life = asyncio.create_task(agent.run())
            await until(lambda: len(turns) > 1, "it was told twice")
            await engine.install(Weights(Version(0), in_place=True))
            await ours.publish(0)
            async for group in ours.fleet.round(0):
                await ours.fleet.take(group)
            assert turns[:2] == ["generating", "generating"]
            agent.drain("the test is over")
            assert (await life).ok

    run(scenario())
