"""Seconds that a step waits until it is on disk: for the log of every step, now and then for a checkpoint's copy.

    make bench NAME=checkpoints ARGS='[--parameters MILLIONS] [--every K] [--dir DIR] [--json]'

The state is that of AdamW on float32 weights, in tensors as SmolLM2-135M has them; the steps' groups are random, 32
prompts of 8 answers of 512 tokens. Nothing is trained: what is measured is the code of trainer/state/saving.py
on this machine's memory and on the disk of DIR. `waited_for_s` is what every step would cost if it waited for the whole
checkpoint.
"""

import argparse
import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

import numpy as np
import torch

from polyrl.trainer.batch import TrainSample
from polyrl.trainer.state import checkpoint
from polyrl.trainer.state.checkpoint import Keep, TrainerState
from polyrl.trainer.state.saving import Rules, Saver

NUM_PROMPTS, NUM_ANSWERS, ANSWER_TOKENS, PROMPT_TOKENS = 32, 8, 512, 128
_HIDDEN, _WIDE = 576, 1536


def make_state(num_parameters: int) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    number, left = 0, num_parameters
    while left > 0:
        rows = min(_WIDE, -(-left // _HIDDEN))
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            state[f"policy/{kind}/{number}"] = torch.randn(rows, _HIDDEN)
        left -= rows * _HIDDEN
        number += 1
    return state


def make_groups(step: int) -> list[list[TrainSample]]:
    rng = np.random.default_rng(step)

    def sample(group: int) -> TrainSample:
        prompt, answer = (rng.integers(0, 49_152, num).astype(np.int32) for num in (PROMPT_TOKENS, ANSWER_TOKENS))
        return TrainSample(prompt, answer, rng.normal(size=ANSWER_TOKENS).astype(np.float32), 1.0, group)

    return [[sample(group) for _ in range(NUM_ANSWERS)] for group in range(NUM_PROMPTS)]


async def measure(folder: Path, state: dict[str, torch.Tensor], every: int) -> dict[str, float]:
    """Two checkpoints: the first has to find its memory, the second is what a run sees from then on."""
    saver = Saver(folder, TrainerState(next_step=0), Rules(every, Keep(2)), state.items, newest=0, num_steps=3 * every)
    waits: list[float] = []
    written_s = 0.0
    for step in range(2 * every):
        groups = await asyncio.to_thread(make_groups, step)
        began = time.perf_counter()
        await saver.trained(step, [groups])
        waits.append(time.perf_counter() - began)
        if step == every - 1:
            began = time.perf_counter()
            await saver.finish()
            written_s = time.perf_counter() - began
    await saver.finish()
    began = time.perf_counter()
    checkpoint.save(folder, TrainerState(next_step=3 * every), state)
    at_once_s = time.perf_counter() - began
    log_s = [one for number, one in enumerate(waits, 1) if number % every]
    logged = [one.stat().st_size for one in (folder / checkpoint.FOLDER / "redo").iterdir()]
    return {
        "checkpoint_mb": sum(one.nbytes for one in state.values()) / 1e6,
        "log_mb": fmean(logged) / 1e6,
        "log_s": median(log_s),
        "log_max_s": max(log_s),
        "first_copy_s": waits[every - 1] - median(log_s),
        "copy_s": waits[-1] - median(log_s),
        "mean_s": fmean(waits[every:]),
        "written_beside_s": written_s,
        "waited_for_s": at_once_s,
    }


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=134.5, help="millions of them")
    parser.add_argument("--every", type=int, default=10, help="checkpoint.every_steps")
    parser.add_argument("--dir", type=Path, help="on the disk to be measured")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="polyrl-checkpoints-", dir=args.dir))
    try:
        found = asyncio.run(measure(folder, make_state(int(args.parameters * 1e6)), args.every))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if args.json:
        print(json.dumps({name: round(one, 4) for name, one in found.items()}))
    else:
        for name, one in found.items():
            print(f"{name:18} {one:10.3f}")
    return 0
