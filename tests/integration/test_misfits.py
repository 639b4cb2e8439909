"""A worker that can never serve a run: it is told so once, it ends, and whoever runs the run hears of it."""

import asyncio
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec import structs
from tests.builtin.tiny_models import save_tiny
from tests.integration.live import CONFIG, Live, Peer, manager, run, until
from tests.integration.test_versions import LAYOUT, SETTINGS, Trainer, fill, trainer, worker

from polyrl.engines.emulated import EmulatedConfig, EmulatedEngine
from polyrl.ids import WorkerName
from polyrl.run.diagnosis import diagnose
from polyrl.run.workers import tell_who_is_turned_away
from polyrl.scheduling.core.parameters import WeightDeliveryConfig
from polyrl.weights import manifest as manifests
from polyrl.weights.chunks import table_of
from polyrl.weights.peer import WeightPeer
from polyrl.wire import frames
from polyrl.wire.control import Status, TurnedAway
from polyrl.wire.dial import Dialer
from polyrl.worker.agent import WorkerAgent, WorkerOptions

AT_ONCE = structs.replace(CONFIG, weight_delivery=WeightDeliveryConfig(retry_s=0.001, max_retry_s=0.001))


async def status_of(live: Live) -> Status:
    async with Dialer(live.url, live.token("admin")) as dialer:
        return await dialer.get("/v1/status", Status)


async def said_by_trainer(ours: Trainer) -> str:
    lines: list[str] = []
    telling = asyncio.create_task(
        tell_who_is_turned_away(ours.fleet, (), lambda line: lines.append(str(line)), every_s=0.01)
    )
    await until(lambda: bool(lines), "the trainer says it")
    await asyncio.sleep(0.1)
    telling.cancel()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.timeout(300)
def test_a_worker_with_another_model_says_so_in_a_line_and_ends_with_code_2(tmp_path: Path):
    save_tiny("llama", tmp_path / "model")

    async def scenario() -> None:
        async with manager(tmp_path / "run") as live, trainer(live) as ours:
            await ours.publish(0)
            token = str(live.service.run_dir / "worker.token")
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "polyrl", "worker", "--join", live.url, "--token-file", token, "--name", "stray",
                "--engine", "builtin", "--model", str(tmp_path / "model"), "--quiet",
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
            out, errors = await process.communicate()
            assert process.returncode == 2, errors
            assert out == b""
            line = errors.decode()
            assert line.startswith("polyrl: error: worker stray: it cannot serve this run: version 0 is not of this mo")
            assert line.count("\n") == 1, line
            await until(lambda: not live.service.lobby.workers, "it is gone")
            status = await status_of(live)
            assert [one.name for one in status.turned_away] == ["stray"]
            found = diagnose(status, status).findings
            assert any(one.what.startswith("stray is gone since ") and "not of this model" in one.what for one in found)
            assert (await said_by_trainer(ours)).startswith("worker stray is gone: it cannot serve this run: version 0")

    run(scenario(), timeout_s=240.0)


def a_version_of_a_later_polyrl(version: int) -> bytes:
    """A manifest whose digest is right, and which has a field that nobody here knows."""
    known = manifests.encode(manifests.Manifest(version, LAYOUT, table_of(bytes(LAYOUT.num_bytes)), ""))
    return msgspec.json.encode({**json.loads(known), "sparsity": 2})


def test_a_worker_that_cannot_read_this_runs_versions_says_so_and_leaves(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, trainer(live) as ours:
            await asyncio.to_thread(ours.server.publish, 0, LAYOUT, fill(0))
            canonical = a_version_of_a_later_polyrl(0)
            digest = hashlib.blake2b(canonical, digest_size=32).hexdigest()
            ours.server._store.announce(digest, canonical)
            await ours.fleet.publish(0, digest, ours.server.addresses)
            agent = WorkerAgent(
                EmulatedEngine(EmulatedConfig()),
                Dialer(live.url, live.token("worker")),
                WorkerOptions("old"),
                peer_of=lambda key: WeightPeer(SETTINGS, key),
            )
            left = await agent.run()
            assert left.is_misfit and not left.ok
            assert "version 0 is written in a form that PolyRL" in str(left) and "`sparsity`" in str(left)
            assert [one.name for one in (await status_of(live)).turned_away] == ["old"]

    run(scenario())


def test_a_worker_of_an_older_polyrl_that_installs_nothing_is_sent_away_after_a_while(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, trainer(live, AT_ONCE) as ours, Peer(live, version=None) as peer:
            await peer.enter()
            await ours.publish(0)
            for _ in range(8):
                await peer.hear(frames.PullOrder)
                await peer.say(frames.InstallFailed(0, "no source holds \x1b[2Jversion 0"))
            assert "no version could be installed in 8 tries" in (await peer.fate()).why
            (gone,) = (await status_of(live)).turned_away
            assert gone.name == "mallory" and gone.why.endswith("no source holds \\x1b[2Jversion 0")
            assert live.refused["install"] == 1

    run(scenario())


def test_a_worker_that_has_served_the_run_is_never_sent_away_for_failing_to_install(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, trainer(live, AT_ONCE) as ours, Peer(live, version=None) as peer:
            await peer.enter()
            digest = await ours.publish(0)
            await peer.hear(frames.PullOrder)
            await peer.say(frames.Installed(0, digest))
            await ours.publish(1)
            for _ in range(12):
                await peer.hear(frames.PullOrder)
                await peer.say(frames.InstallFailed(1, "the disk is full"))
            await peer.hear(frames.PullOrder)
            assert not live.service.lobby.turned_away

    run(scenario())


def test_workers_that_cannot_reach_a_trainer_that_is_away_are_kept(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live:
            async with trainer(live, AT_ONCE) as ours:
                await ours.publish(0)
            async with Peer(live, version=None) as peer:
                await peer.enter()
                for _ in range(12):
                    await peer.hear(frames.PullOrder)
                    await peer.say(frames.InstallFailed(0, "no source answers"))
                await peer.hear(frames.PullOrder)
                assert "mallory" in live.service.lobby.workers

    run(scenario())


def test_who_joins_again_under_its_name_is_no_longer_spoken_of(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, trainer(live) as ours:
            await ours.publish(0)
            live.service.lobby.turn_away(WorkerName("a"), "of another model")
            async with worker(live, "a", []):
                await until(lambda: "a" in live.service.lobby.workers, "it has joined")
                status = await status_of(live)
                assert not any("is gone since" in one.what for one in diagnose(status, status).findings)

    run(scenario())


def test_no_stranger_fills_the_list_of_those_who_are_gone(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live:
            for number in range(100):
                live.service.lobby.turn_away(WorkerName(f"w{number}"), "x" * 2000)
            away = (await status_of(live)).turned_away
            assert [one.name for one in away] == [f"w{number}" for number in range(84, 100)]
            assert max(len(one.why) for one in away) <= 300
            assert isinstance(away[0], TurnedAway)

    run(scenario())
