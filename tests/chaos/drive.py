"""A trainer in a process of its own: `python drive.py URL TOKEN_FILE PROMPTS STEPS`. Prints a JSON line a step."""

import asyncio
import json
import sys
from pathlib import Path

from polyrl.client import Prompt, connect
from polyrl.scheduling.core.parameters import DomainData, RoundsConfig, SchedulerConfig


async def main(url: str, token_file: str, num_prompts: int, num_steps: int) -> None:
    config = SchedulerConfig(
        domains=(DomainData(name="all", prompts_per_step=num_prompts, num_prompts=10_000),),
        max_new_tokens=2048,
        rounds=RoundsConfig(samples_per_prompt=4),
    )
    token = Path(token_file).read_text(encoding="ascii").strip()
    async with connect(url, token, config, prompts=lambda _, prompt, __: Prompt([5, 6, prompt + 8])) as fleet:
        await fleet.publish(0)
        for step in range(num_steps):
            lengths: list[int] = []
            workers: set[str] = set()
            async for group in fleet.round(step):
                lengths += [len(sample.tokens) for sample in group.samples]
                workers |= {segment.worker for sample in group.samples for segment in sample.segments}
                await fleet.take(group)
            await fleet.step_done(step)
            await fleet.publish(step + 1)
            status = await fleet.status()
            said = {"step": step, "samples": len(lengths), "tokens": sum(lengths), "workers": sorted(workers)}
            print(json.dumps({**said, "moves": status.ledger["moves"]}), flush=True)


asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
