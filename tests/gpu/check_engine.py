"""The builtin engine on a GPU: is it right, and how fast? Run by hand on a machine that has one; CI has none.

python tests/gpu/check_engine.py right [FAMILY..] against transformers; exit code 1 where it is not
python tests/gpu/check_engine.py speed [eager]    qwen3-1.7b at batches 256 and 64
python tests/gpu/check_engine.py stream [KIND..]  more answers than places
python tests/gpu/check_engine.py table            batches, contexts, a shared prompt
python tests/gpu/check_engine.py peer             transformers' continuous batching alone
python tests/gpu/check_engine.py profile [eager]  where a decoding step's time goes; `profile chunk`: a prompt's chunk
python tests/gpu/check_engine.py tune             the decode kernel alone

With --small: tiny models on the device that is here. Without a GPU, kernels and graphs are emulated where a mode is
about them (tests/builtin/emulated_gpu.py).
"""

# pyright: reportArgumentType=false, reportCallIssue=false
import asyncio
import json
import logging
import random
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

sys.path[:0] = [  # it is run as a file
    str(Path(__file__).parents[2] / "src"),
    str(Path(__file__).parents[2]),
]

import torch  # noqa: E402
from tests.builtin.tiny_models import save_tiny  # noqa: E402
from tests.gpu.setting import (  # noqa: E402
    ARCH,
    DEVICE,
    SMALL,
    Sink,
    need_a_gpu_or_small,
    print_profile,
    synchronize,
    time_ms,
)
from transformers import AutoModelForCausalLM  # noqa: E402

from polyrl.bench.engine import Work, make_model, measure, prompts_of  # noqa: E402
from polyrl.engines.builtin.batching import Chunk, Member  # noqa: E402
from polyrl.engines.builtin.config import BuiltinConfig  # noqa: E402
from polyrl.engines.builtin.engine import BuiltinEngine  # noqa: E402
from polyrl.engines.builtin.models import describe  # noqa: E402
from polyrl.engines.builtin.steps import DrawRule  # noqa: E402
from polyrl.engines.engine import Job  # noqa: E402
from polyrl.wire.frames import Sampling  # noqa: E402


async def generate(folder: Path, jobs: list[Job], **config) -> Sink:
    engine = BuiltinEngine(BuiltinConfig(model=str(folder), device=DEVICE, block_tokens=32, **config))
    sink = Sink()
    await engine.start(sink)
    for job in jobs:
        engine.generate(job)
    began = time.monotonic()
    while len(sink.ends) < len(jobs):
        assert engine.health() is None, engine.health()
        assert time.monotonic() - began < 120
        await asyncio.sleep(0.01)
    await engine.close()
    return sink


PROMPT, NEW = (16, 24) if SMALL else (256, 512)
WIDE = {"head_dim": 64}
FAMILIES = (
    ("llama", {}),
    ("qwen2", {}),
    ("qwen3", WIDE),
    ("mistral", WIDE),
    ("gemma", WIDE),
    ("gemma2", {**WIDE, "attn_logit_softcapping": None, "final_logit_softcapping": 5.0}),
    ("gemma3_text", WIDE),
    ("qwen3_moe", WIDE),
)
IN_HALF = ("qwen3", "gemma3_text", "qwen3_moe")
"""In bfloat16 too, where prefill has graphs; a mixture only so."""
ALLOWED = {"float32": 1e-3, "bfloat16": 0.05}
"""Of a log-probability: the largest error in float32; in bfloat16, where now and then another expert is chosen, a
sample's mean."""


def check_right(families: list[str]) -> bool:
    is_right = True
    for family, changes in FAMILIES:
        if families and family not in families:
            continue
        folder = save_tiny(family, Path(tempfile.mkdtemp()), tie_word_embeddings=False, **changes)
        dtypes = ["bfloat16"] * (family in IN_HALF) + ["float32"] * (not family.endswith("moe"))
        for dtype in dtypes:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(DEVICE)
            for temperature in (0.0, 1.0):
                for compiled in (False, True) if DEVICE == "cuda" else (False,):
                    print(family, dtype, temperature, "compiled" if compiled else "eager", flush=True)
                    is_right &= compare(folder, model, dtype, temperature, compiled=compiled)
    return is_right


