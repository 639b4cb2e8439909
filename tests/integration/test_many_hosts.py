"""One host token, many names: hosts that fail, leave or hang with all that they are given cost no episode, no round."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import aiohttp
import msgspec
import pytest
from tests.integration.live import MODEL, Live, honest_worker, manager, play_round, run, trainer, until
from tests.integration.test_episodes import CONFIG, EchoEnvironment, check, host, prompt_of
from tests.integration.test_hostile_hosts import LyingHost, liar

from polyrl.errors import PolyrlError
from polyrl.scheduling.core.parameters import EnvironmentRules
from polyrl.scheduling.invariants import check as check_laws
from polyrl.wire import frames
from polyrl.wire.host_frames import EndEpisode, HostReport

NUM_NAMES = 8
OVER = (aiohttp.ClientError, ConnectionError, PolyrlError, TimeoutError)
"""The connection has ended, or a join was one too many."""
Act = Callable[[LyingHost], Awaitable[None]]


@asynccontextmanager
async def under_many_names(live: Live, act: Act, num_names: int = NUM_NAMES) -> AsyncIterator[None]:
    """Each process joins again, under another name, as soon as it is sent away, or has done what it wanted."""

    async def lives(number: int) -> None:
        for life in count():
            with contextlib.suppress(*OVER):
                async with liar(live, 64, f"m{number}-{life}") as peer:
                    await act(peer)
            await asyncio.sleep(0.05)

    tasks = [asyncio.create_task(lives(number)) for number in range(num_names)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def fails(peer: LyingHost) -> None:
    """Fail every episode at once, until it is sent away."""
    num_failed = 0
    while peer.release is None:
        for order in peer.played[num_failed:]:
            num_failed += 1
            await peer.say(EndEpisode(order.sample, order.attempt, "failed", 0, why="no"))
        await peer.say(HostReport(0))
        await asyncio.sleep(0.02)


async def leaves(peer: LyingHost) -> None:
    """Leave with what it has."""
    while not peer.played and peer.release is None:
        await peer.say(HostReport(0))
        await asyncio.sleep(0.02)
    await peer.say(frames.Goodbye("gone"))
    await asyncio.sleep(0.05)


async def hangs(peer: LyingHost) -> None:
    """Say that it is there, and nothing of what it has."""
    while peer.release is None:
        await peer.say(HostReport(0))
        await asyncio.sleep(0.2)


@pytest.mark.parametrize("act", [fails, leaves])
def test_names_that_fail_or_leave_with_all_that_they_are_given_cost_no_episode(tmp_path: Path, act: Act):
    """Three failures at three names of one process, or ten losses, and an episode left its group: no round was left."""

    async def scenario() -> None:
        async with (
            manager(tmp_path) as live,
            trainer(live, CONFIG, prompts=prompt_of, answers=MODEL) as fleet,
            honest_worker(live),
            under_many_names(live, act),
            host(live, EchoEnvironment()),
        ):
            await until(lambda: len(live.service.lobby.hosts) > NUM_NAMES // 2, "some have joined")
            for step in range(3):
                await fleet.publish(step)
                check(await play_round(fleet, step))
            desk = live.service.lobby.need_run().desk
            assert desk.ledger.prompts_dropped == {} and desk.ledger.samples_discarded == {}
            check_laws(live.service.lobby.need_run().scheduler, live.service.lobby.now())

    run(scenario(), 60.0)


def test_names_that_hang_hold_a_round_up_once_and_not_one_after_the_other(tmp_path: Path):
    timeout_s = 2.0
    rules = EnvironmentRules(turn_timeout_s=timeout_s, least_turn_timeout_s=timeout_s, host_timeout_s=2.0)

    async def scenario() -> None:
        async with (
            manager(tmp_path) as live,
            trainer(
                live, msgspec.structs.replace(CONFIG, environments=rules), prompts=prompt_of, answers=MODEL
            ) as fleet,
            honest_worker(live),
            host(live, EchoEnvironment()),
        ):
            await fleet.publish(0)
            check(await play_round(fleet, 0))
            async with under_many_names(live, hangs):
                await until(lambda: len(live.service.lobby.hosts) > NUM_NAMES // 2, "some have joined")
                await fleet.publish(1)
                began = time.monotonic()
                check(await play_round(fleet, 1))
                took_s = time.monotonic() - began
            assert took_s < 2.5 * timeout_s
            assert live.service.lobby.need_run().desk.ledger.prompts_dropped == {}

    run(scenario(), 60.0)
