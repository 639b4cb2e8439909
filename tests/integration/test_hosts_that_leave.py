"""Hosts that leave in the middle of episodes: those that are drained, and those whose environment has worn them out."""

import asyncio
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from tests.integration.live import MODEL, Live, honest_worker, manager, play_round, run, trainer, until
from tests.integration.test_episodes import CONFIG, EchoEnvironment, check, host, prompt_of

from polyrl.client import Fleet, Group
from polyrl.hosts.agent import HostAgent, HostOptions, HostOver
from polyrl.hosts.episode import Episode
from polyrl.ids import HostName
from polyrl.wire.dial import Dialer

WORN_OUT = "environment echo: 3 calls never return, the last one at echo.py:7 (step)"


async def ask_to_drain(live: Live, name: str) -> None:
    request = urllib.request.Request(
        f"{live.url}/v1/hosts/{name}/drain",
        b'{"reason": "maintenance"}',
        {**live.headers("admin"), "Content-Type": "application/json"},
    )
    await asyncio.to_thread(lambda: urllib.request.urlopen(request, timeout=10).read())


@asynccontextmanager
async def playing(
    live: Live, environment: EchoEnvironment
) -> AsyncIterator[tuple[HostAgent, "asyncio.Task[HostOver]"]]:
    """A host h0 with four places; how its life ends can be waited for."""
    agent = HostAgent(environment, Dialer(live.url, live.token("host")), HostOptions("h0", slots=4))
    life = asyncio.create_task(agent.run())
    try:
        await until(lambda: HostName("h0") in live.service.lobby.hosts, "h0 joined")
        yield agent, life
    finally:
        life.cancel()
        await asyncio.wait([life])


@asynccontextmanager
async def fleet_of(tmp_path: Path) -> AsyncIterator[tuple[Live, Fleet]]:
    async with (
        manager(tmp_path) as live,
        trainer(live, CONFIG, prompts=prompt_of, answers=MODEL) as fleet,
        honest_worker(live),
    ):
        await fleet.publish(0)
        yield live, fleet


async def play_step(fleet: Fleet, step: int) -> list[Group]:
    """A step of a trainer that has another round under way."""
    groups: list[Group] = []
    async for group in fleet.round(step):
        groups.append(group)
        await fleet.take(group)
    await fleet.step_done(step)
    return groups


@pytest.mark.parametrize(
    ("how", "why", "is_ok"),
    [
        ("a signal", "its last episode is over", True),
        ("somebody asks the manager", "its last episode is over", True),
        ("its environment has worn it out", WORN_OUT, False),
    ],
)
def test_a_host_that_is_drained_in_the_middle_of_episodes_plays_them_to_their_end_and_no_other(
    how: str, why: str, is_ok: bool, tmp_path: Path
):
    async def scenario() -> None:
        is_drained = asyncio.Event()

        async def wait(episode: Episode, turn: int) -> None:
            if turn == 0:
                await is_drained.wait()

        first, second = EchoEnvironment(wait), EchoEnvironment()
        async with fleet_of(tmp_path) as (live, fleet), playing(live, first) as (agent, life):
            round_ = asyncio.create_task(play_round(fleet, 0))
            await until(lambda: first.num_begun == 4, "all places of h0 are taken, and four episodes wait")
            if how == "a signal":
                agent.drain("SIGTERM")
            elif how == "somebody asks the manager":
                await ask_to_drain(live, "h0")
            else:
                first.worn_out = WORN_OUT
            seats = live.service.lobby.need_run().desk.hosts.seats
            await until(lambda: any(one.draining for one in seats.values()), "the manager knows")
            async with host(live, second, "h1"):
                is_drained.set()
                over = await asyncio.wait_for(life, 20.0)
                check(await round_)
            assert (str(over), over.ok) == (why, is_ok)
            assert (first.num_begun, second.num_begun) == (4, 4)
            ledger = live.service.lobby.need_run().scheduler.ledger
            assert (ledger.episodes_ended, ledger.tokens_discarded) == ({"scored": 8}, {})

    run(scenario(), 60.0)


def test_an_episode_goes_on_with_the_next_version_and_each_of_its_tokens_says_which_one_wrote_it(tmp_path: Path):
    config = msgspec.structs.replace(CONFIG, max_staleness=1)
    is_published = asyncio.Event()
    begun: dict[str, int] = {}

    async def wait(episode: Episode, turn: int) -> None:
        place = begun.setdefault(episode.name, len(begun))
        if turn == 0 and place >= 8:
            await is_published.wait()

    async def scenario() -> None:
        async with (
            manager(tmp_path) as live,
            trainer(live, config, prompts=prompt_of, answers=MODEL) as fleet,
            honest_worker(live),
            host(live, EchoEnvironment(wait)),
        ):
            await fleet.publish(0)
            await fleet.request(0)
            await fleet.request(1)
            check(await play_step(fleet, 0))
            await until(lambda: len(begun) == 16, "all episodes of the next round have begun, with version 0")
            await fleet.publish(1)
            workers = live.service.lobby.need_run().desk.state.fleet
            await until(lambda: [one.version for one in workers.seats.values()] == [1], "the worker has version 1")
            is_published.set()
            groups = await play_step(fleet, 1)
            check(groups)
            for sample in (one for group in groups for one in group.samples):
                first, second, _ = sample.calls
                written = [(one.from_token, one.version) for one in sample.segments]
                assert written == [(0, 0), (second.start, 1)]
                assert first.end == second.start

    run(scenario(), 60.0)
