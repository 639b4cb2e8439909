"""Stalls that are put into a live fleet: the doctor names each of them within its deadline, and says what to do.

docs/reference/stalls.md is their list; `test_the_page_lists_every_stall` holds the two together.
"""

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest
from msgspec import structs
from tests.integration import test_episodes as episodes
from tests.integration.live import (
    CONFIG,
    Live,
    Peer,
    honest_worker,
    manager,
    play_round,
    run,
    trainer,
    until,
)
from tests.integration.test_delivery import scripted
from tests.integration.test_doctor import SLOW, a_round, ask
from tests.integration.test_misfits import AT_ONCE
from tests.integration.test_remote_rewards import scoring, terms
from tests.integration.test_versions import trainer as weights_trainer
from tests.integration.test_worker_life import MortalEngine

from polyrl.client import Fleet, Sample
from polyrl.hosts.episode import Episode
from polyrl.rewards.reward import RewardFailed
from polyrl.run.diagnosis import diagnose
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.parameters import FleetRules, SchedulerConfig
from polyrl.wire import frames
from polyrl.wire.credentials import bearer
from polyrl.wire.dial import Dialer
from polyrl.worker.agent import WorkerAgent, WorkerOptions

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "stalls.md"
PATIENT = structs.replace(CONFIG, fleet_rules=FleetRules(heartbeat_timeout_s=30.0))
"""Whoever is silent is away for a while before it is given up."""
Injected = Callable[[Live], AbstractAsyncContextManager[object]]


class Stall(NamedTuple):
    inject: Injected
    says: str
    """A pattern for the finding that names it."""
    deadline_s: float
    """From when the stall is there."""


STALLS: dict[str, Stall] = {}


def stall(name: str, says: str, deadline_s: float = 5.0) -> Callable[[Callable[[Live], AsyncIterator[None]]], Injected]:
    def add(inject: Callable[[Live], AsyncIterator[None]]) -> Injected:
        STALLS[name] = Stall(asynccontextmanager(inject), says, deadline_s)
        return STALLS[name].inject

    return add


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", [
    "no trainer", "no first version", "trainer away", pytest.param("trainer stopped", marks=pytest.mark.chaos),
    "paused by request", "prompts missing", "trainer takes nothing", "no worker", "too few places", "long tail",
    "worker hangs", "worker stopped", "worker cut off", "engine down", "slow drain", "slow link",
    "weights cannot be pulled", "wrong model", "wrong token", "joins in a loop", "slow reward", "reward fails",
    "no reward worker", "no host", "slow environment", "host stopped", "too few places at hosts",
])  # fmt: skip
def test_the_doctor_names_a_stall_within_its_deadline_and_says_what_to_do(name: str, tmp_path: Path):
    async def scenario() -> None:
        injected = STALLS[name]
        async with manager(tmp_path) as live, injected.inject(live):
            began, found = time.monotonic(), None
            while found is None:
                earlier = ask(live)
                await asyncio.sleep(0.2)
                findings = diagnose(earlier, ask(live), "runs/x").findings
                found = next((one for one in findings if re.search(injected.says, one.what)), None)
                if found is None:
                    assert time.monotonic() - began < injected.deadline_s, [one.what for one in findings]
            assert found.do, f"{found.what}: nothing is said about what to do"
            assert found.then

    run(scenario(), 100.0)


def test_every_stall_is_tried_and_the_page_lists_them_with_their_deadlines():
    assert len(STALLS) >= 20
    rows = re.findall(r"^\| ([a-z ]+) \| .* \| (\d+) s \|$", PAGE.read_text(encoding="utf-8"), re.M)
    assert {name: float(deadline) for name, deadline in rows} == {name: one.deadline_s for name, one in STALLS.items()}


# The trainer


@stall("no trainer", "no trainer has opened a run")
async def _no_trainer(live: Live) -> AsyncIterator[None]:
    async with honest_worker(live):
        yield


@stall("no first version", "has not published a first version")
async def _no_version(live: Live) -> AsyncIterator[None]:
    async with trainer(live), honest_worker(live):
        yield


@stall("trainer away", "the trainer is away, for")
async def _trainer_away(live: Live) -> AsyncIterator[None]:
    async with trainer(live) as fleet, a_round(fleet):
        await until(lambda: bool(ask(live).rounds), "it is open")
    yield


_STOPPED_TRAINER = """
import asyncio, sys
from tests.integration.live import CONFIG, prompt_of
from polyrl.client import connect
async def main():
    async with connect(sys.argv[1], sys.argv[2], CONFIG, prompts=prompt_of) as fleet:
        await fleet.publish(0)
        async for group in fleet.round(0):
            await fleet.take(group)
        await asyncio.sleep(3600.0)  # it trains
asyncio.run(main())
"""


@asynccontextmanager
async def process(*words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    started = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=asyncio.subprocess.DEVNULL)
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            started.kill()
        await started.wait()


