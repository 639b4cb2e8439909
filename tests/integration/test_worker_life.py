"""A worker over a long time: breaks, a manager that does not answer, a signal while its engine starts."""

import asyncio
import time
from pathlib import Path

from tests.integration.live import ENGINE, Live, manager, run, trainer, until

from polyrl.engines.emulated import EmulatedConfig, EmulatedEngine
from polyrl.ids import WorkerName
from polyrl.wire.dial import Dialer
from polyrl.worker.agent import WorkerAgent, WorkerOptions

NAME = WorkerName("patient")


def agent(live: Live, *, give_up_after_s: float = 60.0, engine: EmulatedConfig = ENGINE) -> WorkerAgent:
    options = WorkerOptions(name=NAME, give_up_after_s=give_up_after_s)
    return WorkerAgent(EmulatedEngine(engine), Dialer(live.url, live.token("worker")), options)


def is_greeted(live: Live) -> bool:
    session = live.service.executor.workers.get(NAME)
    return session is not None and session.greeted


def test_a_worker_that_has_been_connected_for_longer_than_its_patience_comes_back_after_a_break(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live:
            worker = agent(live, give_up_after_s=0.5)
            life = asyncio.create_task(worker.run())
            for _ in range(3):
                await until(lambda: is_greeted(live), "it is connected")
                await asyncio.sleep(0.6)
                link = live.service.executor.workers[NAME].link
                assert link is not None
                link.close("a break")
                await until(lambda: not is_greeted(live), "the break is seen")
            await until(lambda: is_greeted(live), "it is back")
            worker.drain("the test is over")
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
            assert time.monotonic() - began < 2.0

    run(scenario())


def test_a_local_worker_whose_devices_do_not_turn_leaves_with_the_reason(tmp_path: Path):
    async def turn_to(duty: str) -> None:
        raise RuntimeError(f"out of memory\nwhile turning to {duty}")

    async def scenario() -> None:
        async with manager(tmp_path) as live, trainer(live):
            dialer = Dialer(live.url, live.token("admin"))
            options = WorkerOptions(name=NAME, is_local=True)
            left = await WorkerAgent(EmulatedEngine(ENGINE), dialer, options, turn_to=turn_to).run()
            assert not left.ok
            assert str(left) == "its devices do not turn to generating: RuntimeError: out of memory"

    run(scenario())


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
            await asyncio.sleep(0.1)
            left = [repr(one) for one in asyncio.all_tasks() - before]
            assert not [one for one in left if "WorkerAgent" in one or "EmulatedEngine" in one]

    run(scenario())
