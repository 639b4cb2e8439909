"""Workers that fail what others can do, and prompts that nobody can do, in a live fleet."""

import asyncio
import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
from msgspec import structs
from tests.integration.live import (
    CONFIG,
    ENGINE,
    Live,
    Peer,
    begin_round,
    honest_worker,
    is_connected,
    manager,
    play_round,
    run,
    trainer,
    until,
)

from polyrl.client import Prompt
from polyrl.engines.emulated import EmulatedConfig, EmulatedEngine
from polyrl.engines.engine import EngineInfo, Sink
from polyrl.errors import UserError
from polyrl.ids import LeaseId, SampleId, Version, WorkerName, group_of
from polyrl.manager import asking, opening
from polyrl.manager.frames_in import joining
from polyrl.scheduling.core.ledger import Ledger
from polyrl.scheduling.core.parameters import DomainData, FleetRules
from polyrl.wire import frames
from polyrl.wire.control import JoinReply, JoinRequest
from polyrl.wire.dial import Dialer
from polyrl.wire.frames import Sampling
from polyrl.worker.agent import WorkerAgent, WorkerOptions

SIX = structs.replace(CONFIG, domains=(DomainData(name="d", prompts_per_step=6, num_prompts=50),))


def ledger(live: Live) -> Ledger:
    scheduler = live.service.lobby.need_run().scheduler
    return scheduler.ledger


def agent(live: Live, engine: EmulatedConfig) -> WorkerAgent:
    return WorkerAgent(EmulatedEngine(engine), Dialer(live.url, live.token("worker")), WorkerOptions("bad"))


def test_a_worker_that_refuses_every_job_harms_no_round_and_ends_with_its_last_refusal(tmp_path: Path):
    async def scenario():
        async with manager(tmp_path) as live, honest_worker(live), trainer(live, SIX) as fleet:
            life = asyncio.create_task(agent(live, structs.replace(ENGINE, slots=64, kv_tokens=3)).run())
            await fleet.publish(0)
            groups = await play_round(fleet, 0)
            assert [len(group.samples) for group in groups] == [4] * 6
            left = await life
            assert not left.ok
            assert "in a row that others answered; the last: refused: prompt and answer so far are" in str(left)
            assert ledger(live).samples_discarded == {} and ledger(live).workers[WorkerName("bad")].num_joins == 1

    run(scenario())


def test_a_worker_whose_engine_fails_every_job_harms_no_round_either(tmp_path: Path):
    async def scenario():
        async with manager(tmp_path) as live, honest_worker(live), trainer(live, SIX) as fleet:
            life = asyncio.create_task(agent(live, structs.replace(ENGINE, slots=64, fail_every=1)).run())
            await fleet.publish(0)
            groups = await play_round(fleet, 0)
            assert [len(group.samples) for group in groups] == [4] * 6
            assert "engine_failed: as fail_every asks" in str(await life)

    run(scenario())


def test_a_prompt_that_every_engine_refuses_is_dropped_and_costs_nobody_its_place(tmp_path: Path):
    def prompts(domain: int, prompt: int, epoch: int) -> Prompt:
        first.append(prompt)
        return Prompt([1, 2, 3, 4], Sampling(stop=("x",)) if prompt == first[0] else Sampling())

    first: list[int] = []

    async def scenario():
        async with (
            manager(tmp_path) as live,
            honest_worker(live, name="a"),
            honest_worker(live, name="b"),
            trainer(live, SIX, prompts=prompts) as fleet,
        ):
            await fleet.publish(0)
            groups = [len(group.samples) async for group in fleet.round(0)]
            assert groups == [4] * 6, "another prompt took its place"
            assert ledger(live).prompts_dropped == {"refused": 1}
            assert {name: (one.num_joins, one.num_losses) for name, one in ledger(live).workers.items()} == {
                "a": (1, 0),
                "b": (1, 0),
            }
            assert is_connected(live, "a") and is_connected(live, "b")

    run(scenario())


class Diverged(EmulatedEngine):
    """Its weights became NaN, and so did all that it computes."""

    async def start(self, sink: Sink) -> EngineInfo:
        return await super().start(_WithoutNumbers(sink))


class _WithoutNumbers:
    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.ended = sink.ended

    def tokens(self, lease: LeaseId, tokens: Sequence[int], logprobs: Sequence[float], version: Version) -> None:
        self._sink.tokens(lease, tokens, [math.nan] * len(logprobs), version)


def test_weights_that_give_no_numbers_end_the_round_and_cost_nobody_its_place(tmp_path: Path, caplog):
    async def scenario():
        async with manager(tmp_path) as live, trainer(live) as fleet:
            agents = [
                WorkerAgent(Diverged(ENGINE), Dialer(live.url, live.token("worker")), WorkerOptions(name))
                for name in ("a", "b")
            ]
            lives = [asyncio.create_task(one.run()) for one in agents]
            await fleet.publish(0)
            assert await play_round(fleet, 0) == []
            assert set(ledger(live).prompts_dropped) == {"failed"}
            assert [(one.num_joins, one.num_losses) for one in ledger(live).workers.values()] == [(1, 0), (1, 0)]
            assert set(live.refused) <= {"late_lease"}
            num_failed.append(ledger(live).moves["engine_failed"])
            for life in lives:
                life.cancel()
            await asyncio.wait(lives)

    num_failed: list[int] = []
    run(scenario())
    said = [one for one in caplog.messages if "engine_failed: version 0 gives no numbers" in one]
    assert 4 <= len(said) < num_failed[0] / 2  # each worker, and the manager of each of them


