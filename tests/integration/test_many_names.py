"""One worker token, many names: workers that fail all that they are given cost no prompt, and slow ones no round.

Against a real manager first, beside one honest worker; then against `polyrl train`, which had ended in its first step.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import NamedTuple

import aiohttp
import msgspec
import pytest
from tests.integration.desks import bare_desk, model, polyrl
from tests.integration.live import CONFIG, ENGINE, Peer, honest_worker, manager, play_round, run, tokens, trainer

from polyrl.cli.main import main
from polyrl.scheduling.core.parameters import DomainData, FleetRules
from polyrl.telemetry.metrics import read_metrics
from polyrl.wire import frames
from polyrl.wire.control import MAX_SLOTS
from polyrl.wire.credentials import bearer, read_token_file
from polyrl.wire.dial import Unreachable

__all__ = ["bare_desk", "model"]  # fixtures
MANY = msgspec.structs.replace(CONFIG, domains=(DomainData(name="d", prompts_per_step=8, num_prompts=500),))
NUM_NAMES = 8
OVER = (aiohttp.ClientError, ConnectionError, TypeError, Unreachable, TimeoutError)
"""The connection has ended, or a join was one too many."""
REASONS: tuple[frames.EndReason, ...] = ("refused", "engine_failed", "handed_over")


class Place(NamedTuple):
    """A manager that is another process."""

    url: str
    run_dir: Path

    def token(self, scope: str) -> str:
        return read_token_file(self.run_dir / f"{scope}.token")

    def headers(self, scope: str) -> dict[str, str]:
        return bearer(self.token(scope))


Act = Callable[[Peer], Awaitable[None]]


@asynccontextmanager
async def under_many_names(
    live: object, act: Act, *, version: int | None = 0, num_names: int = NUM_NAMES
) -> AsyncIterator[None]:
    """Each process joins again, under another name, as soon as it is sent away."""

    async def lives(number: int) -> None:
        for life in count():
            async with Peer(live, f"m{number}-{life}", slots=MAX_SLOTS, version=version) as peer:  # type: ignore[arg-type]
                with contextlib.suppress(*OVER):
                    await peer.enter()
                    await asyncio.gather(act(peer), beat(peer))
                await asyncio.sleep(0.05)

    tasks = [asyncio.create_task(lives(number)) for number in range(num_names)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def beat(peer: Peer) -> None:
    while True:
        await peer.say(frames.Report(0, 0, 0.0, 0, 0.0))
        await asyncio.sleep(0.3)


def failing(reason: frames.EndReason) -> Act:
    """Has every version at once, and fails every order."""

    async def act(peer: Peer) -> None:
        while True:
            frame = frames.decode_to_worker(await peer.socket.receive_bytes())
            if isinstance(frame, frames.PullOrder):
                await peer.say(frames.Installed(frame.version, frame.digest))
            elif isinstance(frame, frames.Orders):
                ends = tuple(frames.Ended(one.lease, len(one.so_far) // 4, reason) for one in frame.orders)
                await peer.say(frames.NewTokens(1, b"", b"", b"", b"", b"", ends))

    return act


@pytest.mark.parametrize("reason", REASONS)
def test_names_that_fail_all_that_they_are_given_cost_no_prompt_and_no_sample(tmp_path: Path, reason: frames.EndReason):
    """Two of them were believed, and a group was dropped: 15 of 16 prompts of a round."""

    async def scenario() -> None:
        async with manager(tmp_path) as live, honest_worker(live), trainer(live, MANY) as fleet:
            await fleet.publish(0)
            async with under_many_names(live, failing(reason)):
                await asyncio.sleep(0.2)
                groups = await play_round(fleet, 0)
            assert [len(group.samples) for group in groups] == [4] * 8
            ledger = live.service.lobby.need_run().scheduler.ledger
            assert ledger.prompts_dropped == {} and ledger.samples_discarded == {}

    run(scenario(), timeout_s=60.0)


def forging(cap: int) -> Act:
    """Answers every order at once, with log-probabilities that the run's weights do not give."""

    async def act(peer: Peer) -> None:
        version = -1
        while True:
            frame = frames.decode_to_worker(await peer.socket.receive_bytes())
            if isinstance(frame, frames.PullOrder):
                version = frame.version
                await peer.say(frames.Installed(frame.version, frame.digest))
            for order in frame.orders if isinstance(frame, frames.Orders) else ():
                done = len(order.so_far) // 4
                num = cap - done
                its = tokens(order.lease, offset=done, version=version, ids=[7] * num, logprobs=[-60.0] * num)
                await peer.say(msgspec.structs.replace(its, ended=(frames.Ended(order.lease, cap, "length"),)))

    return act


