"""How fast the trainer is on this machine, against the device's matrix limit.

A step is forward, backward and update. Its model FLOPs are what the work needs: 6 for each weight of a layer and row,
6 for each weight of the output layer and answer token, and causal attention. Work that is done twice, or for padding,
does not count. The limit is the rate of a large matrix product in the same precision, measured before and after; the
better of both counts.

A plain training loop may take turns with ours (`measure(work, plain_of)`): ratios are medians over
repetitions. On a CPU, one thread, seconds are CPU seconds of the process, so other load on the machine counts for
little, and what is left of it hits all alike.
"""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from polyrl.bench.engine import Work, make_model
from polyrl.bench.machine import commit

QUANTILES: dict[str, tuple[tuple[float, float], ...]] = {
    "math": ((0.05, 151), (0.25, 415), (0.5, 661), (0.75, 1129), (0.9, 2566), (0.95, 4101), (0.99, 16384)),
    "code": ((0.05, 286), (0.25, 481), (0.5, 663), (0.75, 945), (0.9, 1667), (0.95, 2815), (0.99, 16384)),
    "judge": ((0.05, 12), (0.25, 295), (0.5, 520), (0.75, 755), (0.9, 1064), (0.95, 1422), (0.998, 16384)),
}
"""Answer lengths, published by RollPacker for a 14B model with a cap of 16k."""

_GROUP = 8


class TrainWork(NamedTuple):
    arch: str | None = "tiny-qwen3"
    model: str | None = None
    pack_tokens: int = 2048
    num_groups: int = 4
    shorter: int = 16
    """Published lengths are divided by this."""
    repetitions: int = 3
    compile: bool = True
    checkpointing: bool = False