@stall("trainer stopped", r"the trainer trains on groups of step 0, for [2-9]\d", 40.0)
async def _trainer_stopped(live: Live) -> AsyncIterator[None]:
    async with process("-c", _STOPPED_TRAINER, live.url, live.token("admin")) as started, honest_worker(live):
        await until(lambda: ask(live).trainer_does == "trains", "it trains", 60.0)
        os.kill(started.pid, signal.SIGSTOP)
        yield


@stall("paused by request", "the run is paused")
async def _paused(live: Live) -> AsyncIterator[None]:
    async with trainer(live) as fleet, honest_worker(live, SLOW), a_round(fleet):
        live.service.post(lambda lobby: lobby.tell(e.PlacingPaused()))
        yield


@stall("prompts missing", r"the trainer has not sent \d+ prompt")
async def _no_prompts(live: Live) -> AsyncIterator[None]:
    async with Dialer(live.url, live.token("admin")) as dialer, honest_worker(live):
        ours = await scripted(live, dialer)
        await ours.begin()  # and it hears nothing, so it sends none
        yield


@stall("trainer takes nothing", r"all 2 groups of step 0 are with the trainer, which has not said that it trains")
async def _not_taken(live: Live) -> AsyncIterator[None]:
    async with trainer(live) as fleet, honest_worker(live):
        await fleet.publish(0)
        await fleet.request(0)
        await until(lambda: ask(live).queues.get("groups_delivered") == 2, "all are delivered")
        yield


# Workers


@stall("no worker", "samples wait, and there is no worker")
async def _no_worker(live: Live) -> AsyncIterator[None]:
    async with trainer(live) as fleet, a_round(fleet):
        yield


@stall("too few places", "more wait for a place there")
async def _full(live: Live) -> AsyncIterator[None]:
    async with trainer(live) as fleet, honest_worker(live, SLOW), a_round(fleet):
        yield


@stall("long tail", "the last [0-9]+ samples? runs?, and none waits; the longest has")
async def _tail(live: Live) -> AsyncIterator[None]:
    slow = structs.replace(SLOW, slots=8)
    async with trainer(live) as fleet, honest_worker(live, slow), a_round(fleet):
        yield


@stall("worker hangs", "honest has 8 samples and wrote nothing while it was looked at")
async def _hangs(live: Live) -> AsyncIterator[None]:
    hangs = structs.replace(SLOW, slots=8, tokens_per_s=0.001)
    async with trainer(live) as fleet, honest_worker(live, hangs), a_round(fleet):
        await until(lambda: any(one.running == 8 for one in ask(live).workers), "it has them")
        yield


@stall("worker stopped", "^(w0 is away: nothing was heard of it for|w0 has .* wrote nothing while it was looked at)")
async def _worker_stopped(live: Live) -> AsyncIterator[None]:
    token = str(live.service.run_dir / "worker.token")
    words = (
        "-m",
        "polyrl",
        "worker",
        "--join",
        live.url,
        "--token-file",
        token,
        "--engine",
        "emulated",
        "--name",
        "w0",
    )
    async with trainer(live, PATIENT) as fleet, a_round(fleet), process(*words, "tokens_per_s=2") as started:
        await until(lambda: bool(ask(live).tokens_received), "it writes", 60.0)
        os.kill(started.pid, signal.SIGSTOP)
        yield


@stall("worker cut off", "^honest is away: nothing was heard of it for")
async def _cut_off(live: Live) -> AsyncIterator[None]:
    async with trainer(live, PATIENT) as fleet, a_round(fleet), Peer(live, "honest") as peer:
        await peer.enter()
        await until(lambda: any(one.running for one in ask(live).workers), "it has some")
        await peer.socket.close()
        yield


@asynccontextmanager
async def mortal_worker(live: Live) -> AsyncIterator[MortalEngine]:
    engine = MortalEngine(SLOW)
    agent = WorkerAgent(engine, Dialer(live.url, live.token("worker")), WorkerOptions(name="mortal"))
    life = asyncio.create_task(agent.run())
    try:
        yield engine
    finally:
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)


@stall("engine down", "mortal's engine is down")
async def _engine_down(live: Live) -> AsyncIterator[None]:
    async with trainer(live) as fleet, a_round(fleet), mortal_worker(live) as engine:
        await until(lambda: engine.stats().num_running > 0, "it writes")
        await engine.die()
        yield


@stall("slow drain", r"mallory hands its \d+ samples? over")
async def _slow_drain(live: Live) -> AsyncIterator[None]:
    async with trainer(live, PATIENT) as fleet, a_round(fleet), Peer(live) as peer:
        await peer.enter()
        await peer.until_ordered()
        async with (
            aiohttp.ClientSession(headers=live.headers("admin")) as http,
            http.post(f"{live.url}/v1/workers/mallory/drain") as answer,
        ):
            assert answer.status == 200
        yield


