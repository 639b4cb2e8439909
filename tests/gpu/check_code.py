"""SmolLM2-135M-Instruct learns to program on one GPU: its functions run in the sandbox, and more of them pass.

python examples/smollm2.py models/smollm2                        writes the model; takes the network once
python tests/gpu/check_code.py models/smollm2 [--steps N] [--limit-s S] [--bwrap-dir DIR] [section.key=value ...]
python tests/gpu/check_code.py --small                           a tiny model and two steps on the CPU

The model completes a function after its description, and the reward `code` calls it with three numbers:

    def f(x):
        \"\"\"Multiply by 3, then add 5.\"\"\"
        return

Untrained, it writes about half of those with one step right at temperature 1, and one in twenty of those with two;
with the likeliest token each time, nearly all and one in twenty. Half of the training rows have two. Validation has
other descriptions, the likeliest token each time: before, after every quarter of the steps, and at the end.

Prints a JSON line a step and one at the end. Exit code 1 unless the mean reward rose, and the pass rate of validation
on those with two steps; 2 where no sandbox can be opened, with the reason. Where bubblewrap is not installed, DIR
(.wheels/bin, if there is one) holds the program bwrap and, if the system lacks it, libcap.so.2.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]  # it is run as a file

from tests.gpu.setting import DEVICE, SMALL, need_a_gpu_or_small  # noqa: E402

from polyrl.bench.machine import commit  # noqa: E402
from polyrl.data import exercises  # noqa: E402
from polyrl.errors import UserError  # noqa: E402
from polyrl.rewards.sandbox.sandbox import Sandbox  # noqa: E402
from polyrl.starters import programs  # noqa: E402
from polyrl.telemetry.metrics import read_metrics  # noqa: E402

Row = dict[str, Any]
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "add {k}": lambda x, k: x + k,
    "subtract {k}": lambda x, k: x - k,
    "multiply by {k}": lambda x, k: x * k,
    "square": lambda x, _: x * x,
}
NUMBERS = range(2, 26)
INPUTS = (3, -2, 10)
NUM_TRAIN, NUM_VALIDATION = 2000, {"one": 16, "two": 112}
TOLD = ("reward/mean", "reward/crashed/mean", "token/response_length/mean", "actor/entropy", "time/step_total")
LOOK_EVERY_S = 0.5
ENDING_S = 60.0


def row_of(steps: tuple[tuple[str, int], ...]) -> Row:
    words = ", then ".join(name.format(k=k) for name, k in steps)
    tests: list[Row] = []
    for x in INPUTS:
        value = x
        for name, k in steps:
            value = OPERATIONS[name](value, k)
        tests.append({"function": "f", "args": [x], "value": value})
    return {"prompt": f'def f(x):\n    """{words.capitalize()}."""\n    return', "tests": tests}


def draw_rows() -> dict[str, list[Row]]:
    """Rows to train on, and those of validation with one step and with two; no description is in both."""
    draws = random.Random(0)
    single = [(name, k) for name in OPERATIONS for k in (NUMBERS if "{k}" in name else (0,))]
    one = [(step,) for step in single]
    two = [(first, second) for first in single for second in single]
    found: dict[str, list[Row]] = {"train": []}
    for name, kind in (("one", one), ("two", two)):
        draws.shuffle(kind)
        num = NUM_VALIDATION[name]
        found[name] = [row_of(steps) for steps in kind[:num]]
        found["train"] += [row_of(draws.choice(kind[num:])) for _ in range(NUM_TRAIN // 2)]
    draws.shuffle(found["train"])
    return found


def write_rows(folder: Path) -> None:
    rows = draw_rows()
    if SMALL:
        tiny = {"train": exercises.rows("train"), **{name: exercises.rows("validation") for name in NUM_VALIDATION}}
        rows = {name: list(islice(those, 8)) for name, those in tiny.items()}
    for name, those in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in those), encoding="utf-8")


def settings_of(model: Path, steps: int) -> list[str]:
    """The recipe, as overrides of one that ships with the same reward."""
    prompts, samples = (4, 4) if SMALL else (32, 16)
    code: Row = {"function": "code", "args": {"cpu_s": 2.0}}
    if not SMALL:
        code["args"] = {"cpu_s": 2.0, "template": "def f(x):\n    return{code}"}
    settings = {
        "name": "check-code",
        "model.path": str(model),
        "model.device": DEVICE,
        "train.steps": steps,
        "train.micro_batch_tokens": 16384,
        "optimizer.lr": 1e-5,
        "rollout.max_new_tokens": 64 if SMALL else 24,
        "data.source": "train.jsonl",
        "data.validation": {name: f"{name}.jsonl" for name in NUM_VALIDATION},
        "data.validation_args": {},
        "data.reward": ["code"],
        "data.prompts_per_step": prompts,
        "rounds.samples_per_prompt": samples,
        "rewards.functions": [code],
        "rewards.slots": 64,
        "validation.every_steps": max(1, steps // 4),
        "validation.num_prompts": max(NUM_VALIDATION.values()),
        "validation.temperature": 0.0,
        "manager.port": 0,
        "checkpoint.enabled": False,
    }
    if not SMALL:
        settings["rollout.stop"] = ["\n"]
    return [f"{key}={_toml(value)}" for key, value in settings.items()]


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value)


def environment_with(bwrap_dir: Path, folder: Path) -> dict[str, str]:
    """The environment of the run. A bubblewrap that was carried here comes first, and finds its library beside it."""
    path = [os.environ.get("PATH", os.defpath)]
    if (bwrap_dir / "bwrap").is_file():
        carried, place = folder / "bin" / "bwrap", bwrap_dir.resolve()
        carried.parent.mkdir()
        (place / "bwrap").chmod(0o755)
        carried.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH="{place}" exec "{place}/bwrap" "$@"\n', encoding="utf-8")
        carried.chmod(0o755)
        path.insert(0, str(carried.parent))
    modules = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PATH": os.pathsep.join(path), "PYTHONPATH": os.pathsep.join(modules)}


def why_no_sandbox() -> str:
    """Return why no sandbox can be opened here; empty if one can."""

    async def body() -> None:
        async with Sandbox.open(size=1):
            pass

    try:
        asyncio.run(body())
    except UserError as error:
        return str(error)
    return ""


def follow(process: "subprocess.Popen[bytes]", metrics: Path, limit_s: float) -> Iterator[Row]:
    """Yield the lines of the run's metrics as they come; after `limit_s` the run is stopped as by Ctrl+C."""
    began, num_seen, is_stopped = time.monotonic(), 0, False
    while True:
        has_ended = process.poll() is not None
        lines = read_metrics(metrics) if metrics.exists() else []
        yield from lines[num_seen:]
        num_seen = len(lines)
        if has_ended:
            return
        taken_s = time.monotonic() - began
        if taken_s > limit_s and not is_stopped:
            process.send_signal(signal.SIGINT)
            is_stopped = True
        if taken_s > limit_s + ENDING_S:
            process.kill()
        time.sleep(LOOK_EVERY_S)