def silent(*, vanishes: bool) -> Act:
    """Has every version at once, takes what it is given, and says nothing of it, or is gone."""

    async def act(peer: Peer) -> None:
        while True:
            frame = frames.decode_to_worker(await peer.socket.receive_bytes())
            if isinstance(frame, frames.PullOrder):
                await peer.say(frames.Installed(frame.version, frame.digest))
            elif isinstance(frame, frames.Orders) and vanishes:
                raise ConnectionError("gone")

    return act


@pytest.mark.parametrize("vanishes", [False, True])
def test_silent_names_hold_a_round_up_once_and_not_one_after_the_other(tmp_path: Path, vanishes: bool):
    """With forty of them, a round took ten times `stall_timeout_s`."""
    timeout_s = 2.0
    rules = FleetRules(heartbeat_timeout_s=timeout_s, stall_timeout_s=timeout_s)

    async def scenario() -> None:
        async with (
            manager(tmp_path) as live,
            honest_worker(live, msgspec.structs.replace(ENGINE, slots=32)),
            trainer(live, msgspec.structs.replace(MANY, fleet_rules=rules)) as fleet,
        ):
            await fleet.publish(0)
            await play_round(fleet, 0)
            async with under_many_names(live, silent(vanishes=vanishes), num_names=24):
                await asyncio.sleep(1.0)
                await fleet.publish(1)
                began = time.monotonic()
                groups = await play_round(fleet, 1)
                took_s = time.monotonic() - began
            assert [len(group.samples) for group in groups] == [4] * 8
            assert took_s < 2.5 * timeout_s
            assert live.service.lobby.need_run().scheduler.ledger.prompts_dropped == {}

    run(scenario(), timeout_s=100.0)


