"""The parallelism planner, live: the scheduler plans a width, whoever started the engines hears it, and changes them.

Engines are emulated here; `tests/engines/test_planned_widths.py` does the same with vLLM's servers.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.integration import live

from polyrl.config import build
from polyrl.config.recipe import Recipe
from polyrl.engines.emulated import EmulatedEngine
from polyrl.errors import ConfigError
from polyrl.journal.files import open_journals
from polyrl.journal.records import resume_scheduler
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core.parameters import DomainData, ParallelismConfig, RoundsConfig, SchedulerConfig
from polyrl.scheduling.rules.parallelism import DecodeSpeed, ModelShape
from polyrl.wire.dial import Dialer
from polyrl.worker.agent import WorkerAgent, WorkerOptions

SHAPE = ModelShape(num_layers=4, num_kv_heads=4, head_dim=8, dtype_bytes=2, weight_bytes=1000, activation_bytes=0)
WIDE_IS_FASTER = DecodeSpeed(fixed_s=0.01, per_sample_s=0.0, per_context_token_s=0.0, tp_exponent=0.9)
ENGINE = replace(live.ENGINE, slots=64, tokens_per_s=20_000.0, median_tokens=6.0)


def config() -> SchedulerConfig:
    planned = ParallelismConfig(
        enabled=True, engines="fleet", num_devices=2, reshape_s=0.0, model=SHAPE, speed=WIDE_IS_FASTER
    )
    domain = DomainData(name="d", prompts_per_step=32, num_prompts=200)
    rounds = RoundsConfig(samples_per_prompt=8)
    return replace(live.CONFIG, domains=(domain,), rounds=rounds, max_new_tokens=16, parallelism=planned)


@asynccontextmanager
async def planned_worker(manager: live.Live, name: str, width: int) -> AsyncIterator[WorkerAgent]:
    options = WorkerOptions(name, num_devices=width, planned=True)
    agent = WorkerAgent(EmulatedEngine(ENGINE), Dialer(manager.url, manager.token("worker")), options)
    life = asyncio.create_task(agent.run())
    try:
        await live.until(lambda: live.is_connected(manager, name), f"{name} is connected")
        yield agent
    finally:
        agent.drain("the engines are reshaped")
        with contextlib.suppress(asyncio.CancelledError):
            await life


def test_a_width_that_is_planned_is_put_into_force_between_two_rounds(tmp_path: Path):
    async def scenario() -> None:
        async with live.manager(tmp_path) as manager, live.trainer(manager, config()) as fleet:
            await fleet.publish(0)
            async with planned_worker(manager, "worker-0", 1), planned_worker(manager, "worker-1", 1):
                await live.play_round(fleet, 0)
                plan = await fleet.until_planned(1)
            assert (plan.tensor_parallel, plan.num_engines) == (2, 1)
            async with planned_worker(manager, "worker-2", 2):
                await fleet.publish(1)
                groups = await live.play_round(fleet, 1)
                assert {one.worker for group in groups for sample in group.samples for one in sample.segments} == {
                    "worker-2"
                }

    live.run(scenario(), 60.0)
    scheduler, planned = None, list[c.Reshape]()
    for header, records in open_journals(tmp_path):
        scheduler = resume_scheduler(header, scheduler)
        for record in records:
            planned += [one for one in scheduler.handle(record.event, record.now) if isinstance(one, c.Reshape)]
    assert [one.tensor_parallel for one in planned] == [2]
    assert planned[0].why


def test_a_trainer_that_comes_back_hears_the_width_again(tmp_path: Path):
    async def scenario() -> None:
        async with live.manager(tmp_path) as manager:
            async with live.trainer(manager, config()) as fleet:
                await fleet.publish(0)
                async with planned_worker(manager, "worker-0", 1), planned_worker(manager, "worker-1", 1):
                    await live.play_round(fleet, 0)
                    await fleet.until_planned(1)
            async with live.trainer(manager, config()) as fleet:
                assert (await fleet.until_planned(1)).tensor_parallel == 2

    live.run(scenario(), 60.0)


@pytest.mark.parametrize(
    ("fleet", "said"),
    [
        ({"workers": 2}, "expected servers, vllm or sglang, with two devices or more"),
        ({"workers": 1, "engine": "vllm"}, "expected servers, vllm or sglang, with two devices or more"),
    ],
)
def test_a_recipe_whose_engines_cannot_change_is_refused_with_a_line(fleet: dict[str, object], said: str):
    tree = {"name": "r", "model": {"path": "m"}, "data": {"source": "arithmetic"}, "fleet": fleet}
    with pytest.raises(ConfigError, match=said):
        build({**tree, "parallelism": {"enabled": True}}, Recipe)
