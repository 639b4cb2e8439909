"""What a worker wrote that no model can have written: a run that took it before anybody looked goes on without it.

A trainer that does not say what its model can write has a manager that takes any token id, as all did once. So a run is
poisoned here, over real WebSockets; then the manager is started again, and a trainer that says it goes on with the run.
"""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.integration.desks import bare_desk, join, model, polyrl
from tests.integration.live import (
    CONFIG,
    ENGINE,
    MODEL,
    Live,
    Peer,
    check_right,
    honest_worker,
    is_connected,
    manager,
    play_round,
    prompts_of,
    run,
    tokens,
    trainer,
    until,
)

from polyrl.cli.main import main
from polyrl.client import Fleet, Group, Prompt
from polyrl.engines.emulated import EmulatedEngine
from polyrl.engines.emulated.text import EOS
from polyrl.engines.engine import Job, Sink, why_no_tokens
from polyrl.ids import LeaseId
from polyrl.journal.files import open_journals
from polyrl.journal.records import replay
from polyrl.scheduling.core.desk import RULES
from polyrl.telemetry.metrics import read_metrics
from polyrl.wire import frames
from polyrl.wire.dial import Dialer
from polyrl.worker.agent import WorkerAgent, WorkerOptions

__all__ = ["bare_desk", "model"]  # fixtures
NO_ID = ENGINE.vocab + 8_000
RECORDED = Path(__file__).parent / "recorded" / "poisoned_run"


async def poison(live: Live, fleet: Fleet, ids: list[int], logprob: float) -> None:
    """A worker answers all of the first round with this."""
    async with Peer(live, slots=64) as peer:
        await fleet.publish(0)
        await peer.enter()
        await fleet.request(0)
        num = CONFIG.domains[0].prompts_per_step * CONFIG.rounds.samples_per_prompt
        answered = 0
        while answered < num:
            while len(peer.orders) <= answered:
                await peer.hear(frames.Orders)
            order = peer.orders[answered]
            ended = (frames.Ended(order.lease, len(ids), "stop"),)
            await peer.say(tokens(order.lease, ids=ids, logprobs=[logprob] * len(ids), ended=ended))
            answered += 1
        await until(lambda: not_open(live), "all of it is taken in")


def not_open(live: Live) -> bool:
    opened = live.service.lobby.run
    return opened is not None and all(group.state != "open" for group in opened.desk.groups.values())


POISONS = {
    "an id beyond the vocabulary": ([7, NO_ID, EOS], -1.0, f"token id {NO_ID}"),
    "the largest id": ([2**31 - 1], -1.0, "token id 2147483647"),
}


@pytest.mark.parametrize("name", POISONS)
def test_a_run_that_was_poisoned_before_anybody_looked_goes_on_and_trains_on_none_of_it(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
):
    ids, logprob, words = POISONS[name]

    async def scenario() -> None:
        async with manager(tmp_path) as live, trainer(live) as fleet:
            await poison(live, fleet, ids, logprob)
        async with manager(tmp_path) as live, honest_worker(live), trainer(live, answers=MODEL) as fleet:
            before = set(prompts_of(live))
            prompts: dict[int, Prompt] = {}
            groups: list[Group] = []
            async for group in fleet.round(0):
                prompts |= prompts_of(live)
                groups.append(group)
                await fleet.take(group)
            assert not before & {group.id for group in groups}, "what was poisoned is not handed out"
            check_right(groups, prompts)
            await fleet.step_done(0)
            await fleet.settled()
            ledger = (await fleet.status()).ledger
            assert ledger["prompts_dropped"] == {}, "they are written again"

    run(scenario())
    rejected = [one.getMessage() for one in caplog.records if "is rejected: " in one.getMessage()]
    assert rejected and all(words in line and line.endswith("by worker mallory") for line in rejected)