@torch.no_grad()
def compare(folder: Path, model, dtype: str, temperature: float, *, compiled: bool) -> bool:
    prompts = [[5 + i] * (3 + 40 * i) + [9, 10 + i] for i in range(5)]
    prompts += prompts[3:]  # whose last blocks are copied
    sampling = Sampling(temperature=temperature, ignore_eos=True)
    cut = Sampling(temperature=temperature, ignore_eos=True, top_p=0.9)  # log-probabilities are those before it
    jobs = [Job(i, i, prompt, [], 60, 7 + i, cut if i in (1, 3) else sampling) for i, prompt in enumerate(prompts)]
    sink = asyncio.run(generate(folder, jobs, dtype=dtype, slots=4, kv_tokens=2048, chunk_tokens=64, compile=compiled))
    errors, short = [], []
    for i, prompt in enumerate(prompts):
        text = sink.text[i]
        logits = model(torch.tensor([prompt + text]).to(DEVICE)).logits[0].float().cpu()
        theirs = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
        chosen = theirs.gather(1, torch.tensor(text).unsqueeze(1)).squeeze(1)
        errors.append((torch.tensor(sink.logprobs[i]) - chosen).abs())
        short.append(theirs.max(-1).values - chosen)
    of_a_sample = torch.max if dtype == "float32" else torch.mean
    measured = errors + (short if temperature == 0.0 else [])
    is_right = all(float(of_a_sample(one)) < ALLOWED[dtype] for one in measured)
    error, far = torch.cat(errors), torch.cat(short)
    print(
        f"  {'right' if is_right else 'WRONG'}: log-probabilities within {error.max():.1e}, {error.mean():.1e} in the "
        f"mean; tokens at most {far.max():.1e} below the likeliest",
        flush=True,
    )
    return is_right


def check_speed(*, compiled: bool) -> None:
    for batch in (2,) if SMALL else (256, 64):
        result = measure(Work(ARCH, None, batch, PROMPT, NEW, compiled))
        print(json.dumps(result), flush=True)


