"""How fast the builtin engine is on this machine: tokens a second against what memory bandwidth allows, and a peer.

The limit counts the bytes that a decoding step must read: every parameter once, but for an embedding of its own, of
which a step reads a row a sample; and the cache of every sample at its mean length; over the bandwidth of a large copy
(read and written bytes), measured in the same run. `tok_s` is that of decoding, with all samples running, and compares
with the limit; `job_tok_s` counts the whole job, prompts included.

Peers, warm like the engine: transformers' own continuous batching in this process, once; and the vLLM server
(bench_vllm.py), in turns with the engine, where figures are medians. The shorter a job, the more turns.
"""

import asyncio
import gc
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.scratch import scratch

from polyrl.bench.scheduler import commit
from polyrl.engines.builtin.config import MAX_SLOTS
from polyrl.errors import UserError
from polyrl.run.event_loop import run_loop

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3-1.7b": {
        "family": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "tie_word_embeddings": True,
    },
    "tiny-qwen3": {
        "family": "qwen3",
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
}


class Work(NamedTuple):
    arch: str | None
    model: str | None
    batch: int
    prompt: int
    new: int
    compile: bool = True
    group: int = 1
    """So many samples share a prompt."""
    batch_invariant: bool = False


class Ran(NamedTuple):
    seconds: float
    first_token_s: float
    start_s: float
    num_tokens: int
    step_ms: float
    prefill_tok_s: float


_TURNS_S = 8.0
"""The engine's jobs take about so long, all turns together."""
_MIN_TURNS, _MAX_TURNS = 5, 25
_WARM_TOKENS = 24
"""Of an answer that is not measured: everything that is compiled or captured comes first."""


