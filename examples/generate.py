"""Generate answers through a fleet: python generate.py RUN_DIR NUM_STEPS. Started again, it goes on where it was."""

import asyncio
import json
import sys
from pathlib import Path

from polyrl.client import Prompt, Sample, connect
from polyrl.scheduling.core.parameters import DomainData, RoundsConfig, SchedulerConfig

MATH = DomainData(name="math", prompts_per_step=8, num_prompts=1000)
CONFIG = SchedulerConfig(domains=(MATH,), rounds=RoundsConfig(samples_per_prompt=4), max_new_tokens=2048)


def prompt_of(domain: int, prompt: int, epoch: int) -> Prompt:
    return Prompt([100 + prompt] * 20)  # here your data set and tokenizer


async def reward_of(sample: Sample) -> float:
    return float(sample.finish == "stop")  # here your reward


async def generate(run_dir: Path, num_steps: int) -> None:
    url = json.loads((run_dir / "manager.json").read_text())["url"]
    token = (run_dir / "admin.token").read_text().strip()
    async with connect(url, token, CONFIG, prompts=prompt_of, reward=reward_of) as fleet:
        opened = fleet.opened
        assert opened is not None
        for step in range(min(opened.open_steps, default=opened.last_requested + 1), num_steps):
            await fleet.publish(step)
            async for group in fleet.round(step):
                for sample in group.samples:
                    workers = " then ".join(dict.fromkeys(one.worker for one in sample.segments))
                    print(f"step {step}: {sample.name}, {len(sample.tokens)} tokens by {workers}", flush=True)
                await fleet.take(group)  # here your trainer
            await fleet.step_done(step)


asyncio.run(generate(Path(sys.argv[1]), int(sys.argv[2])))
