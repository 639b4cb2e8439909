"""Rounds that are written ahead, through a real manager: how old tokens are, and that none is thrown away for it."""

from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from msgspec import structs
from tests.integration.live import CONFIG, manager, run
from tests.integration.test_versions import trainer, worker

from polyrl.client import RoundOver
from polyrl.scheduling.core.ledger import Ledger
from polyrl.scheduling.core.parameters import DomainData, RoundsConfig
from polyrl.weights.peer import WeightPeer

NUM_STEPS = 8


async def train_ahead(run_dir: Path, max_staleness: int, rounds: RoundsConfig) -> tuple[Counter[int], Ledger]:
    """Eight steps; a worker is lost in mid-run. How many tokens are how old, and what became of all of them."""
    domains = (DomainData(name="d", prompts_per_step=4, num_prompts=100),)
    config = structs.replace(CONFIG, max_staleness=max_staleness, rounds=rounds, domains=domains)
    ages: Counter[int] = Counter()
    peers: list[WeightPeer] = []
    async with manager(run_dir) as live, trainer(live, config) as one, worker(live, "a", peers), AsyncExitStack() as b:
        await b.enter_async_context(worker(live, "b", peers))
        await one.publish(0)
        for step in range(NUM_STEPS):
            for ahead in range(step, min(step + max_staleness + 1, NUM_STEPS)):
                await one.fleet.request(ahead)
            async for group in one.fleet.round(step):
                await one.fleet.take(group)
                for sample in group.samples:
                    ends = [segment.from_token for segment in sample.segments[1:]] + [len(sample.tokens)]
                    for segment, end in zip(sample.segments, ends, strict=True):
                        ages[step - segment.version] += end - segment.from_token
            if step == NUM_STEPS // 2:
                await b.aclose()
            await one.fleet.step_done(step)
            await one.publish(step + 1)
        await one.fleet.settled()
        scheduler = live.service.lobby.need_run().scheduler
        return ages, scheduler.ledger


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_rounds_are_written_ahead_within_their_staleness_and_nothing_is_thrown_away(tmp_path, max_staleness):
    ages, ledger = run(train_ahead(tmp_path, max_staleness, RoundsConfig(samples_per_prompt=4)))
    assert 0 < max(ages) <= max_staleness and min(ages) >= 0
    assert (ledger.prompts_trained, ledger.samples_trained) == (4 * NUM_STEPS, 16 * NUM_STEPS)
    assert ledger.prompts_dropped == {} and ledger.samples_discarded == {}
    assert ledger.tokens_kept == sum(ages.values())
    assert set(ledger.tokens_discarded) <= {"preemption"}  # of the worker that was lost, if anything


def test_with_tail_batching_only_what_lost_its_race_is_thrown_away(tmp_path):
    rounds = RoundsConfig(samples_per_prompt=4, tail_batching="race", prompt_factor=1.5, sample_factor=1.5)
    ages, ledger = run(train_ahead(tmp_path, 2, rounds))
    assert 0 < max(ages) <= 2
    assert ledger.samples_trained == 16 * NUM_STEPS and ledger.rounds["long"] >= 1
    assert set(ledger.samples_discarded) == {"speculation", "deferral"}


@pytest.mark.parametrize("tail_batching", ["off", "prompts"])
def test_data_that_ends_while_rounds_are_asked_for_ahead_is_trained_to_its_last_prompt(tmp_path, tail_batching):
    async def to_the_end() -> Ledger:
        rounds = RoundsConfig(samples_per_prompt=4, tail_batching=tail_batching)
        domains = (DomainData(name="d", prompts_per_step=4, num_prompts=10),)
        config = structs.replace(CONFIG, max_staleness=2, rounds=rounds, domains=domains, num_epochs=1)
        peers: list[WeightPeer] = []
        async with manager(tmp_path) as live, trainer(live, config) as one, worker(live, "a", peers):
            await one.publish(0)
            with pytest.raises(RoundOver):
                for step in range(NUM_STEPS):
                    for ahead in range(step, step + 3):
                        await one.fleet.request(ahead)
                    async for group in one.fleet.round(step):
                        await one.fleet.take(group)
                    await one.fleet.step_done(step)
                    await one.publish(step + 1)
            scheduler = live.service.lobby.need_run().scheduler
            return scheduler.ledger

    ledger = run(to_the_end())
    assert (ledger.prompts_started, ledger.prompts_trained, ledger.prompts_dropped) == (10, 10, {})
