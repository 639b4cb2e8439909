"""The rule by which engines keep what they computed of an answer: where a later prompt may begin with it."""

import asyncio
from pathlib import Path

from tests.integration.live import CONFIG, ENGINE, MODEL, Live, manager, play_round, prompt_of, run, trainer, until
from tests.integration.test_asking import ask, asker
from tests.integration.test_episodes import CONFIG as EPISODES
from tests.integration.test_episodes import EchoEnvironment, host
from tests.integration.test_episodes import prompt_of as task_of

from polyrl.engines.emulated.engine import EmulatedEngine
from polyrl.engines.engine import Job
from polyrl.wire.dial import Dialer
from polyrl.worker.agent import WorkerAgent, WorkerOptions


class Recording(EmulatedEngine):
    """Remembers its jobs."""

    def __init__(self) -> None:
        super().__init__(ENGINE)
        self.jobs: list[Job] = []

    def generate(self, job: Job) -> None:
        self.jobs.append(job)
        super().generate(job)


def worker(live: Live, engine: Recording) -> "asyncio.Task[object]":
    agent = WorkerAgent(engine, Dialer(live.url, live.token("worker")), WorkerOptions("recording"))
    return asyncio.create_task(agent.run())


def test_the_cache_of_a_single_answer_is_not_kept_and_that_of_a_conversation_is(tmp_path: Path):
    engine = Recording()

    async def scenario() -> None:
        async with manager(tmp_path) as live:
            life = worker(live, engine)
            async with trainer(live, CONFIG, prompts=prompt_of) as fleet, asker(live) as client:
                await fleet.publish(0)
                await play_round(fleet, 0)
                assert len(engine.jobs) == 8 and not any(job.goes_on for job in engine.jobs)
                await ask(client)
                assert len(engine.jobs) == 9 and engine.jobs[-1].goes_on
            life.cancel()
            await asyncio.wait([life])

    run(scenario(), 60.0)


def test_the_cache_of_an_episodes_call_is_kept(tmp_path: Path):
    engine = Recording()

    async def scenario() -> None:
        async with manager(tmp_path) as live:
            life = worker(live, engine)
            async with (
                trainer(live, EPISODES, prompts=task_of, answers=MODEL) as fleet,
                host(live, EchoEnvironment()),
            ):
                await fleet.publish(0)
                await play_round(fleet, 0)
                await until(lambda: len(engine.jobs) == 24, "all calls were made")
                assert all(job.goes_on for job in engine.jobs)
            life.cancel()
            await asyncio.wait([life])

    run(scenario(), 60.0)
