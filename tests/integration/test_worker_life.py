"""A worker over a long time: breaks, a manager that does not answer, a signal while its engine starts."""

import asyncio
import gc
import time
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec import structs
from tests.integration.live import (
    CONFIG,
    ENGINE,
    QUICK,
    Live,
    Peer,
    begin_round,
    honest_worker,
    manager,
    play_round,
    run,
    tokens,
    trainer,
    until,
)

from polyrl.engines.emulated import EmulatedConfig, EmulatedEngine
from polyrl.engines.engine import EngineError, EngineInfo, EngineStats, Job, Sink, Weights
from polyrl.ids import LeaseId, Version, WorkerName
from polyrl.manager.status import status
from polyrl.scheduling.core.fleet import Worker
from polyrl.wire import frames
from polyrl.wire.control import JoinReply
from polyrl.wire.dial import Dialer
from polyrl.worker.agent import WorkerAgent, WorkerOptions

NAME = WorkerName("patient")


def agent(live: Live, *, give_up_after_s: float = 60.0, engine: EmulatedConfig = ENGINE) -> WorkerAgent:
    options = WorkerOptions(name=NAME, give_up_after_s=give_up_after_s)
    return WorkerAgent(EmulatedEngine(engine), Dialer(live.url, live.token("worker")), options)


class SlowToAbort(EmulatedEngine):
    """As one whose server answers late: an abort lasts until `may_abort` is set."""

    def __init__(self) -> None:
        super().__init__(ENGINE)
        self.may_abort = asyncio.Event()
        self.asked: list[LeaseId] = []
        self.aborted: list[LeaseId] = []

    async def abort(self, lease: LeaseId) -> None:
        self.asked.append(lease)
        await self.may_abort.wait()
        await super().abort(lease)
        self.aborted.append(lease)


def holding(engine: EmulatedEngine, *leases: int) -> WorkerAgent:
    worker = WorkerAgent(engine, Dialer("http://127.0.0.1:1", "token"), WorkerOptions(name=NAME))
    for lease in leases:
        worker._book.open(LeaseId(lease), 0)
    return worker


def test_aborts_and_hand_overs_go_on_when_the_connection_breaks_over_them():
    async def scenario() -> None:
        for num_turns in range(4):
            engine = SlowToAbort()
            worker = holding(engine, 1, 2)
            receiving = asyncio.create_task(worker._hear(frames.Stop(aborts=(1,), hand_overs=(2,))))
            for _ in range(num_turns + 1):
                await asyncio.sleep(0)
            receiving.cancel()
            await asyncio.wait([receiving])
            engine.may_abort.set()
            await until(lambda e=engine, w=worker: len(e.aborted) == 2 and not w._book.running(), "both are over")
            frame = worker._book.take_frame()
            assert frame is not None
            assert [(one.lease, one.reason) for one in frame.ended] == [(2, "handed_over")]

    run(scenario())


def test_all_that_is_over_for_the_manager_is_aborted_at_once():
    async def scenario() -> None:
        engine = SlowToAbort()
        worker = holding(engine, 1, 2, 3)
        welcomed = asyncio.create_task(worker._hear(frames.Welcome(held=(frames.HeldLease(2, 0),))))
        await until(lambda: engine.asked == [1, 3], "both are asked for")
        assert not worker._welcomed
        engine.may_abort.set()
        await welcomed
        assert worker._welcomed
        assert worker._book.running() == [2]

    run(scenario())


class Failing(EmulatedEngine):
    """As one whose process died for good when `trouble` was set."""

    trouble: str | None = None

    def health(self) -> str | None:
        return self.trouble or super().health()


@pytest.mark.parametrize("breaks", ["never", "over the goodbye", "before it"])
def test_a_worker_whose_engine_cannot_go_on_says_so_whatever_its_connection_does(tmp_path: Path, breaks: str):
    """The manager answers a goodbye with a release that blames nobody; and a drained worker without leases may go."""

    async def scenario() -> None:
        async with manager(tmp_path) as live:
            engine = Failing(ENGINE)
            worker = WorkerAgent(engine, Dialer(live.url, live.token("worker")), WorkerOptions(name=NAME))
            life = asyncio.create_task(worker.run())
            await until(lambda: is_greeted(live), "it is connected")
            if breaks == "over the goodbye":
                worker._socket = cast(Any, SocketThatTakesNothing())
            elif breaks == "before it":
                worker._draining = "SIGTERM"
                link = live.service.lobby.workers[NAME].link
                assert link is not None
                link.close("a break")
            engine.trouble = "its device fell off the bus"
            if breaks == "over the goodbye":
                await asyncio.sleep(0.3)
                link = live.service.lobby.workers[NAME].link
                assert link is not None
                link.close("a break")
            left = await life
            assert (left.ok, str(left)) == (False, "the engine cannot go on: its device fell off the bus")

    run(scenario())