class EngineTurns(NamedTuple):
    ours: list[Ran]
    theirs: list[float]
    """Tokens a second."""

    @property
    def ratio_quartiles(self) -> list[float]:
        """The middle half of what neighbours are to each other: from, and to."""
        ratios = [one.num_tokens / one.seconds / their for one, their in zip(self.ours, self.theirs, strict=True)]
        first, _, third = statistics.quantiles(ratios, n=4)
        return [round(first, 2), round(third, 2)]

    @property
    def median(self) -> Ran:
        return sorted(self.ours, key=lambda one: one.seconds)[len(self.ours) // 2]


def measure(work: Work, *, peer: str | None = None) -> dict[str, Any]:
    if peer == "vllm":
        from benchmarks import vllm_peer as bench_vllm

        bench_vllm.check_installed()
    if work.batch > MAX_SLOTS:
        raise UserError(f"--batch: {work.batch}, expected at most {MAX_SLOTS}")
    if peer == "transformers" and work.new < 2:
        raise UserError(f"--new: {work.new}, expected at least 2 with --peer transformers: its decoding is looked at")
    import torch

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if peer == "vllm" and device != "cpu":
        raise UserError("--peer vllm: it is measured on the CPU; this machine has a GPU")
    torch.set_num_threads(1)
    model = make_model(work, device)
    _check_context(work, model)
    turns = run_loop(run_in_turns(work, model, device)) if peer == "vllm" else None
    ran = run_loop(run_engine(work, model, device)) if turns is None else turns.median
    limit = limit_tok_s(work, model, device)
    tok_s = work.batch / ran.step_ms * 1e3
    result = {
        "arch": work.arch or work.model,
        "batch": work.batch,
        "prompt": work.prompt,
        "new": work.new,
        "tok_s": round(tok_s),
        "job_tok_s": round(ran.num_tokens / ran.seconds),
        "step_ms": round(ran.step_ms, 3),
        "limit_tok_s": round(limit),
        "fraction_of_limit": round(tok_s / limit, 3),
        "first_token_s": round(ran.first_token_s, 3),
        "prefill_tok_s": round(ran.prefill_tok_s),
        "start_s": round(ran.start_s, 1),
        "compile": work.compile and device == "cuda",
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu, 1 thread",
        "torch": torch.__version__,
        "peer": peer,
        "peer_tok_s": None if turns is None else round(statistics.median(turns.theirs)),
        "commit": commit(),
    }
    if peer == "transformers":
        del model  # its layers are compiled and its products merged
        _free_memory()
        model = make_model(work, device)
        theirs = run_transformers(work, model, device)
        result |= {"peer_tok_s": round(theirs.job), "peer_decoding_tok_s": round(theirs.decoding)}
        result["decoding_ratio_to_peer"] = round(tok_s / theirs.decoding, 2)
    if peer is not None:
        result["ratio_to_peer"] = round(result["job_tok_s"] / max(1, result["peer_tok_s"]), 2)
    if turns is not None:
        result |= {"turns": len(turns.ours), "ratio_quartiles": turns.ratio_quartiles}
    del model
    _free_memory()
    return result


def save_quietly(model: Any, folder: str) -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(folder)


def _check_context(work: Work, model: Any) -> None:
    from polyrl.engines.builtin.models import describe

    num, most = work.prompt + work.new, describe(model, "bench").max_context
    if num > most:
        raise UserError(f"--prompt and --new: {num} tokens in all, and the model's context is {most}")


async def run_in_turns(work: Work, model: Any, device: str) -> EngineTurns:
    """The engine and the vLLM server, one after the other, again and again."""
    from benchmarks.vllm_peer import Asked, serve

    turns = EngineTurns([], [])
    with scratch(Path(tempfile.gettempdir())) as folder:  # who is killed leaves it to the next one
        if work.model is None:
            save_quietly(model, str(folder))
        asked = Asked(prompts_of(work, model.config.vocab_size), work.new)
        async with serve(work.model or str(folder), slots=work.batch, max_context=work.prompt + work.new) as server:
            num_turns = _MIN_TURNS
            while len(turns.ours) < num_turns:
                with server.standing_still():
                    turns.ours.append(await run_engine(work, model, device))
                await server.tok_s(asked._replace(new=min(_WARM_TOKENS, work.new)))
                turns.theirs.append(await server.tok_s(asked))
                num_turns = num_turns_for(turns.ours[0].seconds)
    return turns


def num_turns_for(job_s: float) -> int:
    return min(_MAX_TURNS, max(_MIN_TURNS, round(_TURNS_S / job_s)))


def _free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def make_model(work: Work, device: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from polyrl.engines.builtin import models
    from polyrl.engines.builtin.config import BuiltinConfig, fit
    from polyrl.engines.engine import EngineError

    dtype = fit(BuiltinConfig(model=""), device).dtype
    if work.model is not None:
        try:
            return models.load(work.model, dtype, device).model
        except EngineError as error:
            raise UserError(f"--model: {error}") from error
    if work.arch not in ARCHITECTURES:
        raise UserError(f"--arch: {work.arch!r} is unknown; expected one of {', '.join(ARCHITECTURES)}")
    facts = dict(ARCHITECTURES[work.arch])
    config = CONFIG_MAPPING[facts.pop("family")](**facts)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=models.DTYPES[dtype]).eval()


def prompts_of(work: Work, vocab: int) -> list[list[int]]:
    """Each group its own; ids that no tokenizer gives a meaning to."""
    return [
        [3 + (7919 * (number // work.group) + 31 * at) % (vocab - 3) for at in range(work.prompt)]
        for number in range(work.batch)
    ]


async def run_engine(work: Work, model: Any, device: str) -> Ran:
    """Raises UserError when the engine cannot do it."""
    from polyrl.engines.builtin.config import BuiltinConfig
    from polyrl.engines.builtin.engine import BuiltinEngine
    from polyrl.engines.builtin.models import describe
    from polyrl.engines.engine import EngineError, Job
    from polyrl.ids import LeaseId, SampleId
    from polyrl.wire.frames import Sampling

    total = work.prompt + work.new
    config = BuiltinConfig(
        model="bench",
        device=device,
        slots=work.batch,
        kv_tokens=(total + 64) * work.batch,
        max_context=total,
        compile=work.compile,
        batch_invariant=work.batch_invariant,
    )
    sink = ClockSink(work.batch)
    engine = BuiltinEngine(config, describe(model, "bench"))
    prompts = prompts_of(work, model.config.vocab_size)
    sampling = Sampling(ignore_eos=True)

    async def answer(new: int) -> None:
        sink.begin()
        for number, prompt in enumerate(prompts):
            engine.generate(Job(LeaseId(number + 1), SampleId(number), prompt, [], new, 1000 + number, sampling))
        await sink.until_done()

    began = time.perf_counter()
    try:
        await engine.start(sink)
        await answer(min(_WARM_TOKENS, work.new))
        start_s = time.perf_counter() - began
        await engine.forget_cache()
        await answer(min(_WARM_TOKENS, work.new))  # what comes up a second time is captured
        await asyncio.sleep(0.1)
        await engine.forget_cache()
        await answer(work.new)
    except EngineError as error:
        raise UserError(str(error)) from error
    finally:
        await engine.close()
    first_s = sink.looks[0][0] - sink.began
    num_steps = sum(num for at, num in sink.looks if at > sink.all_began)
    step_ms = (sink.looks[-1][0] - sink.all_began) / num_steps * 1e3 if num_steps else first_s * 1e3
    prefill = work.batch / work.group * work.prompt / max(1e-9, sink.all_began - sink.began)
    return Ran(sink.ended_at - sink.began, first_s, start_s, work.batch * work.new, step_ms, prefill)


class ClockSink:
    """A sink that only looks at the clock."""

    def __init__(self, num: int) -> None:
        self._num = num
        self._done = asyncio.Event()
        self.begin()

    def begin(self) -> None:
        self.began = time.perf_counter()
        self.ended_at = self.all_began = 0.0
        self.looks: list[tuple[float, int]] = []
        """When the first sample's tokens came, and how many."""
        self._num_ended = 0
        self._seen: set[int] = set()
        self._failure = ""
        self._done.clear()

    async def until_done(self) -> None:
        """Raises UserError when a sample did not come to its end."""
        await self._done.wait()
        if self._failure:
            raise UserError(self._failure)

    def tokens(self, lease: int, tokens: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        now = time.perf_counter()
        if lease not in self._seen:
            self._seen.add(lease)
            self.all_began = now
        if lease == 1:
            self.looks.append((now, len(tokens)))

    def ended(self, lease: int, reason: str, detail: str = "") -> None:
        if reason not in ("stop", "length"):
            self._failure = f"sample {lease}: {reason}: {detail}"
            self._done.set()
        self._num_ended += 1
        if self._num_ended == self._num:
            self.ended_at = time.perf_counter()
            self._done.set()


def limit_tok_s(work: Work, model: Any, device: str) -> float:
    from polyrl.engines.builtin.models import describe

    loaded = describe(model, "bench")
    element = next(model.parameters()).element_size()
    cache = work.batch * (work.prompt + work.new / 2) * loaded.token_bytes(element)
    return work.batch / ((num_bytes_read(model) + cache) / copy_bandwidth(device))


def num_bytes_read(model: Any) -> int:
    """By a step, of the parameters: those that share memory once, and none of an embedding that is not the head."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    read = {one.data_ptr(): one.numel() * one.element_size() for one in model.parameters()}
    if embedding.data_ptr() != head.data_ptr():
        del read[embedding.data_ptr()]
    return sum(read.values())


def copy_bandwidth(device: str) -> float:
    """Bytes a second, read and written."""
    import torch

    source = torch.empty(1 << (30 if device == "cuda" else 27), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(8):
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return 2 * source.numel() / best


class Theirs(NamedTuple):
    """Tokens a second: of the whole job, and without its first tokens, of which a short job of the same prompts is."""

    job: float
    decoding: float


def run_transformers(work: Work, model: Any, device: str) -> Theirs:
    """transformers' own continuous batching on the same work, after a short job that warms it up."""
    import torch
    from transformers import GenerationConfig

    model.set_attn_implementation("sdpa")
    prompts = prompts_of(work, model.config.vocab_size)

    def seconds(new: int) -> float:
        config = GenerationConfig(max_new_tokens=new, do_sample=True, eos_token_id=-1, pad_token_id=0)
        began = time.perf_counter()
        outputs = model.generate_batch(inputs=prompts, generation_config=config)
        if device == "cuda":
            torch.cuda.synchronize()
        took = time.perf_counter() - began
        num = sum(len(one.generated_tokens) for one in outputs.values())
        if num != work.batch * new:
            raise UserError(f"--peer transformers: {num} tokens came, {work.batch * new} were wanted")
        return took

    few = min(_WARM_TOKENS, work.new // 2)
    seconds(few)
    short, whole = seconds(few), seconds(work.new)
    return Theirs(work.batch * work.new / whole, work.batch * (work.new - few) / max(1e-9, whole - short))
