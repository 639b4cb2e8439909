"""Whole runs on one GPU: synchronous, streaming, and streaming with tail batching, with imposed lengths; step times.

python tests/gpu/check_run.py [--steps N] [--arch A] [--prompts N] [--cap TOKENS] [--no-checkpoints] [MODE...]
python tests/gpu/check_run.py --small [MODE...]      a tiny model and short answers on the device that is here

Lengths are as published (RollPacker, math). The model has random weights and its rewards mean nothing: only time is
looked at. Prompts and lengths are the same for all. Every ten seconds it says where generation's time went: in bursts
of decoding, in prompts, in making graphs, in waking, between them.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOptionalSubscript=false
import argparse
import asyncio
import gc
import json
import logging
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[2])]  # it is run as a file

import numpy as np  # noqa: E402
import torch  # noqa: E402
from tests.gpu.setting import ARCH, DEVICE, SMALL, need_a_gpu_or_small  # noqa: E402

from polyrl.bench.engine import Work, make_model  # noqa: E402
from polyrl.config import build  # noqa: E402
from polyrl.config.recipe import Recipe  # noqa: E402
from polyrl.engines.builtin.runner import Runner  # noqa: E402
from polyrl.rewards.reward import Reward  # noqa: E402
from polyrl.run.event_loop import run_loop  # noqa: E402
from polyrl.run.models import load_learner  # noqa: E402
from polyrl.run.resuming import RestoredModels  # noqa: E402
from polyrl.run.training import Training  # noqa: E402
from polyrl.telemetry.metrics import read_metrics  # noqa: E402

QUANTILES = [[0.05, 151], [0.25, 415], [0.5, 661], [0.75, 1129], [0.9, 2566], [0.95, 4101], [0.99, 16384]]
MODES = {
    "synchronous": {"train": {"mode": "synchronous"}},
    "streaming": {},
    "tail batching": {"rounds": {"tail_batching": "race"}},
}


class Watch:
    """Where a runner's time goes. Calls that lie within others count for themselves."""

    def __init__(self) -> None:
        self.seconds, self.counts, self.by_size = Counter(), Counter(), Counter()
        self._last_end = None
        watched = [(Runner, "run_burst", "bursts"), (Runner, "run", "prompts"), (Runner, "wake", "waking")]
        if DEVICE == "cuda":
            from polyrl.engines.builtin.cuda.graphs import Graphs
            from polyrl.engines.builtin.cuda.runner import CudaRunner

            watched = [(CudaRunner, name, what) for _, name, what in watched] + [(Graphs, "capture", "graphs")]
        for owner, name, what in watched:
            setattr(owner, name, self._timed(getattr(owner, name), what))

    def _timed(self, call, what):
        def timed(runner, *args, **kwargs):
            began = time.perf_counter()
            if what in ("bursts", "prompts") and self._last_end is not None and began - self._last_end < 1.0:
                self.seconds["between"] += began - self._last_end  # longer: it had nothing to do
            inside = sum(self.seconds.values())
            seen: list[int] = []
            if what == "bursts" and len(args) == 5 and args[4] is not None:
                *args, look = args
                args.append(lambda drawn: (seen.append(len(drawn)), look(drawn)))
            result = call(runner, *args, **kwargs)
            ended = time.perf_counter()
            self.seconds[what] += ended - began - (sum(self.seconds.values()) - inside)
            self.counts[what] += 1
            if what == "bursts":
                num_steps = len(result) + sum(seen)
                self.counts["steps"] += num_steps
                self.counts["rows"] += num_steps * len(args[0])
                most = 1 << (len(args[0]) - 1).bit_length()
                self.counts[f"steps of up to {most}"] += num_steps
                self.by_size[most] += ended - began
            if what in ("bursts", "prompts"):
                self._last_end = ended
            return result

        return timed

    def take(self):
        said = {
            "seconds": {key: round(value, 2) for key, value in self.seconds.items() if value},
            "counts": dict(self.counts),
            "seconds in bursts of up to so many": {key: round(value, 2) for key, value in self.by_size.items()},
        }
        for one in (self.seconds, self.counts, self.by_size):
            one.clear()
        return said


