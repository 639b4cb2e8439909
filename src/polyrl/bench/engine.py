"""How fast the builtin engine is on this machine: tokens a second, against what memory bandwidth allows.

The limit counts the bytes that a decoding step must read: every parameter once, except an embedding that is not also
the output layer, of which a step reads one row a sample; and every sample's KV cache at its mean length. They are
divided by the bandwidth of a large copy (read and written bytes), measured in the same run. `tok_s` is the decoding
rate with all samples running, and compares with the limit; `job_tok_s` counts the whole job, prompts included.
"""

import asyncio
import gc
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from polyrl.bench.machine import commit
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
    "small-qwen3": {
        "family": "qwen3",
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 8192,
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


WARM_TOKENS = 24
"""Of an answer before the measured one, in which everything is compiled and captured."""


def measure(work: Work) -> dict[str, Any]:
    """Raises UserError for work that the engine or the model cannot do."""
    model, device = prepare(work)
    result = figures(work, model, device, run_loop(run_engine(work, model, device)))
    del model
    free_memory()
    return result


def prepare(work: Work) -> tuple[Any, str]:
    """Return the model, and the device that it is on."""
    if work.batch > MAX_SLOTS:
        raise UserError(f"--batch: {work.batch}, expected at most {MAX_SLOTS}")
    import torch

    from polyrl.engines.builtin.models import describe

    torch.manual_seed(0)
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model(work, device)
    num_tokens, most = work.prompt + work.new, describe(model, "bench").max_context
    if num_tokens > most:
        raise UserError(f"--prompt and --new: {num_tokens} tokens in all, and the model's context is {most}")
    return model, device


def figures(work: Work, model: Any, device: str, ran: Ran) -> dict[str, Any]:
    import torch

    limit = limit_tok_s(work, model, device)
    tok_s = work.batch / ran.step_ms * 1e3
    return {
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
        "commit": commit(),
    }


def table(result: dict[str, Any]) -> list[str]:
    return [f"{key:<20}{value}" for key, value in result.items()]


def free_memory() -> None:
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
    """Return a prompt for each group; ids that no tokenizer gives a meaning to."""
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
        speculation="off",  # answers are given again with the same seeds, and would be drafts of themselves
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
        await answer(min(WARM_TOKENS, work.new))
        start_s = time.perf_counter() - began
        await engine.forget_cache()
        await answer(min(WARM_TOKENS, work.new))  # what comes up a second time is captured
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
    """Return the bytes of parameters that a decoding step reads: shared memory once, no embedding besides the head."""
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