@stall("slow link", "mallory pulls version 0 from the trainer, for")
async def _slow_link(live: Live) -> AsyncIterator[None]:
    async with weights_trainer(live) as ours, Peer(live, version=None) as peer:
        await peer.enter()
        await ours.publish(0)
        await peer.hear(frames.PullOrder)  # and nothing comes over it
        yield


@stall("weights cannot be pulled", "mallory could not pull version 0")
async def _no_pull(live: Live) -> AsyncIterator[None]:
    async with weights_trainer(live) as ours, Peer(live, version=None) as peer:
        await peer.enter()
        await ours.publish(0)
        await peer.hear(frames.PullOrder)
        await peer.say(frames.InstallFailed(0, "no route to host"))
        yield


@stall("wrong model", "mallory is gone since .*: no version could be installed in 8 tries")
async def _wrong_model(live: Live) -> AsyncIterator[None]:
    async with weights_trainer(live, AT_ONCE) as ours, Peer(live, version=None) as peer:
        await peer.enter()
        await ours.publish(0)
        for _ in range(8):
            await peer.hear(frames.PullOrder)
            await peer.say(frames.InstallFailed(0, "version 0 is not of this model"))
        await peer.fate()
        yield


@stall("wrong token", "refused since the manager started: .* without a token that this run knows")
async def _wrong_token(live: Live) -> AsyncIterator[None]:
    async with (
        aiohttp.ClientSession(headers=bearer("that of another run")) as http,
        http.post(f"{live.url}/v1/join", json={}) as answer,
    ):
        assert answer.status == 401
    yield


@stall("joins in a loop", "refused since the manager started: .* joins, too many in a moment from one address", 20.0)
async def _join_loop(live: Live) -> AsyncIterator[None]:
    async with aiohttp.ClientSession(headers=live.headers("worker")) as http:
        for _ in range(2_000):
            async with http.post(f"{live.url}/v1/join", json={}) as answer:
                if answer.status == 429:
                    break
    yield


# Rewards


@stall("slow reward", "answers are being scored, 0 wait for it")
async def _slow_reward(live: Live) -> AsyncIterator[None]:
    async def reward(_: Sample) -> float:
        await asyncio.sleep(3600.0)
        return 1.0

    async with trainer(live, reward=reward) as fleet, honest_worker(live), a_round(fleet):
        yield


@stall("reward fails", "answers? had no reward so far", 10.0)
async def _reward_fails(live: Live) -> AsyncIterator[None]:
    async def reward(_: Sample) -> float:
        raise RewardFailed("the service is down")

    async with trainer(live, reward=reward) as fleet, honest_worker(live), a_round(fleet):
        yield


@stall("no reward worker", "answers wait to be scored, and no reward worker can", 10.0)
async def _no_reward_worker(live: Live) -> AsyncIterator[None]:
    async def reward(_: Sample) -> float:
        await asyncio.sleep(3600.0)
        return 1.0

    async with trainer(live, reward=reward) as fleet, honest_worker(live), a_round(fleet):
        assert fleet.opened is not None
        async with scoring(live, terms("remote_mine:length"), session=fleet.opened.session):
            yield


# Hosts


@asynccontextmanager
async def episodes_round(live: Live, config: SchedulerConfig = episodes.CONFIG) -> AsyncIterator[Fleet]:
    async with trainer(live, config, prompts=episodes.prompt_of, answers=episodes.MODEL) as fleet, honest_worker(live):
        await fleet.publish(0)
        playing = asyncio.create_task(play_round(fleet, 0))
        try:
            yield fleet
        finally:
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)


async def _never(_: Episode, __: int) -> None:
    await asyncio.sleep(3600.0)


def slow_environment() -> episodes.EchoEnvironment:
    return episodes.EchoEnvironment(after_call=_never)


@stall("no host", "episodes wait, and no host is there to play them")
async def _no_host(live: Live) -> AsyncIterator[None]:
    async with episodes_round(live):
        yield


@stall("slow environment", r"8 episodes wait for their environment, and workers write in 0$")
async def _slow_environment(live: Live) -> AsyncIterator[None]:
    async with episodes_round(live), episodes.host(live, slow_environment()):
        yield


@stall("host stopped", r"no host is there to play them \(h0 is away\)|and no host is there to play them$", 10.0)
async def _host_stopped(live: Live) -> AsyncIterator[None]:
    async with episodes_round(live):
        async with episodes.host(live, slow_environment()):
            await until(lambda: any(one.playing for one in ask(live).hosts), "it plays")
        yield


@stall("too few places at hosts", "more wait for one of 1 places at hosts")
async def _few_places(live: Live) -> AsyncIterator[None]:
    async with episodes_round(live), episodes.host(live, slow_environment(), slots=1):
        yield