def table() -> None:
    """How it grows: batches and contexts, then a group that shares its prompt, then transformers on the same work."""
    works = [Work(ARCH, None, batch, PROMPT, NEW) for batch in ((2,) if SMALL else (256, 64, 1, 16, 1024))]
    if not SMALL:
        works += [Work(ARCH, None, 64, context, 128) for context in (1024, 4096)]
        works += [Work(ARCH, None, batch, 16_256, 128) for batch in (16, 1)]
    works += [Work(ARCH, None, 8, PROMPT * 8, NEW // 8, group=8), Work(ARCH, None, 1, PROMPT * 8, NEW // 8)]
    for work in works:
        result = measure(work)
        keys = ("batch", "prompt", "new", "tok_s", "job_tok_s", "step_ms", "limit_tok_s", "fraction_of_limit")
        more = ("first_token_s", "prefill_tok_s", "start_s")
        print(json.dumps({key: result[key] for key in (*keys, *more)} | {"group": work.group}), flush=True)


def stream(wanted: list[str]) -> None:
    """Answers of many lengths, more than there are places: while some decode, others come, and prompts are computed."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    kinds = [
        ("plain", 256, 768, Sampling(ignore_eos=True), {}),
        ("batch-invariant", 256, 768, Sampling(ignore_eos=True), {"batch_invariant": True}),
        ("top_p", 64, 128, Sampling(ignore_eos=True, top_p=0.95), {}),
    ]
    for name, slots, num, sampling, config in kinds:
        if wanted and name not in wanted:
            continue
        slots, num, most = (4, 12, NEW) if SMALL else (slots, num, 960)
        work = Work(ARCH, None, num, PROMPT, most)
        model = make_model(work, DEVICE)
        prompts, draw = prompts_of(work, model.config.vocab_size), random.Random(0)
        sizes = [draw.randrange(most // 15, most + 1) for _ in prompts]
        jobs = [Job(i, i, prompt, [], sizes[i], 7 + i, sampling) for i, prompt in enumerate(prompts)]
        asyncio.run(run_stream(name, describe(model, "x"), jobs, slots, config))


async def run_stream(name: str, loaded, jobs: list[Job], slots: int, config: dict) -> None:
    """Twice: the first time makes graphs."""
    own = BuiltinConfig(model="x", device=DEVICE, slots=slots, kv_tokens=slots * 1280, max_context=1280, **config)
    engine, sink = BuiltinEngine(own, loaded), Sink()
    await engine.start(sink)
    for _ in range(2):
        await engine.forget_cache()
        sink.ends.clear()
        spent = count_calls(engine)
        began = time.perf_counter()
        for job in jobs:
            engine.generate(job)
        while len(sink.ends) < len(jobs):
            assert engine.health() is None, engine.health()
            await asyncio.sleep(0.002)
        took = time.perf_counter() - began
        num = sum(job.max_tokens for job in jobs)
        print(json.dumps({"stream": name, "slots": slots, "answers": len(jobs), "tok_s": round(num / took),
                          "seconds": round(took, 2)} | spent), flush=True)  # fmt: skip
    await engine.close()


def count_calls(engine: BuiltinEngine) -> dict[str, float]:
    """How often its runner is called, and how long that takes."""
    spent: dict[str, float] = {}
    for name in ("run", "run_burst"):
        call = getattr(type(engine._runner), name)

        def timed(*its, name: str = name, call=call):
            began = time.perf_counter()
            try:
                return call(engine._runner, *its)
            finally:
                spent[name] = spent.get(name, 0) + 1
                spent[f"{name}_s"] = round(spent.get(f"{name}_s", 0.0) + time.perf_counter() - began, 3)

        setattr(engine._runner, name, timed)
    return spent


def make_runner(batch: int, num_blocks: int, context: int, **options):
    """Return a CudaRunner over a new model; without a GPU it runs on the emulated one."""
    if DEVICE == "cpu":
        from tests.builtin import emulated_gpu

        emulated_gpu.install()
        options["compile_layers"] = False
    from polyrl.engines.builtin.cuda.runner import CudaRunner

    model = make_model(Work(ARCH, None, batch, PROMPT, NEW), DEVICE)
    return CudaRunner(describe(model, "x"), num_blocks, 32, batch, context, **options)


def profile(*, compiled: bool) -> None:
    """Where a decoding step's time goes."""
    batch, context, steps = (2, 64, 2) if SMALL else (256, 768, 8)
    at, each = context * 2 // 3, context // 32
    runner = make_runner(batch, batch * each, context, compile_layers=compiled)
    chunks, wanted = [], []
    for number in range(batch):
        member = Member(number, [5] * (at + 1), context)
        member.blocks = list(range(number * each, (number + 1) * each))
        chunks.append(Chunk(member, at, 1, True))
        wanted.append(DrawRule(Sampling(), number, context // 3))
    runner.run_burst(chunks, wanted, steps)
    synchronize()
    began = time.perf_counter()
    for _ in range(4):
        runner.run_burst(chunks, wanted, steps)
    synchronize()
    step_ms = (time.perf_counter() - began) / 4 / steps * 1e3
    print(f"step {step_ms:.3f} ms at context {at}, batch {batch}", flush=True)
    print_profile(lambda: runner.run_burst(chunks, wanted, 4), 4, 22)


def profile_chunk() -> None:
    """Where the time of a prompt's chunk goes, when it is computed by itself, as with batch_invariant."""
    num = 16 if SMALL else 256
    runner = make_runner(4, 64, 768, compile_layers=True, invariant_tokens=32 if SMALL else 512)
    member = Member(1, [5] * num, 768)
    member.blocks = list(range(8))
    step = [Chunk(member, 0, num, True)], [DrawRule(Sampling(), 1, 0)]
    repeats = 1 if SMALL else 20
    for _ in range(1 if SMALL else 5):
        runner.run(*step)
    began = time.perf_counter()
    for _ in range(repeats):
        runner.run(*step)
    print(f"{(time.perf_counter() - began) / repeats * 1e3:.2f} ms a chunk", flush=True)
    print_profile(lambda: runner.run(*step), 1, 15)


def tune() -> None:
    """The decode kernel alone, over ways to run it."""
    if DEVICE == "cpu":
        from tests.builtin import emulated_gpu

        emulated_gpu.install()
    from polyrl.engines.builtin.cuda import kernels

    batch, context, num_kv, heads, dim = (2, 64, 2, 4, 32) if SMALL else (256, 512, 8, 16, 128)
    for block in (32,) if SMALL else (32, 64, 128):
        per = context // block + 1
        keys = torch.randn(batch * per, num_kv, block, dim, dtype=torch.bfloat16, device=DEVICE)
        values = torch.randn_like(keys)
        tables = torch.randperm(batch * per, device=DEVICE).view(batch, per).int()
        positions = torch.full((batch,), context - 1, device=DEVICE)
        query = torch.randn(batch, heads, dim, dtype=torch.bfloat16, device=DEVICE)
        key = torch.randn(batch, num_kv, dim, dtype=torch.bfloat16, device=DEVICE)
        for warps in (1,) if SMALL else (1, 2, 4, 8):
            for stages in (2,) if SMALL else (2, 3, 4, 5):
                kernels.DECODE_TUNING = {"num_warps": warps, "num_stages": stages}
                its = (query, key, key, keys, values, tables, positions, dim**-0.5, kernels.EVERYTHING, 1)
                ms = time_ms(partial(kernels.paged_decode, *its))
                rate = 2 * batch * context * num_kv * dim * 2 / ms / 1e9
                print(f"block {block} warps {warps} stages {stages}: {ms * 1e3:7.1f} us {rate:5.2f} TB/s", flush=True)


if __name__ == "__main__":
    need_a_gpu_or_small()
    if sys.argv[1] == "right":
        sys.exit(0 if check_right(sys.argv[2:]) else 1)
    elif sys.argv[1] == "table":
        table()
    elif sys.argv[1] == "stream":
        stream(sys.argv[2:])
    elif sys.argv[1] == "peer":
        from benchmarks.engine import run_transformers

        peer_work = Work(ARCH, None, 2 if SMALL else 256, PROMPT, NEW // 4)
        print(json.dumps(run_transformers(peer_work, make_model(peer_work, DEVICE), DEVICE)._asdict()), flush=True)
    elif sys.argv[1] == "tune":
        tune()
    elif sys.argv[1:] == ["profile", "chunk"]:
        profile_chunk()
    elif sys.argv[1] == "profile":
        profile(compiled=sys.argv[2:] != ["eager"])
    else:
        check_speed(compiled=sys.argv[2:] != ["eager"])