def run(model: Path, folder: Path, environment: dict[str, str], options: argparse.Namespace) -> int:
    write_rows(folder)
    command = [sys.executable, "-m", "polyrl", "train", "code", *settings_of(model, options.steps), *options.overrides]
    began = time.monotonic()
    lines: list[Row] = []
    with (folder / "train.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--run-dir", str(folder / "run"), "--quiet"], env=environment, cwd=folder, stdout=log, stderr=log
        )
        try:
            for line in follow(process, folder / "run" / "metrics.jsonl", options.limit_s):
                lines.append(line)
                told = {key: value for key, value in line.items() if key in TOLD or key.startswith("validation/")}
                print(json.dumps({"step": line.get("step"), **told}), flush=True)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    summary = summarize(lines) | {
        "seconds": round(time.monotonic() - began, 1),
        "exit_code": process.returncode,
        "device": device_name(),
        "commit": commit(),
    }
    print(json.dumps(summary), flush=True)
    is_cut_short = summary["seconds"] > options.limit_s
    if not lines or (process.returncode and not is_cut_short):
        print((folder / "train.log").read_text(encoding="utf-8", errors="replace")[-4000:], file=sys.stderr)
        return 1
    return 0 if SMALL or has_learned(summary) else 1


def has_learned(summary: Row) -> bool:
    before, after = summary["validation"].get("validation/two/pass@1", (0.0, 0.0))
    return after > before and summary["reward"][-1] > summary["reward"][0]


def summarize(lines: list[Row]) -> Row:
    rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
    tests = sorted({key for line in lines for key in line if key.startswith("validation/") and "pass@1" in key})
    rates = {key: [line[key] for line in lines if key in line] for key in tests}
    return {
        "steps": len(rewards),
        "reward": [round(fmean(those), 3) for those in (rewards[:5], rewards[-5:]) if those],
        "validation": {key: (those[0], those[-1]) for key, those in rates.items() if len(those) > 1},
    }


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if DEVICE == "cuda" else f"CPU, {os.cpu_count()} cores"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path, nargs="?", help="the directory that examples/smollm2.py wrote")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings of the run's recipe")
    parser.add_argument("--steps", type=int, default=2 if SMALL else 100)
    parser.add_argument("--limit-s", type=float, default=420.0, help="stop the run after this time (default: 420)")
    parser.add_argument("--bwrap-dir", type=Path, default=ROOT / ".wheels" / "bin", help="where a carried bwrap lies")
    options = parser.parse_args()
    need_a_gpu_or_small()
    if (options.model is not None) == SMALL:
        parser.error("expected the directory that examples/smollm2.py wrote, or --small")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        environment = environment_with(options.bwrap_dir, folder)
        os.environ["PATH"] = environment["PATH"]
        reason = why_no_sandbox()
        if reason:
            print(f"check_code: no sandbox here: {reason}", file=sys.stderr)
            return 2
        model = folder / "model" if options.model is None else options.model.resolve()
        if options.model is None:
            programs.make_model(model, seed=0, num_steps=200)
        return run(model, folder, environment, options)


if __name__ == "__main__":
    sys.exit(main())