class Bench:
    """Our trainer's step, on work that is drawn from published lengths."""

    def __init__(self, work: TrainWork) -> None:
        import torch

        from polyrl.config.recipe import AlgorithmConfig, OptimizerConfig
        from polyrl.engines.builtin.models import describe
        from polyrl.trainer.model import Policy
        from polyrl.trainer.optimizer import Optimizer
        from polyrl.trainer.step import StepAccumulator

        self.work = work
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        if self.device == "cpu":
            torch.set_num_threads(1)
        torch.manual_seed(0)
        self.policy = Policy(
            describe(make_model(Work(work.arch, work.model, 1, 1, 1), self.device), "bench"),
            gradient_checkpointing=work.checkpointing,
            compile_layers=work.compile,
        )
        self.optimizer = Optimizer(self.policy.parameters(), OptimizerConfig(), 1_000_000)
        self.steps = StepAccumulator(
            self.policy, self.optimizer, AlgorithmConfig(), max_tokens=work.pack_tokens, max_new_tokens=1 << 20
        )
        self.num_steps = 0
        self.vocab = self.policy.loaded.vocab

    # Work

    def draw(self, name: str, seed: int = 0) -> list[list[Any]]:
        """Groups whose answers are as long as the distribution says, cut to the pack."""
        levels, tokens = zip(*QUANTILES[name], strict=True)
        rng = np.random.default_rng(seed)
        shares = rng.uniform(size=(self.work.num_groups, _GROUP))
        lengths = np.exp(np.interp(shares, levels, np.log(tokens))) / self.work.shorter
        cap = self.work.pack_tokens - 8
        return [[self.sample(rng, 8, int(min(cap, max(2, one)))) for one in group] for group in lengths]

    def equal(self, length: int) -> list[list[Any]]:
        rng = np.random.default_rng(0)
        num = max(1, self.work.pack_tokens // length)
        return [[self.sample(rng, 2, length - 1) for _ in range(num)]]

    def sample(self, rng: np.random.Generator, num_prompt: int, num_answer: int) -> Any:
        from polyrl.trainer.batch import TrainSample

        tokens = rng.integers(3, self.vocab, num_prompt + num_answer).astype(np.int32)
        logprobs = np.full(num_answer, -np.log(self.vocab), np.float32)
        return TrainSample(tokens[:num_prompt], tokens[num_prompt:], logprobs, float(rng.normal()))

    def is_micro_batch(self, groups: Sequence[Sequence[Any]]) -> bool:
        """Apply the loop's rule for the size of a micro-batch."""
        from polyrl.config.recipe import TrainSection
        from polyrl.trainer.loop import is_micro_batch

        lengths = [len(one.answer) for group in groups for one in group]
        train = TrainSection(micro_batch_tokens=self.work.pack_tokens)
        return is_micro_batch(len(lengths), sum(lengths), train, self.device)

    def ours(self, calls: Sequence[Sequence[Sequence[Any]]]) -> None:
        self.num_steps += 1
        self.steps.begin(self.num_steps)
        for groups in calls:
            self.steps.add(groups)
        self.steps.finish()

    # Limits

    def flops(self, groups: Sequence[Sequence[Any]]) -> float:
        config = self.policy.model.config
        head = config.vocab_size * config.hidden_size
        body = sum(
            one.numel() for name, one in self.policy.parameters().items() if one.dim() == 2 and ".layers." in name
        )
        total = 0.0
        for one in (one for group in groups for one in group):
            rows = one.num_tokens - 1
            attention = rows * rows * config.num_attention_heads * config.head_dim * config.num_hidden_layers
            total += 6 * (body * rows + head * len(one.answer) + attention)
        return total

    def matrix_rate(self) -> float:
        """FLOP/s of a large product: the best of several."""
        import torch

        size = 8192 if self.device == "cuda" else 1024
        a, b = (torch.randn(size, size, device=self.device, dtype=self.policy.dtype) for _ in range(2))
        best = 0.0
        for _ in range(10):
            seconds = self.time(lambda: a @ b)
            best = max(best, 2 * size**3 / seconds)
        return best

    def time(self, call: Callable[[], object]) -> float:
        """Return seconds on the GPU's clock, or the CPU time of this process: other load is not ours."""
        import torch

        if self.device == "cpu":
            began = time.process_time()
            call()
            return time.process_time() - began
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    def take_turns(self, calls: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
        """Return the seconds of each, every repetition in turn, after one that warms up."""
        for call in calls.values():
            call()
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(self.work.repetitions):
            for name, call in calls.items():
                seconds[name].append(self.time(call))
        return seconds

    def saved_bytes(self, groups: Sequence[Sequence[Any]]) -> tuple[int, int]:
        """Bytes that the first pack keeps for its backward pass, weights left out; and its tokens."""
        import torch

        from polyrl.trainer.packing import make_packs

        pack = make_packs([one for group in groups for one in group], self.work.pack_tokens)[0]
        weights = {one.untyped_storage().data_ptr() for one in self.policy.model.parameters()}
        seen: dict[int, int] = {}

        def keep(one: torch.Tensor) -> torch.Tensor:
            storage = one.untyped_storage()
            if storage.data_ptr() not in weights:
                seen[storage.data_ptr()] = storage.nbytes()
            return one

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
            scores = self.policy.score(pack)
        scores.logprobs.sum().backward()
        self.optimizer.discard()
        return sum(seen.values()), len(pack.tokens)

    def peak_bytes(self, call: Callable[[], object]) -> int | None:
        """Above what was in use before; None where it is not counted."""
        import torch

        if self.device != "cuda":
            return None
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


Plain = Callable[[Sequence[Sequence[Any]]], None]
"""A step of a plain loop, to be measured beside ours: a micro-batch a group, padded to its longest sample."""


def measure(work: TrainWork, plain_of: Callable[[Bench], Plain] | None = None) -> dict[str, Any]:
    import torch

    bench = Bench(work)
    plain = None if plain_of is None else plain_of(bench)
    limit = bench.matrix_rate()
    packing = {name: _packing(bench, name, plain) for name in QUANTILES}
    unpadded = _unpadded(bench, plain)
    streaming = _streaming(bench)
    limit = max(limit, bench.matrix_rate())
    for one in (*packing.values(), unpadded):
        one["model_tflops"] = round(one.pop("flops_per_s") / 1e12, 4)
        one["fraction_of_limit"] = round(one["model_tflops"] * 1e12 / limit, 3)
    kept, num_tokens = bench.saved_bytes(bench.draw("math"))
    return {
        "arch": work.arch or work.model,
        "tok_s": packing["math"]["tok_s"],
        "fraction_of_limit": packing["math"]["fraction_of_limit"],
        "limit_tflops": round(limit / 1e12, 4),
        "packing": packing,
        "unpadded": unpadded,
        "streaming": streaming,
        "kept_bytes_per_token": round(kept / num_tokens),
        "pack_tokens": work.pack_tokens,
        "lengths_divided_by": work.shorter,
        "compile": bench.policy.compiled,
        "checkpointing": work.checkpointing,
        "dtype": str(bench.policy.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if bench.device == "cuda" else "cpu, 1 thread",
        "torch": torch.__version__,
        "goals": {"streaming_overhead": 0.05, "fraction_of_limit": 0.55},
        "commit": commit(),
    }


def _packing(bench: Bench, name: str, plain: Plain | None) -> dict[str, Any]:
    groups = bench.draw(name)
    lengths = [[one.num_tokens for one in group] for group in groups]
    num_tokens = sum(map(sum, lengths))
    padded = sum(len(one) * max(one) for one in lengths)
    seconds = bench.take_turns(_ways(bench, groups, plain))
    ours = statistics.median(seconds["ours"])
    found = {
        "tokens": num_tokens,
        "padding_share": round(1 - num_tokens / padded, 3),
        "tok_s": round(num_tokens / ours),
        "flops_per_s": bench.flops(groups) / ours,
    }
    return found if plain is None else found | {"ratio_to_padded": _ratio(seconds["plain"], seconds["ours"])}


def _unpadded(bench: Bench, plain: Plain | None) -> dict[str, Any]:
    """Return samples of equal length, so that there is nothing to pad."""
    length = max(16, min(2048, bench.work.pack_tokens // 8))
    groups = bench.equal(length)
    num_tokens = sum(one.num_tokens for group in groups for one in group)
    ways = _ways(bench, groups, plain)
    seconds = bench.take_turns(ways)
    ours = statistics.median(seconds["ours"])
    peaks = {name: bench.peak_bytes(way) for name, way in ways.items()}
    by_token = {name: None if peak is None else round(peak / num_tokens) for name, peak in peaks.items()}
    found = {
        "length": length,
        "tokens": num_tokens,
        "tok_s": round(num_tokens / ours),
        "peak_bytes_per_token": by_token["ours"],
        "flops_per_s": bench.flops(groups) / ours,
    }
    if plain is None:
        return found
    return found | {
        "ratio_to_unpadded": _ratio(seconds["plain"], seconds["ours"]),
        "plain_tflops": round(bench.flops(groups) / statistics.median(seconds["plain"]) / 1e12, 4),
        "plain_peak_bytes_per_token": by_token["plain"],
    }


def _ways(bench: Bench, groups: Sequence[Sequence[Any]], plain: Plain | None) -> dict[str, Callable[[], object]]:
    ours: dict[str, Callable[[], object]] = {"ours": lambda: bench.ours([groups])}
    return ours if plain is None else ours | {"plain": lambda: plain(groups)}


def _streaming(bench: Bench) -> dict[str, Any]:
    """Groups as they would arrive, in the loop's micro-batches, against all of them at once."""
    groups = bench.draw("math", seed=1) + bench.draw("math", seed=2)
    parts, waiting = [], []
    for group in groups:
        waiting.append(group)
        if bench.is_micro_batch(waiting):
            parts.append(waiting)
            waiting = []
    parts += [waiting] if waiting else []
    seconds = bench.take_turns({"at once": lambda: bench.ours([groups]), "streamed": lambda: bench.ours(parts)})
    return {"calls": len(parts), "overhead": round(_ratio(seconds["streamed"], seconds["at once"]) - 1, 3)}


def _ratio(a: list[float], b: list[float]) -> float:
    return round(statistics.median(one / other for one, other in zip(a, b, strict=True)), 3)


def table(result: dict[str, Any]) -> list[str]:
    goals, unpadded = result["goals"], result["unpadded"]
    lines = [
        f"{result['arch']}, {result['dtype']}, packs of {result['pack_tokens']:,} tokens, {result['device']}",
        f"matrix products of this device: {result['limit_tflops']} TFLOP/s",
        "",
        f"{'lengths':<10}{'tok/s':>9}{'of the limit':>14}{'padding':>9}",
    ]
    rows = {**result["packing"], "equal": {"padding_share": 0.0, **unpadded}}
    for name, one in rows.items():
        lines.append(
            f"{name:<10}{one['tok_s']:>9,}{one['fraction_of_limit']:>14.1%}{one['padding_share']:>9.0%}"
            + "".join(f"   {one[key]:.2f} {key.replace('_', ' ')}" for key in one if key.startswith("ratio_to"))
        )
    lines += [
        "",
        f"streaming costs {result['streaming']['overhead']:.1%} over one big batch; goal: below "
        f"{goals['streaming_overhead']:.0%}",
        f"kept for the backward pass: {result['kept_bytes_per_token']:,} bytes a token",
    ]
    if unpadded["peak_bytes_per_token"] is not None:
        lines.append(f"peak memory above the model's: {unpadded['peak_bytes_per_token']:,} bytes a token")
    return [*lines, "", f"torch {result['torch']}, commit {result['commit']}"]