@pytest.mark.parametrize("noticed", [True, False], ids=["away", "its connection broke unnoticed"])
def test_a_worker_that_is_given_up_for_its_failures_hears_so_when_it_dials_again(tmp_path: Path, noticed: bool):
    slow = structs.replace(ENGINE, slots=64, tokens_per_s=60.0)
    patient = structs.replace(SIX, fleet_rules=FleetRules(heartbeat_timeout_s=15.0))

    async def scenario():
        async with (
            manager(tmp_path) as live,
            honest_worker(live, slow),
            trainer(live, patient) as fleet,
            Peer(live, "bad", slots=64) as peer,
        ):
            await fleet.publish(0)
            await peer.enter()
            playing = asyncio.create_task(play_round(fleet, 0))
            while len({group_of(SampleId(order.sample)) for order in peer.orders}) < 3:
                await peer.hear(frames.Orders)
            ended = tuple(frames.Ended(order.lease, 0, "engine_failed", "no memory") for order in peer.orders)
            await peer.say(frames.NewTokens(1, b"", b"", b"", b"", b"", ended))
            if noticed:
                await peer.socket.close()
            await until(lambda: "bad" not in live.service.lobby.workers, "it is given up")
            for _ in range(2):  # it may not have heard it the first time; on its old connection it reads nothing
                await peer.dial()
                if noticed:
                    await peer.say(frames.Hello(0, b""))
                told = await peer.hear(frames.Release)
                assert told.in_anger and not told.rejoin
                assert told.why.endswith("groups in a row that others answered; the last: engine_failed: no memory")
            assert len(await playing) == 6

    run(scenario())


def test_a_worker_that_is_too_slow_to_hand_over_stays_drained(tmp_path: Path):
    rules = FleetRules(heartbeat_timeout_s=15.0, drain_timeout_s=0.5)

    async def scenario():
        async with (
            manager(tmp_path) as live,
            trainer(live, structs.replace(SIX, fleet_rules=rules)) as fleet,
            Peer(live, "slow") as peer,
        ):
            playing, _ = await begin_round(fleet, peer, 0)
            await live.service.call(lambda lobby: joining.drain(lobby, WorkerName("slow"), "a person asked"))
            told = await peer.hear(frames.Release)
            assert not told.rejoin and not told.in_anger
            playing.cancel()

    run(scenario())


def test_a_worker_that_is_drained_while_it_is_away_hears_so_when_it_dials_again(tmp_path: Path):
    rules = FleetRules(heartbeat_timeout_s=0.5)

    async def scenario(*, has_run: bool):
        async with manager(tmp_path / str(has_run)) as live, Peer(live, "away") as peer:
            await peer.enter()
            async with trainer(live, structs.replace(SIX, fleet_rules=rules)) if has_run else nullcontext():
                await peer.socket.close()
                name, workers = WorkerName("away"), live.service.lobby.workers
                await until(lambda: workers[name].link is None, "the break is seen")
                assert await live.service.call(lambda lobby: joining.drain(lobby, name, "a person asked"))
                await until(lambda: name not in workers, "it is given up")
                await peer.dial()
                told = await peer.hear(frames.Release)
                assert not told.rejoin and not told.in_anger

    run(scenario(has_run=True))
    run(scenario(has_run=False))


# A worker without a model


def test_a_run_that_trains_takes_no_worker_whose_tokens_are_made_up(tmp_path: Path):
    """Its ids are not the model's. It says how to start one that can; whoever joined before the run is sent away."""

    async def scenario() -> None:
        async with manager(tmp_path) as live, honest_worker(live, name="early"), trainer(live, trains=True):
            await until(lambda: not is_connected(live, "early"), "it is sent away")
            with pytest.raises(UserError, match="Start the worker with --engine builtin, vllm or sglang"):
                await join_emulated(live)
        async with manager(tmp_path) as live:  # killed and started again, it knows
            with pytest.raises(UserError, match="the emulated engine has none"):
                await join_emulated(live)
            assert live.refused == {"engine": 1}

    run(scenario())


def test_a_run_for_those_who_ask_takes_no_worker_whose_tokens_are_made_up(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, honest_worker(live, name="early"):
            config = asking.config_of(live.service.settings)
            await live.service.call(lambda lobby: opening.open_run_without_trainer(lobby, config))
            await until(lambda: not is_connected(live, "early"), "it is sent away")
        async with manager(tmp_path) as live:
            with pytest.raises(UserError, match="the emulated engine has none"):
                await join_emulated(live)

    run(scenario())


async def join_emulated(live: Live) -> None:
    async with Dialer(live.url, live.token("worker")) as dialer:
        request = JoinRequest(name="late", protocol=frames.PROTOCOL, engine="emulated", slots=4)
        await dialer.post("/v1/join", request, JoinReply)
