"""A sample that is moved in mid-answer reads as if it had not been: real processes, a real model, a real SIGKILL.

The workers draw at temperature 1 in float32. Every token must equal that of a fleet which nobody disturbed.
"""

import asyncio
from pathlib import Path

import pytest
from tests.builtin.tiny_models import save_tiny
from tests.chaos.fleet import POLYRL, Fleet

from polyrl.client import Group, Prompt, connect
from polyrl.scheduling.core.parameters import DomainData, FleetRules, RoundsConfig, SchedulerConfig
from polyrl.wire.frames import Sampling

NEW_TOKENS = 400
NUM_PROMPTS = 4
SAMPLES_PER_PROMPT = 8
CONFIG = SchedulerConfig(
    domains=(DomainData(name="all", prompts_per_step=NUM_PROMPTS, num_prompts=100),),
    max_new_tokens=NEW_TOKENS,
    rounds=RoundsConfig(samples_per_prompt=SAMPLES_PER_PROMPT),
    fleet_rules=FleetRules(heartbeat_timeout_s=2.0),
)


class BuiltinFleet(Fleet):
    """Workers with the builtin engine, as they are started by hand."""

    def __init__(self, folder: Path, num_workers: int, model: Path) -> None:
        super().__init__(
            folder, num_workers, ["--engine", "builtin", "--model", str(model), "slots=16", "kv_tokens=8192"]
        )

    def _worker_argv(self, name: str) -> list[str]:
        url, token = f"http://127.0.0.1:{self.port}", str(self.run_dir / "worker.token")
        return [*POLYRL, "worker", "--join", url, "--token-file", token, "--name", name, *self.engine]


def prompt_of(domain: int, prompt: int, epoch: int) -> Prompt:
    return Prompt([5 + prompt, 6, 7 + prompt, *range(8, 8 + prompt % 40)], Sampling(temperature=1.0, ignore_eos=True))


async def until_mid_answer(fleet: Fleet) -> None:
    """A third of all tokens has arrived: they are in the journal, with 8 bytes a token and a little more."""
    third = NUM_PROMPTS * SAMPLES_PER_PROMPT * NEW_TOKENS * 8 // 3
    while sum(path.stat().st_size for path in (fleet.run_dir / "journal").glob("payload-*")) < third:
        await asyncio.sleep(0.02)


async def generate(folder: Path, model: Path, *, num_workers: int, killed: str | None = None) -> list[Group]:
    groups: list[Group] = []
    async with BuiltinFleet(folder, num_workers, model) as fleet:
        url = f"http://127.0.0.1:{fleet.port}"

        async def kill(name: str) -> None:
            await until_mid_answer(fleet)
            await fleet.workers[name].kill()

        async with asyncio.timeout(100), connect(url, fleet.admin_token, CONFIG, prompts=prompt_of) as trainer:
            while len((await trainer.status()).workers) < num_workers:
                await asyncio.sleep(0.1)
            killing = None if killed is None else asyncio.create_task(kill(killed))
            await trainer.publish(0)
            async for group in trainer.round(0):
                groups.append(group)
                await trainer.take(group)
            await trainer.step_done(0)
        if killing is not None:
            await killing
    return groups


def texts(groups: list[Group]) -> dict[int, list[int]]:
    return {sample.id: sample.tokens.tolist() for group in groups for sample in group.samples}


@pytest.mark.chaos  # test_exactness.py moves samples between engines of one process
@pytest.mark.timeout(240)
def test_answers_that_a_killed_worker_left_behind_go_on_elsewhere_with_the_same_tokens(tmp_path):
    folders = [tmp_path / name for name in ("model", "disturbed", "quiet")]
    for folder in folders:
        folder.mkdir()
    model, disturbed, quiet = folders
    save_tiny("qwen3", model, num_hidden_layers=6)
    groups = asyncio.run(generate(disturbed, model, num_workers=2, killed="w0"))
    samples = [sample for group in groups for sample in group.samples]
    assert len(samples) == NUM_PROMPTS * SAMPLES_PER_PROMPT
    assert {len(sample.tokens) for sample in samples} == {NEW_TOKENS}
    moved = [sample for sample in samples if {segment.worker for segment in sample.segments} == {"w0", "w1"}]
    assert len(moved) >= 4
    assert all(0 < sample.segments[1].from_token < NEW_TOKENS for sample in moved)
    expected = asyncio.run(generate(quiet, model, num_workers=1))
    assert {sample.segments[0].worker for group in expected for sample in group.samples} == {"w0"}
    assert texts(groups) == texts(expected)
    assert len({tuple(text) for text in texts(groups).values()}) == len(samples)
