"""The training loop against a real manager, with workers that emulate an engine and steps that only count."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tests.integration import live

from polyrl.client import Sample
from polyrl.config.recipe import DataSection, ModelSection, Recipe, TrainSection
from polyrl.scheduling.parameters import DomainData
from polyrl.trainer.batch import Group
from polyrl.trainer.devices import Devices
from polyrl.trainer.loop import Loop, Offer, StepReport
from polyrl.trainer.step import Added, StepStats

NUM_PROMPTS = 6
DOMAIN = DomainData(name="d", prompts_per_step=NUM_PROMPTS, num_prompts=50)


class CountingSteps:
    device_type = "cpu"

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self._step = 0

    def begin(self, step: int, num_steps: int | None = None) -> None:
        self._step = step

    def add(self, groups: Sequence[Group]) -> Added:
        self.groups += groups
        return Added(len(groups))

    def finish(self) -> StepStats:
        return StepStats(self._step, Added(len(self.groups)), updated=True, metrics={})

    def abort(self) -> None: ...


class Publisher:
    async def publish(self, version: int) -> Offer:
        return Offer(version, "", ())


class Listener:
    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    async def step_begins(self, step: int) -> None: ...

    async def groups_trained(self, step: int, num: int) -> None: ...

    async def step_ended(self, report: StepReport) -> None:
        self.reports.append(report)

    async def saves(self) -> None: ...


@pytest.mark.parametrize("mode", ["streaming", "synchronous"])
def test_a_group_that_teaches_nothing_is_replaced_before_its_step_is_trained(mode: Any, tmp_path: Path):
    config = replace(live.CONFIG, domains=(DOMAIN,), streaming=mode == "streaming")
    if mode == "synchronous":
        config = replace(config, rewards=replace(config.rewards, as_finished=False))
    recipe = Recipe(
        name="r",
        model=ModelSection(path="m"),
        data=DataSection(source="arithmetic"),
        train=TrainSection(mode=mode, steps=1),
    )
    seen: dict[int, int] = {}

    async def reward_of(sample: Sample) -> float:
        """Of every second prompt all answers are equally right."""
        place = seen.setdefault(sample.origin.prompt, len(seen))
        return 1.0 if place % 2 else float(sample.id % 2)

    steps, listener = CountingSteps(), Listener()

    def prompt_tokens(domain: int, prompt: int) -> Any:
        return np.array(live.prompt_of(domain, prompt, 0).tokens, np.int32)

    async def scenario() -> None:
        async with (
            live.manager(tmp_path) as manager,
            live.honest_worker(manager),
            live.trainer(manager, config, reward=reward_of) as fleet,
        ):
            devices = Devices()
            await Loop(recipe, fleet, steps, devices, Publisher(), prompt_tokens, listener).run()
            devices.close()

    live.run(scenario())
    (report,) = listener.reports
    assert len(steps.groups) == NUM_PROMPTS
    assert report.num_filtered > 0
    assert report.line.num_groups == NUM_PROMPTS
    assert len(report.rewards) == live.CONFIG.rounds.samples_per_prompt * (NUM_PROMPTS + report.num_filtered)
    numbers = [group[0].group for group in steps.groups]
    assert mode == "streaming" or numbers == sorted(numbers)