class Dripper:
    """Brings a few tokens at once, and then one of each sample now and then."""

    def __init__(self, *, gives_back: bool) -> None:
        self.gives_back = gives_back
        self.held: dict[int, int] = {}
        self.why = ""

    async def listen(self, peer: Peer) -> None:
        while True:
            frame = frames.decode_to_worker(await peer.socket.receive_bytes())
            if isinstance(frame, frames.Orders):
                self.held |= {one.lease: len(one.so_far) // 4 for one in frame.orders}
            elif isinstance(frame, frames.Release):
                self.why = frame.why
            elif isinstance(frame, frames.Stop):
                for lease in frame.aborts:
                    self.held.pop(lease, None)
                for lease in frame.hand_overs if self.gives_back else ():
                    if (num := self.held.pop(lease, None)) is not None:
                        ended = (frames.Ended(lease, num, "handed_over"),)
                        await peer.say(frames.NewTokens(1, b"", b"", b"", b"", b"", ended))

    async def drip(self, peer: Peer) -> None:
        for turn in count():
            for lease, num in list(self.held.items()):
                if num < CONFIG.max_new_tokens - 2:
                    self.held[lease] = num + 1
                    await peer.say(tokens(lease, offset=num, ids=[9]))
            await asyncio.sleep(0.25 if turn < 8 else 1.5)

    async def act(self, peer: Peer) -> None:
        await asyncio.gather(self.listen(peer), self.drip(peer), beat(peer))


@pytest.mark.parametrize("gives_back", [True, False])
def test_a_worker_that_brings_a_token_now_and_then_does_not_hold_a_round_up(tmp_path: Path, gives_back: bool):
    """A sample with a token within every `stall_timeout_s` is not stalled, and would take days."""
    rules = FleetRules(heartbeat_timeout_s=3.0, stall_timeout_s=4.0, hand_over_timeout_s=1.0)
    config = msgspec.structs.replace(MANY, fleet_rules=rules)
    dripper = Dripper(gives_back=gives_back)

    async def scenario() -> None:
        async with (
            manager(tmp_path) as live,
            honest_worker(live),
            trainer(live, config) as fleet,
            Peer(live, slots=MAX_SLOTS) as peer,
        ):
            await fleet.publish(0)
            await peer.enter()
            dripping = asyncio.create_task(dripper.act(peer))
            async with asyncio.timeout(30.0):  # at a token in 1.5 s, 60 of them take 90 s
                groups = await play_round(fleet, 0)
            assert [len(group.samples) for group in groups] == [4] * 8
            dripping.cancel()
            with contextlib.suppress(asyncio.CancelledError, *OVER):
                await dripping

    run(scenario(), timeout_s=60.0)
    assert dripper.why == "it failed samples of 3 groups in a row that others answered"


RECIPE = """
name = "tiny"
model.path = "model"
train.steps = 3
rollout.max_new_tokens = 16
data = { source = "rows.jsonl", prompts_per_step = 3, reward = "mine:score" }
validation.at_start = false
rounds.samples_per_prompt = 4
algorithm.zero_variance = "keep"
manager.port = 0
seeding = { initial_s = 0.2, max_step_s = 1.0 }
"""


@pytest.mark.timeout(200)
@pytest.mark.parametrize("reason", ["refused", pytest.param("engine_failed", marks=pytest.mark.chaos)])
def test_a_run_is_trained_to_its_end_beside_names_that_fail_everything(bare_desk: Path, reason: frames.EndReason):
    """It ended with `nothing of its round could be generated and scored`, for whoever had a worker token."""
    said, run_dir = trained_beside(bare_desk, failing(reason))
    assert [line["step"] for line in read_metrics(run_dir / "metrics.jsonl")] == [0, 1, 2], said


@pytest.mark.timeout(200)
def test_a_run_is_trained_to_its_end_beside_names_that_make_everything_up(bare_desk: Path):
    """It ended in its third step with `all groups of its round were rejected`, and nothing was trained in the two
    before."""
    said, run_dir = trained_beside(bare_desk, forging(16))
    lines = read_metrics(run_dir / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2], said
    assert min(float(line["sample/trained"] or 0) for line in lines) >= 6, "at least half of each step"
    assert "are not trained on: log-probabilities" in said


def trained_beside(bare_desk: Path, act: Act) -> tuple[str, Path]:
    """Train to the end beside processes with a worker token that join under one name after the other."""
    (bare_desk / "mine.py").write_text("def score(given):\n    return float(given.num_tokens % 2)\n")
    (bare_desk / "recipe.toml").write_text(RECIPE)
    training = polyrl("train", "recipe.toml", together=True)
    run_dir = bare_desk / "runs" / "tiny"

    async def scenario() -> None:
        while not (run_dir / "manager.json").exists() and training.poll() is None:
            await asyncio.sleep(0.05)
        place = Place(json.loads((run_dir / "manager.json").read_text())["url"], run_dir)
        async with under_many_names(place, act, version=None):
            while training.poll() is None:
                await asyncio.sleep(0.1)

    try:
        run(scenario(), timeout_s=120.0)
        said, _ = training.communicate(timeout=30)
    finally:
        if training.poll() is None:
            training.kill()
            training.wait()
    assert training.returncode == 0, said
    assert "Traceback" not in said + (run_dir / "logs" / "manager.log").read_text()
    assert main(["ledger", str(run_dir), "--verify"]) == 0
    return said, run_dir
