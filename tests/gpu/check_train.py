"""The trainer on a GPU: is it right, and how fast? Run by hand on a machine that has one; CI has none.

python tests/gpu/check_train.py right              packs, flash attention, compiled layers: against float32
python tests/gpu/check_train.py speed [eager]      qwen3-1.7b, packs of 16,384 tokens, beside plain loops; JSON lines
python tests/gpu/check_train.py variants           ways to run one pack, each for itself
python tests/gpu/check_train.py profile [eager]    where a step's time goes
python tests/gpu/check_train.py long               samples of 32k and 128k tokens, cuDNN's attention beside flash's

With --small: tiny models on the device that is here; exit code 1 where a gradient in float32 is another than the CPU's.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
import gc
import json
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [  # it is run as a file
    str(Path(__file__).parents[2] / "src"),
    str(Path(__file__).parents[2]),
]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from benchmarks.train import PlainLoop, measure  # noqa: E402
from tests.builtin.tiny_models import save_tiny  # noqa: E402
from tests.gpu.setting import ARCH, DEVICE, SMALL, need_a_gpu_or_small, print_profile  # noqa: E402

from polyrl.bench.train import Bench, TrainWork  # noqa: E402
from polyrl.config.recipe import AlgorithmConfig, OptimizerConfig  # noqa: E402
from polyrl.errors import UserError  # noqa: E402
from polyrl.trainer.batch import TrainSample  # noqa: E402
from polyrl.trainer.model import Policy  # noqa: E402
from polyrl.trainer.optimizer import Optimizer  # noqa: E402
from polyrl.trainer.packing import make_packs  # noqa: E402
from polyrl.trainer.step import StepAccumulator  # noqa: E402

FAMILIES = (("llama", {"head_dim": 64}), ("qwen3", {"head_dim": 64}), ("mistral", {"head_dim": 64}), ("gemma2", {}))
COMPILED = DEVICE == "cuda"
PACK, LENGTH, GROUPS = (256, 64, 1) if SMALL else (16_384, 2048, 4)
LENGTHS = ((3, 9), (12, 140), (5, 1), (1, 77), (130, 200), (7, 31))


def check_right() -> bool:
    """Relative distance of the whole gradient from that of the CPU in float32: about 1e-6 in float32.

    In bfloat16 these wild little models are 0.02 to 0.08 away even on a CPU; all rows of a family should agree.
    """
    is_right = True
    for family, changes in FAMILIES:
        folder = str(save_tiny(family, Path(tempfile.mkdtemp()), **changes))
        samples = samples_of(512)
        expected = gradient(Policy.load(folder), samples)
        for dtype, compiled, checkpointing in (
            ("float32", False, False),
            ("bfloat16", False, False),
            ("bfloat16", True, False),
            ("bfloat16", True, True),
        ):
            policy = Policy.load(
                folder,
                dtype,
                DEVICE,
                gradient_checkpointing=checkpointing,
                compile_layers=compiled and COMPILED,
            )
            found = gradient(policy, samples)
            apart = distance(found[1], expected[1])
            is_right &= apart < 1e-4 or dtype != "float32"
            values = float((found[0] - expected[0]).abs().max())
            print(
                json.dumps(
                    {
                        "family": family,
                        "dtype": dtype,
                        "compiled": compiled,
                        "checkpointing": checkpointing,
                        "flash": policy._flash,
                        "logprobs_within": round(values, 6),
                        "gradient_distance": round(apart, 7),
                    }
                ),
                flush=True,
            )
    check_streaming()
    return is_right


def check_streaming() -> None:
    """In bfloat16: the same gradient however groups arrive, to the rounding of one backward pass."""
    folder = str(save_tiny("qwen3", Path(tempfile.mkdtemp()), head_dim=64))
    policy = Policy.load(folder, "bfloat16", DEVICE)
    optimizer = Optimizer(policy.parameters(), OptimizerConfig(), 1)
    steps = StepAccumulator(policy, optimizer, AlgorithmConfig(), max_tokens=1024, max_new_tokens=256)
    groups = [[one._replace(reward=float(k)) for k, one in enumerate(samples_of(512, seed))] for seed in range(6)]
    found: list[dict[str, torch.Tensor]] = []
    for number, calls in enumerate(([groups], [[one] for one in reversed(groups)])):
        steps.begin(number)
        for part in calls:
            steps.add(part)
        found.append({name: one.clone() for name, one in optimizer.gradients().items()})
        steps.abort()
    print(json.dumps({"streamed_gradient_distance": round(distance(found[1], found[0]), 7)}), flush=True)


def samples_of(vocab: int, seed: int = 0) -> list[TrainSample]:
    rng = np.random.default_rng(seed)
    pairs = [(rng.integers(3, vocab, a), rng.integers(3, vocab, b)) for a, b in LENGTHS]
    return [TrainSample(a.astype(np.int32), b.astype(np.int32), np.zeros(len(b), np.float32), 0.0) for a, b in pairs]


def gradient(policy: Policy, samples: list[TrainSample]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    (pack,) = make_packs(samples, 4096)
    scores = policy.score(pack)
    weights = torch.linspace(-1, 1, len(scores.logprobs), device=policy.device)
    (scores.logprobs * weights).sum().backward()
    grads = {name: one.grad.float().cpu() for name, one in policy.parameters().items() if one.grad is not None}
    return scores.logprobs.detach().cpu(), grads


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    whole = torch.cat([one.double().flatten() for one in theirs.values()])
    return float((torch.cat([ours[name].double().flatten() for name in theirs]) - whole).norm() / whole.norm())


def check_speed(*, compiled: bool) -> None:
    """Lengths are an eighth of the published ones: more, and a padded loop no longer fits into memory."""
    work = TrainWork(ARCH, None, PACK, 6 * GROUPS, 64 if SMALL else 8, 3, compiled, False)
    print(json.dumps(measure(work)), flush=True)


def variants() -> None:
    """One pack of equally long samples: forward and backward alone, then the update."""
    for compiled, checkpointing, tokens in (
        (False, False, PACK),
        (COMPILED, False, PACK),
        (COMPILED, True, PACK),
        (COMPILED, False, PACK // 2),
        (COMPILED, False, PACK * 2),
    ):
        what = {"compiled": compiled, "checkpointing": checkpointing, "tokens": tokens}
        try:
            found = one_variant(TrainWork(ARCH, None, tokens, GROUPS, 4, 3, compiled, checkpointing))
        except UserError as error:
            found = {"error": str(error)}
        print(json.dumps({**what, **found}), flush=True)
        free()


def one_variant(work: TrainWork) -> dict[str, float]:
    bench = Bench(work)
    groups = bench.equal(LENGTH)
    first_s = bench.time(lambda: bench.ours([groups]))
    limit = bench.matrix_rate()
    adds, updates = [], []
    for _ in range(4):
        bench.num_steps += 1
        bench.steps.begin(bench.num_steps)
        adds.append(bench.time(lambda: bench.steps.add(groups)))
        updates.append(bench.time(bench.steps.finish))
    peak = bench.peak_bytes(lambda: bench.ours([groups]))
    rate = bench.flops(groups) / min(adds)
    found = {
        "forward_backward_ms": round(min(adds) * 1e3, 1),
        "update_ms": round(min(updates) * 1e3, 1),
        "model_tflops": round(rate / 1e12, 1),
        "limit_tflops": round(limit / 1e12, 1),
        "fraction_of_limit": round(rate / limit, 3),
        "peak_gb_above_model": None if peak is None else round(peak / 1e9, 1),
        "first_s": round(first_s, 1),
    }
    if not work.compile:
        plain = PlainLoop(bench)
        plain.step(groups)
        found["plain_step_ms"] = round(min(bench.time(lambda: plain.step(groups)) for _ in range(3)) * 1e3, 1)
    return found


def long() -> bool:
    """Two long samples, a pack each: forward and backward with cuDNN's attention, and with varlen flash attention."""
    is_right = True
    lengths = (64, 64, 128) if SMALL else (32_768, 32_768, 131_072)  # the first time compiles
    bench = Bench(TrainWork(ARCH, None, max(lengths), 1, 4, 1, COMPILED, not SMALL))
    limit, has_cudnn = bench.matrix_rate(), bench.policy._long
    rng = np.random.default_rng(0)
    for length in lengths:
        groups = [[bench.sample(rng, 2, length - 1) for _ in range(2)]]
        gradients = {}
        for way in ("cudnn", "flash") if has_cudnn else ("flash",):
            bench.policy._long = way == "cudnn"
            bench.num_steps += 1
            bench.steps.begin(bench.num_steps)
            seconds = bench.time(lambda groups=groups: bench.steps.add(groups))
            gradients[way] = {name: one.cpu() for name, one in bench.optimizer.gradients().items()}
            bench.steps.abort()
            fraction = bench.flops(groups) / seconds / limit
            found = {"tokens": length, "attention": way, "seconds": round(seconds, 2)}
            found |= {"tok_s": round(length * 2 / seconds), "fraction_of_limit": round(fraction, 3)}
            print(json.dumps(found), flush=True)
        if has_cudnn:
            apart = distance(gradients["cudnn"], gradients["flash"])
            is_right &= apart < 0.1
            print(json.dumps({"tokens": length, "gradient_distance": round(apart, 5)}), flush=True)
    return is_right


def profile(*, compiled: bool) -> None:
    bench = Bench(TrainWork(ARCH, None, PACK, GROUPS, 4, 3, compiled, False))
    groups = bench.equal(LENGTH)
    for _ in range(2):
        bench.ours([groups])
    print_profile(lambda: bench.ours([groups]), 1, 28)


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()


if __name__ == "__main__":
    need_a_gpu_or_small()
    is_compiled = sys.argv[2:] != ["eager"] and COMPILED
    if sys.argv[1] == "right":
        sys.exit(0 if check_right() else 1)
    elif sys.argv[1] == "variants":
        variants()
    elif sys.argv[1] == "long":
        sys.exit(0 if long() else 1)
    elif sys.argv[1] == "profile":
        profile(compiled=is_compiled)
    else:
        check_speed(compiled=is_compiled)