class Tasks:
    num_prompts = [4096]  # noqa: RUF012
    names = ["timing"]  # noqa: RUF012
    digests = ("",)

    def tokens(self, domain, prompt):
        return (3 + (7919 * prompt + 31 * np.arange(16 if SMALL else 128)) % (2000 if SMALL else 50_000)).astype(
            np.int32
        )

    def row(self, domain, prompt):
        return b""

    async def score(self, domain, prompt, answer, finish, limit_s=0.0):
        return Reward(float(len(answer) % 2), {})

    validation_names = ()
    pool = None
    scores_groups = False

    def rewards_under_way(self):
        return None

    async def failed(self):
        await asyncio.Event().wait()

    def reward_metrics(self):
        return {}

    def why_none_scored(self):
        return ""


def recipe_of(mode: str, folder: Path, steps: int, prompts: int, cap: int, *, checkpoints: bool) -> Recipe:
    tree = {
        "name": "timing",
        "model": {"path": str(folder), "dtype": "bfloat16", "device": DEVICE},
        "train": {"steps": steps, "micro_batch_tokens": 16_384},
        "algorithm": {"zero_variance": "keep"},
        "rollout": {"max_new_tokens": cap, "impose_lengths": {"kind": "quantiles", "quantiles": QUANTILES}},
        "rounds": {"samples_per_prompt": 8},
        "data": {"source": "arithmetic", "prompts_per_step": prompts},
        "manager": {"port": 0},
        "validation": {"at_start": False},
        "checkpoint": {"enabled": checkpoints},
    }
    for section, keys in MODES[mode].items():
        tree[section] = {**tree.get(section, {}), **keys}
    return build(tree, Recipe, source="")


def main(steps: int, arch: str, prompts: int, cap: int, modes: list[str], *, checkpoints: bool) -> None:
    root = Path(tempfile.mkdtemp())
    watch = Watch()
    threading.Thread(target=report, args=(watch,), daemon=True).start()
    torch.manual_seed(0)
    make_model(Work(arch, None, 1, 1, 1), DEVICE).save_pretrained(root / "model")
    torch.cuda.empty_cache()
    for mode in modes:
        run_dir = root / mode.replace(" ", "-")
        (run_dir / "logs").mkdir(parents=True)
        num = 5 * max(1, steps // 3) if mode == "tail batching" else steps  # whole periods
        recipe = recipe_of(mode, root / "model", num + 1, prompts, cap, checkpoints=checkpoints)
        learner = load_learner(recipe)
        began = time.perf_counter()
        run_loop(Training(recipe, run_dir, RestoredModels(learner), Tasks()).run())
        lines = read_metrics(run_dir / "metrics.jsonl")[1:]  # the first one compiles
        seconds = [line["time/step_total"] for line in lines]
        tokens = sum(line["tokens/kept"] for line in lines)
        print(json.dumps({
            "mode": mode, "lengths": "imposed", "device": device_name(), "arch": arch, "prompts": prompts, "cap": cap,
            "mean_step_s": statistics.fmean(seconds),
            "steps_s": [round(one, 1) for one in seconds], "kinds": [line["rounds/kind"][0] for line in lines],
            "train_s": round(statistics.fmean(line["time/step_train"] for line in lines), 2),
            "generate_s": round(statistics.fmean(line["time/step_generate"] for line in lines), 2),
            "save_s": [round(line["time/step_save"], 2) for line in lines],
            "publish_s": round(statistics.fmean(line["time/step_publish"] for line in lines), 2),
            "longest": [line["token/response_length/max"] for line in lines],
            "trained_tok_s": tokens / sum(seconds), "run_s": time.perf_counter() - began,
        }), flush=True)  # fmt: skip
        del learner
        gc.collect()
        torch.cuda.empty_cache()


def device_name() -> str:
    return torch.cuda.get_device_name() if DEVICE == "cuda" else "a CPU"


def report(watch: Watch) -> None:
    while True:
        time.sleep(10)
        print(time.strftime("%X"), json.dumps(watch.take()), flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", datefmt="%X")
    parser = argparse.ArgumentParser()
    need_a_gpu_or_small()
    for name, default, small in (("steps", 5, 2), ("prompts", 32, 4), ("cap", 8192, 64)):
        parser.add_argument(f"--{name}", type=int, default=small if SMALL else default)
    parser.add_argument("--arch", default=ARCH)
    parser.add_argument("--no-checkpoints", dest="checkpoints", action="store_false")
    parser.add_argument("modes", nargs="*", metavar="MODE")
    options = parser.parse_args()
    main(
        options.steps, options.arch, options.prompts, options.cap, options.modes or list(MODES),
        checkpoints=options.checkpoints,
    )  # fmt: skip