class Watched(EmulatedEngine):
    has_started = False

    async def start(self, sink: Sink) -> EngineInfo:
        self.has_started = True
        return await super().start(sink)


@pytest.mark.parametrize(
    ("scope", "said"),
    [
        (None, "that is not a token of this run"),
        ("generate", "the generate token may not do this; the worker token may"),
    ],
)
def test_who_is_not_let_in_hears_it_before_its_engine_starts(tmp_path: Path, scope: str | None, said: str):
    async def scenario() -> None:
        async with manager(tmp_path) as live:
            engine, token = Watched(ENGINE), "y" * 43 if scope is None else live.token(scope)
            left = await WorkerAgent(engine, Dialer(live.url, token), WorkerOptions(name=NAME)).run()
            assert not left.ok and str(left).startswith(f"{live.url}: {said}")
            assert not engine.has_started

    run(scenario())


def test_an_engine_starts_although_its_manager_is_not_up_yet():
    async def scenario() -> None:
        engine = Watched(ENGINE)
        options = WorkerOptions(name=NAME, give_up_after_s=0.0)
        left = await WorkerAgent(engine, Dialer("http://127.0.0.1:1", "token"), options).run()
        assert not left.ok and "given up after" in str(left)
        assert engine.has_started

    run(scenario())


def test_a_signal_is_heard_while_the_manager_does_not_answer():
    async def scenario() -> None:
        is_asked = asyncio.Event()

        async def keep_waiting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            is_asked.set()
            await reader.read()
            writer.close()

        server = await asyncio.start_server(keep_waiting, "127.0.0.1", 0)
        url = "http://{}:{}".format(*server.sockets[0].getsockname())
        engine = Watched(ENGINE)
        worker = WorkerAgent(engine, Dialer(url, "token"), WorkerOptions(name=NAME))
        life = asyncio.create_task(worker.run())
        await is_asked.wait()
        worker.drain("SIGTERM")
        async with asyncio.timeout(10.0):  # half of what an answer may take
            assert (await life).ok
        assert not engine.has_started
        server.close()

    run(scenario())


def is_greeted(live: Live) -> bool:
    session = live.service.lobby.workers.get(NAME)
    return session is not None and session.greeted


