"""LoRA, offloaded and eight-bit state on a GPU: are results right, how much memory and time do they take?

python tests/gpu/check_offload.py bits           offloaded updates against plain ones, merging against the CPU's: equal
python tests/gpu/check_offload.py memory         qwen3-1.7b's shape: peak memory and seconds of a step, each way

With --small: tiny tensors and models on the device that is here. Exit code 1 where bits differ.
"""

# pyright: reportArgumentType=false, reportCallIssue=false
import gc
import importlib.util
import json
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[2])]  # it is run as a file

import numpy as np  # noqa: E402
import torch  # noqa: E402
from tests.gpu.setting import ARCH, DEVICE, SMALL, need_a_gpu_or_small, reset_peak_memory, synchronize  # noqa: E402

from polyrl.bench.engine import Work, make_model  # noqa: E402
from polyrl.config.recipe import AlgorithmConfig, LoraSection, OptimizerConfig  # noqa: E402
from polyrl.engines.builtin.models import describe  # noqa: E402
from polyrl.trainer.batch import TrainSample  # noqa: E402
from polyrl.trainer.lora import LoraPolicy  # noqa: E402
from polyrl.trainer.model import Policy  # noqa: E402
from polyrl.trainer.optimizer import Optimizer  # noqa: E402
from polyrl.trainer.step import StepAccumulator  # noqa: E402
from polyrl.weights import adapters  # noqa: E402

NUM_STEPS = 3
WIDTH = 64 if SMALL else 4096
MERGED = (500, 300) if SMALL else (5000, 3000)
ROWS = (1, 7, 90) if SMALL else (1, 700, 9000)
ANSWER = 24 if SMALL else 448


def check_bits() -> bool:
    is_equal = True
    for dtype in (torch.float32, torch.bfloat16):
        states = []
        for offload in (False, True):
            torch.manual_seed(0)
            named = {f"{n}": torch.nn.Parameter(torch.randn(n, WIDTH, device=DEVICE).to(dtype)) for n in ROWS}
            optimizer = Optimizer(named, OptimizerConfig(lr=1e-3, offload=offload), 10)
            for step in range(5):
                torch.manual_seed(step)
                torch.stack([(one * torch.randn_like(one)).sum() for one in named.values()]).sum().backward()
                optimizer.update(step, 2.0)
            states.append({key: value.cpu() for key, value in optimizer.state_dict().items()})
        apart = {key: float((one - states[1][key]).abs().max()) for key, one in states[0].items()}
        apart = {key: most for key, most in apart.items() if most}
        print(json.dumps({"offloaded_equals_plain": not apart, "apart": apart, "dtype": str(dtype)}), flush=True)
        base, a, b = torch.randn(MERGED).to(dtype), torch.randn(16, MERGED[1]), torch.randn(MERGED[0], 16)
        here, there = torch.empty_like(base), torch.empty_like(base, device=DEVICE)
        adapters.merge(base, a, b, 1.7, here)
        adapters.merge(base.to(DEVICE), a.to(DEVICE), b.to(DEVICE), 1.7, there)
        is_merged = torch.equal(here, there.cpu())
        print(json.dumps({"merged_equals_cpu": is_merged, "dtype": str(dtype)}), flush=True)
        is_equal &= is_merged and not apart
    return is_equal


def groups(vocab: int, seed: int) -> list[list[TrainSample]]:
    rng = np.random.default_rng(seed)

    def sample(group: int) -> TrainSample:
        prompt, answer = (rng.integers(3, vocab, num).astype(np.int32) for num in (64, ANSWER))
        return TrainSample(prompt, answer, np.full(ANSWER, -5, np.float32), float(rng.normal()), group, "stop")

    return [[sample(group) for _ in range(4)] for group in range(4)]


def measure(name: str, optimizer_config: OptimizerConfig, lora: LoraSection | None) -> None:
    torch.cuda.empty_cache()
    reset_peak_memory()
    loaded = describe(make_model(Work(ARCH, None, 8, 64, 64), DEVICE), "bench")
    settings = {"gradient_checkpointing": True, "compile_layers": DEVICE == "cuda"}
    policy = Policy(loaded, **settings) if lora is None else LoraPolicy(loaded, lora, seed=0, **settings)
    optimizer = Optimizer(policy.parameters(), optimizer_config, 10)
    steps = StepAccumulator(policy, optimizer, AlgorithmConfig(), max_tokens=8192, max_new_tokens=ANSWER)
    began = added = finished = 0.0
    for step in range(NUM_STEPS):
        steps.begin(step)
        began = time.perf_counter()
        steps.add(groups(policy.loaded.vocab, step))
        synchronize()
        added = time.perf_counter()
        steps.finish()
        synchronize()
        finished = time.perf_counter()
        if step == 0:
            reset_peak_memory()  # compilation had its own
    merge_s = 0.0
    if isinstance(policy, LoraPolicy):
        policy.merge()
        merging = time.perf_counter()
        policy.merge()
        merge_s = time.perf_counter() - merging
    print(json.dumps({
        "name": name, "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "held_gb": torch.cuda.memory_allocated() / 1e9, "train_s": added - began, "update_s": finished - added,
        "merge_s": merge_s,
        "num_trained": sum(one.numel() for one in policy.parameters().values()),
    }), flush=True)  # fmt: skip


def check_memory() -> bool:
    ways: dict[str, tuple[OptimizerConfig, LoraSection | None]] = {
        "all weights": (OptimizerConfig(), None),
        "offloaded": (OptimizerConfig(offload=True), None),
        "lora, rank 16": (OptimizerConfig(lr=1e-4), LoraSection(rank=16)),
    }
    if importlib.util.find_spec("torchao") is not None:
        ways["eight bits"] = (OptimizerConfig(kind="adamw8bit"), None)
    for name, (optimizer, lora) in ways.items():
        measure(name, optimizer, lora)
        gc.collect()
    return True


if __name__ == "__main__":
    need_a_gpu_or_small()
    check = {"bits": check_bits, "memory": check_memory}[sys.argv[1] if len(sys.argv) > 1 else "bits"]
    sys.exit(0 if check() else 1)
