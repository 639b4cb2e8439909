"""Speculation of the builtin engine on a GPU: are answers the same, and is generation faster?

python tests/gpu/check_speculation.py right            tiny models, with and without; exit code 1 where answers differ
python tests/gpu/check_speculation.py speed [BATCH..]  Qwen3-1.7B's shape, imposed acceptance, at batches 1, 4 and 16
python tests/gpu/check_speculation.py round            a long round: 64 answers, of which a few are long
python tests/gpu/check_speculation.py real MODEL_DIR   a trained model's own answers to 8 questions, 8 of each
python tests/gpu/check_speculation.py table            the time of a round by samples and rows, beside a decoding step

With --small: a tiny model on the device that is here. `speed`, `round` and `real` run off and on in turn, on one engine
that has made its graphs. How often drafts are right is imposed: the model's next token is that of a cycle, with a given
probability. Nothing here fails for its speed; what came out is in docs/results/speculation.md.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportPrivateUsage=false
import asyncio
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[2])]  # it is run as a file

import torch  # noqa: E402
from tests.builtin.tiny_models import save_tiny  # noqa: E402
from tests.gpu.setting import ARCH, DEVICE, SMALL, Sink, need_a_gpu_or_small, synchronize  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from polyrl.bench.engine import Work, make_model  # noqa: E402
from polyrl.engines.builtin.config import BuiltinConfig  # noqa: E402
from polyrl.engines.builtin.engine import BuiltinEngine  # noqa: E402
from polyrl.engines.builtin.gate import ROWS  # noqa: E402
from polyrl.engines.builtin.models import describe  # noqa: E402
from polyrl.engines.builtin.speculating import Speculation  # noqa: E402
from polyrl.engines.builtin.steps import Drafted, DrawRule  # noqa: E402
from polyrl.engines.engine import Job  # noqa: E402
from polyrl.wire.frames import Sampling  # noqa: E402

ON = Sampling(ignore_eos=True)
CYCLE = 64
"""Tokens of the cycle that an imposed model goes through."""
SHARES = (0.97, 0.85, 0.0)
"""How often its next token is the cycle's: high, middling, and never."""
LONG = "--long" in sys.argv
"""With --small: answers long enough for the gate to open, in three turns; for figures of a CPU."""
if LONG:
    sys.argv.remove("--long")
TURNS = 1 if SMALL and not LONG else 3


async def finish(engine: BuiltinEngine, sink: Sink, jobs: list[Job]) -> float:
    """The seconds until all have ended."""
    began = time.perf_counter()
    for job in jobs:
        engine.generate(job)
    while not all(job.lease in sink.ends for job in jobs):
        assert engine.health() is None, engine.health()
        await asyncio.sleep(0.002)
    return time.perf_counter() - began


# Right


def check_right() -> bool:
    is_right = True
    cases = [("qwen3", "float32", False), ("mistral", "float32", False), ("gemma3_text", "float32", False)]
    if DEVICE == "cuda":
        cases += [("qwen3", "float32", True), ("qwen3", "bfloat16", False), ("qwen3", "bfloat16", True)]
    for family, dtype, compiled in cases:
        folder = save_tiny(family, Path(tempfile.mkdtemp()), tie_word_embeddings=False, head_dim=64)
        for sampling in (Sampling(temperature=0.0, ignore_eos=True), Sampling(temperature=0.3, ignore_eos=True)):
            is_right &= asyncio.run(compare(folder, dtype, sampling, compiled=compiled))
    return is_right


async def compare(folder: Path, dtype: str, sampling: Sampling, *, compiled: bool) -> bool:
    """In float32, tokens are equal; in bfloat16 the log-probabilities are those of the model."""
    prompts = [[5 + i] * (3 + 40 * i) + [9, 10 + i] for i in range(4)]
    new = 24 if SMALL else 128
    found: dict[str, Sink] = {}
    counts: Any = None
    for way in ("off", "always"):
        engine, sink = BuiltinEngine(
            BuiltinConfig(
                model=str(folder), device=DEVICE, dtype=dtype, slots=8, kv_tokens=8192, compile=compiled,
                speculation=way,
            )
        ), Sink()  # fmt: skip
        await engine.start(sink)
        for turn in range(3):  # from the second on, earlier answers are drafts
            its = [Job(100 * turn + at + 1, at, prompts[at % 4], [], new - at, 7 + at, sampling) for at in range(8)]
            await finish(engine, sink, its)
        counts = engine.stats().speculated
        await engine.close()
        found[way] = sink
    off, on = found["off"], found["always"]
    equal = sum(off.text[lease] == on.text[lease] for lease in off.text) / len(off.text)
    error = logprob_error(folder, dtype, sampling, prompts, on)
    told = {
        "family": family_of(folder), "dtype": dtype, "temperature": sampling.temperature, "compiled": compiled,
        "answers_equal": equal, "logprob_error": error, **counts._asdict(),
    }  # fmt: skip
    is_right = counts.num_accepted > 0 and (equal == 1.0 and error < 1e-3 if dtype == "float32" else error < 0.05)
    print(json.dumps({"right": is_right} | told), flush=True)
    return is_right