def test_a_run_that_an_earlier_version_let_be_poisoned_is_replayed_by_its_rules_and_goes_on_by_ours(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Recorded at commit fe94f92: a worker handed a sample over unasked, got it back, and answered all with bad ids."""
    shutil.copytree(RECORDED, tmp_path / "journal")

    async def scenario() -> None:
        async with manager(tmp_path) as live:
            scheduler = live.service.lobby.need_run().scheduler
            assert scheduler.rules == RULES
            async with honest_worker(live), trainer(live, answers=MODEL) as fleet:
                await fleet.restart_step(0)
                prompts: dict[int, Prompt] = {}
                groups: list[Group] = []
                async for group in fleet.round(0):
                    prompts |= prompts_of(live)
                    groups.append(group)
                    await fleet.take(group)
                check_right(groups, prompts)
                await fleet.step_done(0)
                await fleet.settled()

    run(scenario())
    assert "by worker mallory" in caplog.text
    run(scenario_of_a_restart(tmp_path))
    report = replay(open_journals(tmp_path))
    assert report.first_difference is None, "both versions decide as they did"
    assert len(list((tmp_path / "journal").glob("events-*"))) == 2, "and the second is not begun again at every start"


async def scenario_of_a_restart(run_dir: Path) -> None:
    async with manager(run_dir) as live:
        assert live.service.lobby.run is not None


class PickyEngine(EmulatedEngine):
    """Refuses to go on from tokens that its model does not have, as engines with a model do."""

    _its_sink: Sink | None = None

    async def start(self, sink: Sink):
        self._its_sink = sink
        return await super().start(sink)

    def generate(self, job: Job) -> None:
        if why := why_no_tokens(job, ENGINE.vocab):
            assert self._its_sink is not None
            self._its_sink.ended(LeaseId(job.lease), "refused", why)
        else:
            super().generate(job)


@asynccontextmanager
async def picky_worker(live: Live) -> AsyncIterator[None]:
    agent = WorkerAgent(PickyEngine(ENGINE), Dialer(live.url, live.token("worker")), WorkerOptions("honest"))
    life = asyncio.create_task(agent.run())
    try:
        await until(lambda: is_connected(live, "honest"), "it is connected")
        yield
    finally:
        life.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await life


@pytest.mark.parametrize("restarts", [False, True])
def test_tokens_that_an_engine_refuses_to_go_on_from_cost_no_prompt_and_are_their_writers_fault(
    tmp_path: Path, restarts: bool, caplog: pytest.LogCaptureFixture
):
    """Also where the manager dies after it has thrown them away, and before it has them written anew."""

    async def scenario() -> None:
        async with manager(tmp_path) as live, trainer(live) as fleet, Peer(live, slots=64) as peer:
            await fleet.publish(0)
            await peer.enter()
            await fleet.request(0)
            while len(peer.orders) < 8:
                await peer.hear(frames.Orders)
            for order in peer.orders:
                await peer.say(tokens(order.lease, ids=[7, NO_ID]))
            await until(lambda: live.service.lobby.need_run().num_tokens == 16, "they were heard")
            if not restarts:
                await go_on(live, fleet, peer)
        if restarts:
            async with manager(tmp_path) as live, trainer(live) as fleet:
                await go_on(live, fleet, None)

    async def go_on(live: Live, fleet: Fleet, peer: Peer | None) -> None:
        prompts = prompts_of(live)
        if peer is not None:
            await peer.socket.close()
        scheduler = live.service.lobby.need_run().scheduler
        async with picky_worker(live):
            groups = await play_round(fleet, 0)
        check_right(groups, prompts)
        assert scheduler.ledger.prompts_dropped == {}
        assert scheduler.ledger.tokens_discarded["refused"] == 16

    run(scenario())
    assert sum("begins anew: honest refused to go on from them" in one.getMessage() for one in caplog.records) == 8


# As processes


@pytest.mark.timeout(300)
def test_a_poisoned_run_of_an_earlier_version_is_trained_to_its_end_by_polyrl_train_resume(bare_desk: Path):
    """Recorded at commit fe94f92, where the run was killed: a worker claimed 100,000 slots, handed samples over unasked
    with ids that the model does not have, and ended others before their end. No other worker had joined."""
    run_dir = bare_desk / "runs" / "tiny"
    shutil.copytree(RECORDED.with_name("poisoned_train"), run_dir)
    recipe = run_dir / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("DESK", str(bare_desk)))
    (bare_desk / "their_reward.py").write_text("def score(given):\n    return float(given.num_tokens % 2)\n")
    trainer = polyrl("train", "--resume", "runs/tiny", together=True)
    worker = join(run_dir)
    try:
        said, _ = trainer.communicate(timeout=200)
        worker.communicate(timeout=60)
    finally:
        for process in (trainer, worker):
            if process.poll() is None:
                process.kill()
                process.wait()
    assert trainer.returncode == 0, said
    assert "done: all 3 steps are trained" in said
    rejected = [line for line in said.splitlines() if "is rejected: token id" in line]
    assert rejected and all(line.endswith("by worker mallory") for line in rejected)
    assert [line["step"] for line in read_metrics(run_dir / "metrics.jsonl")] == [0, 1, 2]
    assert "Traceback" not in said + (run_dir / "logs" / "manager.log").read_text()
    assert main(["ledger", str(run_dir), "--verify"]) == 0
