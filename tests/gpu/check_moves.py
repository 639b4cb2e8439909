"""Samples that move, in bfloat16 on a GPU: how often they agree, what invariance costs, how fast it sleeps and wakes.

python tests/gpu/check_moves.py                Qwen3-1.7B's shape with random weights
python tests/gpu/check_moves.py MODEL_DIR      a trained model, asked 64 questions in words; no prices

With --small: a tiny model on the device that is here. Batch-invariant, what is not moved must agree, else the script
ends with exit code 1. Among the samples are one whose prompt is a token longer than a chunk, one that shares all of its
prompt but the last token, and one with top_p.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[2])]  # it is run as a file

import torch  # noqa: E402
from tests.gpu.setting import ARCH, DEVICE, SMALL, need_a_gpu_or_small, synchronize  # noqa: E402

from polyrl.bench.engine import Work, make_model, measure, prompts_of  # noqa: E402
from polyrl.engines.builtin.config import BuiltinConfig  # noqa: E402
from polyrl.engines.builtin.engine import BuiltinEngine  # noqa: E402
from polyrl.engines.builtin.models import describe  # noqa: E402
from polyrl.engines.engine import Job  # noqa: E402
from polyrl.wire.frames import Sampling  # noqa: E402

NUM, NEW = (8, 48) if SMALL else (64, 256)
CHUNK, BLOCK = 512, 32
TRUNCATED = 2
"""The sample with top_p: its graph ends at the logits."""


class Sink:
    def __init__(self) -> None:
        self.text: dict[int, list[int]] = {}
        self.ends: dict[int, str] = {}

    def tokens(self, lease, tokens, logprobs, version) -> None:
        self.text.setdefault(lease, []).extend(tokens)

    def ended(self, lease, reason, detail="") -> None:
        self.ends[lease] = f"{reason} {detail}".strip()


async def started(model, *, invariant: bool, slots: int = NUM, **more) -> tuple[BuiltinEngine, Sink]:
    config = BuiltinConfig(
        model="bench", dtype="bfloat16", device=DEVICE, slots=slots, kv_tokens=slots * 1024, block_tokens=BLOCK,
        chunk_tokens=2048, max_context=1024, batch_invariant=invariant, **more,
    )  # fmt: skip
    engine, sink = BuiltinEngine(config, describe(model, "bench")), Sink()
    await engine.start(sink)
    return engine, sink


async def finish(engine: BuiltinEngine, sink: Sink, jobs: list[Job]) -> list[list[int]]:
    for job in jobs:
        engine.generate(job)
    while not all(job.lease in sink.ends for job in jobs):
        assert engine.health() is None, engine.health()
        await asyncio.sleep(0.005)
    return [sink.text[job.lease] for job in jobs]


def agreement(one: list[list[int]], other: list[list[int]]) -> dict[str, Any]:
    """The share of answers that are equal, and of tokens before the first difference; which differ, if they are few."""
    pairs = list(zip(one, other, strict=True))
    same = sum(a == b for a, b in pairs)
    before = sum(next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a)) for a, b in pairs)
    shares = {"answers_equal": same / len(pairs), "tokens_before_a_difference": before / sum(len(a) for a, _ in pairs)}
    others = [number for number, (a, b) in enumerate(pairs) if a != b]
    return shares | ({"differ": others} if 0 < len(others) < 8 else {})


def questions(folder: str) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    things = ("apples", "letters", "chairs", "coins", "tickets", "stones", "books", "lamps")
    asked = [
        f"Anna has {7 + 3 * n} {things[n % 8]}, gives {n + 2} to her brother and buys {2 * n + 5} more. "
        "How many does she have now? Think step by step."
        for n in range(NUM)
    ]
    chats = ([{"role": "user", "content": one}] for one in asked)
    return [tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=False) for one in chats]


def awkward(prompts: list[list[int]]) -> list[list[int]]:
    """The first is a token longer than a chunk; the second has all but its last token in common with it."""
    long = (prompts[0] * (1 + CHUNK // len(prompts[0])))[: CHUNK + 1]
    shared = CHUNK // BLOCK // 2 * BLOCK
    return [long, [*long[:shared], prompts[1][0]], *prompts[2:]]


async def compare(model, prompts: list[list[int]], *, invariant: bool, until_end: bool) -> bool:
    """Whether all that should agree does."""
    engine, sink = await started(model, invariant=invariant)
    plain = Sampling(ignore_eos=not until_end)

    def job(base: int, number: int, so_far=()) -> Job:
        sampling = Sampling(ignore_eos=not until_end, top_p=0.95) if number == TRUNCATED else plain
        return Job(base + number, number, prompts[number], list(so_far), NEW, 77 + number, sampling)

    crowd = await finish(engine, sink, [job(1000, n) for n in range(NUM)])
    engine._cache.forget()
    alone = [(await finish(engine, sink, [job(2000, n)]))[0] for n in range(min(8, NUM))]
    engine._cache.forget()
    few = [
        one for at in range(0, NUM // 2, 4) for one in await finish(engine, sink, [job(3000, at + i) for i in range(4)])
    ]
    engine._cache.forget()
    twice = await finish(engine, sink, [job(9000, n) for n in range(NUM)])
    engine._cache.forget()
    cuts = [min(16 + 5 * n % 200, len(crowd[n]) // 2) for n in range(NUM)]
    rest = await finish(engine, sink, [job(4000, n, crowd[n][: cuts[n]]) for n in range(NUM)])
    moved = [crowd[n][: cuts[n]] + rest[n] for n in range(NUM)]
    await engine.sleep()
    taken = torch.full(
        (1 << (20 if SMALL else 33),), 255, dtype=torch.uint8, device=DEVICE
    )  # somebody writes where the cache was
    del taken
    torch.cuda.empty_cache()
    await engine.wake()
    again = await finish(engine, sink, [job(8000, n) for n in range(NUM)])
    agreed = {
        "alone": agreement(crowd[:8], alone), "in fours": agreement(crowd[: NUM // 2], few),
        "twice": agreement(crowd, twice), "after sleeping": agreement(crowd, again),
    }  # fmt: skip
    told = {"invariant": invariant, "tokens": sum(map(len, crowd)), **agreed, "moved": agreement(crowd, moved)}
    print(json.dumps(told), flush=True)
    if not invariant and not until_end:
        await sleep_and_wake(engine, sink, [job(5000, n) for n in range(NUM) if n != TRUNCATED])
        await abort_latency(engine, sink, [job(6000, n) for n in range(NUM) if n != TRUNCATED])
    await engine.close()
    if not invariant and not until_end:
        engine, sink = await started(model, invariant=invariant, in_sleep="offload")
        for base in (5000, 6000):  # the first pins memory
            await sleep_and_wake(engine, sink, [job(base, n) for n in range(NUM) if n != TRUNCATED])
        await engine.close()
    return not invariant or all(one["answers_equal"] == 1.0 for one in agreed.values())


async def sleep_and_wake(engine: BuiltinEngine, sink: Sink, jobs: list[Job]) -> None:
    for job in jobs:
        engine.generate(job)
    while len(sink.text.get(jobs[-1].lease, ())) < NEW // 8:
        await asyncio.sleep(0.002)
    synchronize()
    began = time.perf_counter()
    await engine.sleep()
    asleep = time.perf_counter()
    held = torch.cuda.memory_allocated() / 1e9
    await engine.wake()
    awake = time.perf_counter()
    num = len(sink.text[jobs[-1].lease])
    while len(sink.text[jobs[-1].lease]) == num:
        await asyncio.sleep(0.001)
    going = time.perf_counter()
    print(json.dumps({"sleep_s": asleep - began, "wake_s": awake - asleep, "to_next_token_s": going - awake,
                      "asleep_gb": held}), flush=True)  # fmt: skip
    await finish(engine, sink, [])
    while not all(job.lease in sink.ends for job in jobs):
        await asyncio.sleep(0.005)


async def abort_latency(engine: BuiltinEngine, sink: Sink, jobs: list[Job]) -> None:
    for job in jobs:
        engine.generate(job)
    while len(sink.text.get(jobs[-1].lease, ())) < NEW // 8:
        await asyncio.sleep(0.002)
    took = []
    for job in jobs[: NUM // 3]:
        began = time.perf_counter()
        await engine.abort(job.lease)
        took.append(time.perf_counter() - began)
        await asyncio.sleep(0.03)
    print(
        json.dumps({"abort_ms_median": sorted(took)[len(took) // 2] * 1e3, "abort_ms_max": max(took) * 1e3}), flush=True
    )


def price() -> None:
    for batch in (2,) if SMALL else (256, 64):
        for invariant in (False, True):
            got = measure(Work(ARCH, None, batch, NEW, NEW, batch_invariant=invariant))
            keys = ("batch", "tok_s", "job_tok_s", "step_ms", "limit_tok_s", "fraction_of_limit", "start_s")
            print(json.dumps({"invariant": invariant} | {key: got[key] for key in keys}), flush=True)


if __name__ == "__main__":
    need_a_gpu_or_small()
    torch.manual_seed(0)
    given = sys.argv[1] if len(sys.argv) > 1 else None
    policy = make_model(Work(None if given else ARCH, given, NUM, 128, NEW), DEVICE).bfloat16()
    wanted = questions(given) if given else prompts_of(Work("x", None, NUM, 128, NEW), policy.config.vocab_size)
    wanted = awkward(wanted)
    modes = (False, True)
    held = all(asyncio.run(compare(policy, wanted, invariant=mode, until_end=given is not None)) for mode in modes)
    del policy
    if given is None:
        price()
    sys.exit(0 if held else 1)