def test_a_worker_that_has_been_connected_for_longer_than_its_patience_comes_back_after_a_break(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live:
            worker = agent(live, give_up_after_s=0.5)
            life = asyncio.create_task(worker.run())
            for _ in range(3):
                await until(lambda: is_greeted(live), "it is connected")
                await asyncio.sleep(0.6)
                link = live.service.lobby.workers[NAME].link
                assert link is not None
                link.close("a break")
                await until(lambda: not is_greeted(live), "the break is seen")
            await until(lambda: is_greeted(live), "it is back")
            worker.drain("the test is over")
            assert (await life).ok

    run(scenario())


def test_a_manager_that_sends_what_is_no_frame_is_left_with_a_line(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live:
            life = asyncio.create_task(agent(live).run())
            await until(lambda: is_greeted(live), "it is connected")
            link = live.service.lobby.workers[NAME].link
            assert link is not None
            link.send(cast(Any, b"bytes alone"))
            left = await life
            assert not left.ok
            assert str(left).startswith(f"{live.url}: what it sent is no frame of this PolyRL: ") and "\n" not in str(
                left
            )

    run(scenario())


class SocketThatTakesNothing:
    closed = False

    async def send_bytes(self, _: bytes) -> None:
        await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        self.closed = True


def test_that_it_leaves_is_said_however_long_the_connection_takes_it():
    async def scenario() -> None:
        worker = holding(EmulatedEngine(ENGINE))
        worker._session = JoinReply(
            worker=NAME, session="s", heartbeat_interval_s=1.0, flush_interval_s=1.0, flush_phase_s=0.0
        )
        worker._socket = cast(Any, SocketThatTakesNothing())
        before = asyncio.all_tasks()
        worker.drain("SIGTERM")
        await asyncio.sleep(0)
        gc.collect()  # the loop itself does not hold a task
        assert len(asyncio.all_tasks() - before) == 1

    run(scenario())


def test_a_worker_with_a_notice_writes_on_and_hands_over_before_its_machine_goes(tmp_path: Path):
    async def scenario() -> None:
        slow = EmulatedConfig(slots=8, tokens_per_s=4.0, median_tokens=60.0, sigma=0.1)
        async with manager(tmp_path) as live, trainer(live) as fleet:
            worker = agent(live, engine=slow)
            life = asyncio.create_task(worker.run())
            await until(lambda: is_greeted(live), "it is connected")
            await fleet.publish(0)
            playing = asyncio.create_task(play_round(fleet, 0))
            lobby = live.service.lobby

            def seat() -> Worker:
                found = lobby.need_run().seat_of(lobby.workers[NAME])
                assert found is not None
                return found

            await until(lambda: bool(seat().leases), "it has samples")
            began = time.monotonic()
            worker.drain("SIGTERM", notice_s=6.0)
            await until(lambda: seat().leaves_at is not None, "the notice is heard")
            assert seat().state == "active" and seat().leases
            left = await life
            assert left.ok and time.monotonic() - began > 2.0, "it left at once"
            async with honest_worker(live):
                assert len(await playing) == 2
            assert lobby.need_run().scheduler.ledger.moves.keys() == {"handed_over"}

    run(scenario())


def test_a_worker_with_a_notice_that_is_asked_again_hands_over_at_once(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live:
            worker = agent(live)
            life = asyncio.create_task(worker.run())
            await until(lambda: is_greeted(live), "it is connected")
            worker.drain("SIGTERM", notice_s=3000.0)
            worker.drain("SIGTERM", notice_s=3000.0)
            assert (await life).ok

    run(scenario())


def test_a_signal_is_heard_while_the_engine_starts(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live:
            worker = agent(live, engine=EmulatedConfig(start_s=30.0))
            life = asyncio.create_task(worker.run())
            await asyncio.sleep(0.1)
            began = time.monotonic()
            worker.drain("SIGTERM")
            left = await life
            assert left.ok
            assert time.monotonic() - began < 15.0, "half of what its start takes"

    run(scenario())


def test_a_worker_that_holds_nothing_leaves_at_once_when_its_manager_is_gone(tmp_path: Path):
    async def scenario(*, gone_first: bool) -> None:
        async with manager(tmp_path / str(gone_first)) as live:
            worker = agent(live)
            life = asyncio.create_task(worker.run())
            await until(lambda: is_greeted(live), "it is connected")
            if not gone_first:
                worker._socket = cast(Any, SocketThatTakesNothing())  # what it says does not arrive
                worker.drain("SIGTERM")
        if gone_first:
            await until(lambda: worker._socket is None, "the break is seen")
            worker.drain("SIGTERM")
        async with asyncio.timeout(20.0):  # a third of its patience with a manager that is away
            assert (await life).ok

    run(scenario(gone_first=True))
    run(scenario(gone_first=False))


def test_the_end_of_an_answer_is_told_at_once_however_long_tokens_are_gathered(tmp_path: Path):
    async def scenario() -> None:
        settings = structs.replace(QUICK, stream=structs.replace(QUICK.stream, flush_interval_s=10.0))
        async with manager(tmp_path, settings) as live, trainer(live) as fleet:
            worker = agent(live)
            life = asyncio.create_task(worker.run())
            await until(lambda: is_greeted(live), "it is connected")
            await fleet.publish(0)
            began = time.monotonic()
            groups = await play_round(fleet, 0)
            assert len(groups) == 2
            assert time.monotonic() - began < settings.stream.flush_interval_s
            worker.drain("the test is over")
            assert (await life).ok

    run(scenario())


def test_a_local_worker_whose_devices_do_not_turn_leaves_with_the_reason(tmp_path: Path):
    async def set_duty(duty: str) -> None:
        raise RuntimeError(f"out of memory\nwhile turning to {duty}")

    async def scenario() -> None:
        async with manager(tmp_path) as live, trainer(live):
            dialer = Dialer(live.url, live.token("admin"))
            options = WorkerOptions(name=NAME, is_local=True)
            left = await WorkerAgent(EmulatedEngine(ENGINE), dialer, options, set_duty=set_duty).run()
            assert not left.ok
            assert (
                str(left)
                == "its devices do not turn to generating: RuntimeError: out of memory while turning to generating"
            )

    run(scenario())


def left_of_workers(before: set["asyncio.Task[Any]"]) -> list[str]:
    left = [repr(one) for one in asyncio.all_tasks() - before]
    return [one for one in left if "WorkerAgent" in one or "EmulatedEngine" in one]


def test_a_worker_that_is_cancelled_leaves_no_task_behind(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live:
            before = asyncio.all_tasks()
            starting = asyncio.create_task(agent(live, engine=EmulatedConfig(start_s=30.0)).run())
            await asyncio.sleep(0.1)
            living = asyncio.create_task(agent(live).run())
            await until(lambda: is_greeted(live), "it is connected")
            for life in (starting, living):
                life.cancel()
            await asyncio.gather(starting, living, return_exceptions=True)
            await until(lambda: not is_greeted(live), "its connection is gone")
            await until(lambda: not left_of_workers(before), "none is left")

    run(scenario())


def test_after_an_outage_what_the_directory_holds_has_no_digest_of_the_run():
    async def scenario() -> None:
        engine = MortalEngine(structs.replace(ENGINE, version=3))
        worker = holding(engine)
        worker._info = await engine.start(worker)
        worker._installer._digests = {Version(3): "of what was fetched under its number", Version(7): "of the next"}
        await engine.die()
        worker._look_at_engine()
        assert worker._installer._digests == {Version(7): "of the next"}
        await engine.close()

    run(scenario())


class MortalEngine(EmulatedEngine):
    """Dies and comes back when it is told to, as one with a server of its own does."""

    def __init__(self, config: EmulatedConfig) -> None:
        super().__init__(config)
        self._listener: Sink | None = None
        self._runs: set[LeaseId] = set()
        self._down = ""
        self._num_outages = 0
        self.num_installs = 0

    async def start(self, sink: Sink) -> EngineInfo:
        self._listener = sink
        return await super().start(sink)

    def generate(self, job: Job) -> None:
        self._runs.add(job.lease)
        super().generate(job)

    async def install(self, weights: Weights) -> None:
        if self._down:
            raise EngineError(self._down)
        self.num_installs += 1
        await super().install(weights)

    def stats(self) -> EngineStats:
        return super().stats()._replace(down=self._down, num_outages=self._num_outages)

    async def die(self) -> None:
        assert self._listener is not None
        self._down, self._num_outages = "it was killed", self._num_outages + 1
        for lease in self._runs:
            await self.abort(lease)
            self._listener.ended(lease, "engine_failed", self._down)
        self._runs.clear()

    def come_back(self) -> None:
        self._version, self._down = None, ""


def test_a_worker_whose_engine_dies_stays_and_gets_its_weights_again(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, trainer(live) as fleet:
            engine = MortalEngine(ENGINE)
            worker = WorkerAgent(engine, Dialer(live.url, live.token("worker")), WorkerOptions(name=NAME))
            life = asyncio.create_task(worker.run())
            for step in range(3):
                await fleet.publish(step)
                playing = asyncio.create_task(play_round(fleet, step))
                await until(lambda: engine.stats().num_running > 0, "it writes")
                num_installs = engine.num_installs
                await engine.die()
                await until(lambda: state_of(live) == "down", "the manager knows that it is down")
                engine.come_back()
                assert len(await playing) == 2
                assert engine.num_installs > num_installs
            ledger = live.service.lobby.need_run().scheduler.ledger
            assert (ledger.workers[NAME].num_joins, ledger.workers[NAME].num_losses) == (1, 0)
            assert ledger.samples_discarded == {}
            assert live.refused == {}
            worker.drain("the test is over")
            assert (await life).ok

    run(scenario())


def test_an_engine_that_died_and_came_back_behind_a_break_is_believed_to_be_empty(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, trainer(live) as fleet:
            engine = MortalEngine(ENGINE)
            worker = WorkerAgent(engine, Dialer(live.url, live.token("worker")), WorkerOptions(name=NAME))
            life = asyncio.create_task(worker.run())
            await fleet.publish(0)
            playing = asyncio.create_task(play_round(fleet, 0))
            await until(lambda: engine.stats().num_running > 0, "it writes")
            link = live.service.lobby.workers[NAME].link
            assert link is not None
            link.close("a break")
            await engine.die()
            engine.come_back()
            assert len(await playing) == 2
            assert engine.num_installs == 2
            worker.drain("the test is over")
            assert (await life).ok

    run(scenario())


def state_of(live: Live) -> str:
    return next((one.state for one in status(live.service.lobby, 0.0).workers if one.name == NAME), "")


def test_a_worker_that_is_lost_between_an_answers_last_token_and_its_end_costs_nothing(tmp_path: Path):
    async def scenario():
        async with manager(tmp_path) as live, trainer(live) as fleet, Peer(live) as peer:
            playing, order = await begin_round(fleet, peer, 0)
            await peer.say(tokens(order.lease, ids=[7] * CONFIG.max_new_tokens))
            await until(lambda: live.service.lobby.need_run().num_tokens == CONFIG.max_new_tokens, "the tokens came")
            await peer.say(frames.Goodbye("gone"))
            async with honest_worker(live):
                assert [len(group.samples) for group in await playing] == [4, 4]
            scheduler = live.service.lobby.need_run().scheduler
            assert "refused" not in scheduler.ledger.moves

    run(scenario())