def family_of(folder: Path) -> str:
    return json.loads((folder / "config.json").read_text())["model_type"]


@torch.no_grad()
def logprob_error(folder: Path, dtype: str, sampling: Sampling, prompts: list[list[int]], sink: Sink) -> float:
    """The largest mean error of an answer against transformers' own forward pass."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(DEVICE)
    worst = 0.0
    for lease, text in sink.text.items():
        prompt = prompts[(lease - 1) % 100 % 4]
        logits = model(torch.tensor([[*prompt, *text]], device=DEVICE)).logits[0, len(prompt) - 1 : -1].float()
        logprobs = torch.log_softmax(logits / (sampling.temperature or 1.0), -1)
        theirs = logprobs.gather(1, torch.tensor(text, device=DEVICE).unsqueeze(1)).squeeze(1)
        worst = max(worst, (theirs - torch.tensor(sink.logprobs[lease], device=DEVICE)).abs().mean().item())
    return worst


# Speed


@torch.no_grad()
def impose(model: Any, share: float) -> None:
    """Make the next token that of a cycle with probability `share`; otherwise any token, all equally likely."""
    vocab, width = model.config.vocab_size, model.config.hidden_size
    for layer in model.model.layers:  # what layers add must not drown the embedding, in wide models too
        layer.self_attn.o_proj.weight.mul_(1e-5)
        layer.mlp.down_proj.weight.mul_(1e-5)
    places = torch.nn.functional.normalize(torch.randn(CYCLE, width, device=DEVICE), dim=1)
    embedding = model.model.embed_tokens.weight
    embedding.copy_(places[torch.arange(vocab, device=DEVICE) % CYCLE])
    head = torch.zeros_like(embedding)
    if share > 0:
        height = math.log(vocab * share / (1 - share)) / math.sqrt(width)
        head[:CYCLE] = (places.roll(1, 0) * height).to(head.dtype)
    model.lm_head.weight = torch.nn.Parameter(head, requires_grad=False)


def imposed_model(share: float) -> Any:
    torch.manual_seed(0)
    model = make_model(Work(ARCH, None, 1, 16, 16), DEVICE)
    impose(model, share)
    return model


class Bench:
    """One engine, on which speculation is switched off and on."""

    def __init__(self, model: Any, slots: int, context: int) -> None:
        config = BuiltinConfig(
            model="bench", device=DEVICE, slots=slots, kv_tokens=slots * (context + 128), max_context=context,
            speculation="off",
        )  # fmt: skip
        self.engine, self.sink = BuiltinEngine(config, describe(model, "bench")), Sink()
        self._lease = 0
        self._speculation: Speculation | None = None

    async def start(self) -> None:
        await self.engine.start(self.sink)

    def jobs(self, prompts: list[list[int]], lengths: list[int], sampling: Sampling = ON) -> list[Job]:
        """New leases and new seeds, for samples of these lengths."""
        its: list[Job] = []
        for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            self._lease += 1
            its.append(Job(self._lease, number, prompt, [], length, 7919 * self._lease, sampling))
        return its

    async def warm_up(self, jobs: list[Job]) -> None:
        """Make all graphs that come up, of decoding and of rounds."""
        runner = self.engine._runner
        assert runner is not None
        for num in sorted({2, 4, 8, 16, 32}):
            for rows in ROWS:
                await asyncio.get_running_loop().run_in_executor(self.engine._thread, runner.prepare_rows, num, rows)
        await self.run(jobs, is_on=False)
        prompts = [job.prompt for job in jobs]  # they end one by one, so that smaller batches have graphs too
        await self.run(
            self.jobs(prompts, [min(32 * at, jobs[0].max_tokens) for at in range(1, 1 + len(jobs))]), is_on=False
        )
        self._speculation = None

    async def run(self, jobs: list[Job], *, is_on: bool) -> dict[str, Any]:
        if is_on and self._speculation is None:
            self._speculation = Speculation(ROWS[-1] - 1)
        self.engine._speculation = self._speculation if is_on else None
        before = self._speculation.counts if is_on and self._speculation is not None else None
        await self.engine.forget_cache()
        seconds = await finish(self.engine, self.sink, jobs)
        num = sum(len(self.sink.text[job.lease]) for job in jobs)
        told: dict[str, Any] = {"on": is_on, "s": round(seconds, 3), "tok_s": round(num / seconds)}
        if before is not None and self._speculation is not None:
            rounds, drafted, right = (now - then for now, then in zip(self._speculation.counts, before, strict=True))
            told |= {"rounds": rounds, "drafted": drafted, "accepted": right, "share_by_drafts": round(right / num, 3)}
            told |= {"gate": self._speculation._gate.state()}
        return told


async def in_turn(bench: Bench, jobs: "Any", name: dict[str, Any]) -> None:
    """Off and on, in turn; each turn has prompts and seeds of its own."""
    await bench.warm_up(jobs(0))
    runs: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for turn in range(1, 1 + 2 * TURNS):
        is_on = turn % 2 == 0
        runs[is_on].append(await bench.run(jobs(turn), is_on=is_on))
        print(json.dumps(name | runs[is_on][-1]), flush=True)
    rates = {is_on: statistics.median(one["tok_s"] for one in its) for is_on, its in runs.items()}
    print(json.dumps(name | {"times": round(rates[True] / rates[False], 3)}), flush=True)


def prompt_of(number: int, length: int) -> list[int]:
    return [CYCLE + (7919 * number + 31 * at) % 97 for at in range(length)]


async def check_speed(batches: list[int]) -> None:
    prompt, new = (16, 600 if LONG else 64) if SMALL else (256, 1536)
    for share in SHARES:
        model = imposed_model(share)
        for batch in batches:
            bench = Bench(model, batch, prompt + new)
            await bench.start()

            def jobs(turn: int, bench: Bench = bench, batch: int = batch) -> list[Job]:
                its = [prompt_of(100 * turn + number // 4, prompt) for number in range(batch)]
                return bench.jobs(its, [new] * batch)

            await in_turn(bench, jobs, {"share": share, "batch": batch})
            await bench.engine.close()
        del model


async def check_round() -> None:
    """64 answers in groups of 8: most of a few hundred tokens, one in sixteen of several thousand."""
    longest = 96 if SMALL else 4096
    lengths = [longest - 37 * at if at % 16 == 5 else longest // 16 + at * longest // 1024 for at in range(64)]
    if SMALL:
        lengths = lengths[:16]
    for share in SHARES:
        model = imposed_model(share)
        bench = Bench(model, len(lengths), 64 + longest)
        await bench.start()

        def jobs(turn: int, bench: Bench = bench) -> list[Job]:
            its = [prompt_of(100 * turn + number // 8, 64) for number in range(len(lengths))]
            return bench.jobs(its, [max(8, one) for one in lengths])

        await in_turn(bench, jobs, {"round": len(lengths), "share": share})
        await bench.engine.close()
        del model


async def check_real(folder: str) -> None:
    from tests.gpu.check_moves import questions

    model = make_model(Work(None, folder, 1, 16, 16), DEVICE)
    asked = questions(folder)
    for temperature in (1.0, 0.6):
        bench = Bench(model, 64, 2048)
        await bench.start()

        def jobs(turn: int, bench: Bench = bench, temperature: float = temperature) -> list[Job]:
            its = [asked[(8 * turn + number // 8) % len(asked)] for number in range(64)]
            return bench.jobs(its, [1024] * 64, Sampling(temperature=temperature))

        await in_turn(bench, jobs, {"model": Path(folder).name, "temperature": temperature})
        await bench.engine.close()


async def check_table() -> None:
    """Rounds at a context of 1,024, from one graph each, with all that the host does for them."""
    context = 128 if SMALL else 1024
    samples = (1, 2) if SMALL else (1, 2, 4, 8, 16, 32)
    bench = Bench(imposed_model(0.5), max(samples), context + 64)
    await bench.start()
    engine = bench.engine
    runner = engine._runner
    assert runner is not None
    width = -(-(context + 64) // 32)

    def time_rounds(num: int, rows: int) -> float:
        its = [
            Drafted([3] * rows, context, tuple(range(at * width, (at + 1) * width)), DrawRule(ON, 5 + at, 9))
            for at in range(num)
        ]
        runner.prepare_rows(num, rows)
        took: list[float] = []
        for _ in range(5 if SMALL else 50):
            synchronize()
            began = time.perf_counter()
            runner.verify(its, rows)
            took.append(time.perf_counter() - began)
        return statistics.median(took) * 1e3

    for num in samples:
        its = bench.jobs([prompt_of(at, context - 64) for at in range(num)], [64 + 48] * num)
        await bench.run(its, is_on=False)
        told: dict[str, Any] = {"samples": num}
        for rows in ROWS:
            told[f"rows_{rows}_ms"] = round(
                await asyncio.get_running_loop().run_in_executor(engine._thread, time_rounds, num, rows), 3
            )
        bench._speculation = gauge = Speculation(1)
        await bench.run(bench.jobs([prompt_of(9 + at, context - 64) for at in range(num)], [112] * num), is_on=True)
        decoding = gauge._gate._decoding_s.get(num)
        told["decoding_ms"] = decoding and round(decoding * 1e3, 3)
        print(json.dumps(told), flush=True)
    await engine.close()


if __name__ == "__main__":
    need_a_gpu_or_small()
    what, *rest = sys.argv[1:] or ["right"]
    if what == "right":
        sys.exit(0 if check_right() else 1)
    if what == "speed":
        asyncio.run(check_speed([int(one) for one in rest] or ([2] if SMALL else [1, 4, 16])))
    elif what == "round":
        asyncio.run(check_round())
    elif what == "real":
        asyncio.run(check_real(rest[0]))
    elif what == "table":
        asyncio.run(check_table())
    else:
        sys.exit(f"{sys.argv[0]}: got {what!r}, expected right, speed, round, real or table")
