"""CPU seconds of a step of a small model: ours, ours with a worker of the fleet, and TRL's GRPOTrainer.

    benchmarks/install_trl.sh
    make bench NAME=small_step ARGS='[--model DIR] [--trl PYTHON] [--seeds N] [--first-seed N] [--steps N] [--core N]
                                      [--json]'

The shipped recipe `arithmetic` (90,000 parameters, 16 prompts of 8 answers a step), without validation, against TRL on
the same model, problems, reward, group size and learning rate. Everything runs on one core, a thread a process, and one
after the other, seed by seed. The benchmark counts CPU time, user and system, of every process of the run: trainer,
manager, rewards, worker. Starting up and the first steps are not counted; checkpoints, logs and journals are.

    make bench NAME=small_step ARGS='--only memory --steps 300'

shows the resident memory of a run's processes, a worker's too, over its steps: `growth_mb_per_100_steps` is that of the
second half.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from polyrl.config.recipe import ArithmeticTask
from polyrl.data.arithmetic import draw_problem
from polyrl.errors import UserError
from polyrl.trainer.state import entries

PROMPTS = 16
WARM_UP_STEPS = 3
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 1e6
_DEADLINE_S = 1200.0
_LOOK_EVERY_S = 0.005
_OURS = {"ours": (), "ours_with_a_worker": ("fleet.workers=1", "fleet.wait=true")}


class Run(NamedTuple):
    cpu_s: float
    """A step."""
    rewards: list[float]
    """Means, step by step."""
    parts: dict[str, float]
    """CPU seconds a step, by what a process does."""
    worker_share: float = 0.0
    """Of the tokens that were trained on: what a worker of the fleet wrote."""


def run_ours(
    args: argparse.Namespace,
    seed: int,
    settings: tuple[str, ...],
    folder: Path,
    look: Callable[[int], dict[str, float]] | None = None,
) -> Run:
    """`look` is called with the trainer's process at every step; none: CPU seconds are what is looked at."""
    run_dir = folder / "run"
    command = [sys.executable, "-m", "polyrl", "train", "arithmetic", f"model.path={args.model}", "manager.port=0"]
    command += [f"train.steps={args.steps}", f"train.seed={seed}", "validation.every_steps=0", *settings]
    command += ["validation.at_start=false", "--quiet", "--run-dir", str(run_dir)]
    with (folder / "ours.log").open("w") as log:
        process = subprocess.Popen(pinned(args.core, command), stdout=log, stderr=log, env=one_thread())
        marks = watch(process, run_dir / "metrics.jsonl", cpu_by_part if look is None else look)
    if process.returncode:
        told = tail(folder / "ours.log")
        raise UserError(f"seed {seed}: {' '.join(command)} ended with {process.returncode}: {told}")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
    parts = sorted({name for mark in marks for name in mark})
    split = {name: per_step([mark.get(name, 0.0) for mark in marks]) for name in parts}
    return Run(sum(split.values()), rewards, split, written_by_workers(run_dir))


def written_by_workers(run_dir: Path) -> float:
    """The share of tokens that the fleet's workers wrote, of the steps that the run's directory still has."""
    by: dict[bool, int] = {True: 0, False: 0}
    for file in entries.of_run(run_dir).values():
        for group in entries.read(file).groups():
            for turn in (turn for sample in group for turn in sample.written_by):
                by[turn.worker != "trainer"] += turn.num_tokens
    return by[True] / max(1, sum(by.values()))


def watch(
    process: "subprocess.Popen[bytes]", metrics: Path, look: Callable[[int], dict[str, float]]
) -> list[dict[str, float]]:
    """The findings of `look` as each step's line appears."""
    marks: list[dict[str, float]] = []
    until = time.monotonic() + _DEADLINE_S
    while process.poll() is None:
        if time.monotonic() > until:
            process.kill()
        num = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        while len(marks) < num:
            marks.append(look(process.pid))
        time.sleep(_LOOK_EVERY_S)
    return marks


def cpu_by_part(root: int) -> dict[str, float]:
    """CPU seconds so far of a process and of all that it started, by what they do."""
    return by_part(root, lambda fields: sum(map(int, fields[11:15])) / _TICKS)  # with what it has waited for


def memory_by_part(root: int) -> dict[str, float]:
    """Resident megabytes, in the same way."""
    return by_part(root, lambda fields: int(fields[21]) * _PAGE_MB)


def by_part(root: int, value_of: Callable[[list[str]], float]) -> dict[str, float]:
    """Sums over a process and all that it started. `value_of` is given what /proc/PID/stat says after the name."""
    children: dict[int, list[int]] = {}
    values: dict[int, float] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        pid, parent = int(folder.name), int(fields[1])
        children.setdefault(parent, []).append(pid)
        values[pid] = value_of(fields)
    found: dict[str, float] = {}
    waiting = [(root, "trainer")]
    while waiting:
        pid, part = waiting.pop()
        found[part] = found.get(part, 0.0) + values.get(pid, 0.0)
        for child in children.get(pid, []):
            waiting.append((child, part_of(child, part)))
    return found


def part_of(pid: int, parents: str) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return parents
    for name in ("manager", "worker"):
        if name in words:
            return name
    return "rewards" if parents == "trainer" else parents


def run_trl(args: argparse.Namespace, seed: int, folder: Path) -> Run:
    problems = [draw_problem(ArithmeticTask(), seed, "train", index) for index in range(PROMPTS * args.steps)]
    rows = [{"prompt": one.prompt, "expected": one.answer} for one in problems]
    setup = {"model": args.model, "train": rows, "steps": args.steps, "seed": seed, "prompts": PROMPTS}
    paths = [folder / "setup.json", folder / "found.json"]
    paths[0].write_text(json.dumps(setup))
    command = [args.trl, str(Path(__file__).with_name("trl_grpo.py")), *map(str, paths)]
    done = subprocess.run(
        pinned(args.core, command), capture_output=True, text=True, env=one_thread(), timeout=_DEADLINE_S, check=False
    )
    if done.returncode:
        raise UserError(f"seed {seed}: {' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    found = json.loads(paths[1].read_text())
    return Run(per_step(found["cpu_s"]), found["rewards"], {})


def per_step(marks: list[float]) -> float:
    """From readings at the end of each step."""
    return (marks[-1] - marks[WARM_UP_STEPS - 1]) / (len(marks) - WARM_UP_STEPS)


def pinned(core: int, command: list[str]) -> list[str]:
    return ["taskset", "-c", str(core), *command]


def one_thread() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def tail(file: Path) -> str:
    return "\n".join(file.read_text().splitlines()[-10:])


def steps_to(rewards: list[float], wanted: float = 0.9) -> int | None:
    """The first step whose mean reward, with the two before it, reaches that."""
    for number in range(2, len(rewards)):
        if fmean(rewards[number - 2 : number + 1]) >= wanted:
            return number
    return None


def run_memory(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Resident memory of each process as steps end."""
    seen: list[dict[str, float]] = []

    def look(pid: int) -> dict[str, float]:
        seen.append(memory_by_part(pid))
        return {}

    run_ours(args, args.first_seed, _OURS["ours_with_a_worker"], folder, look)
    half, last = len(seen) // 2, len(seen) - 1
    told: dict[str, Any] = {}
    for part in sorted(seen[half]):
        mb = [one.get(part, 0.0) for one in seen]
        shown = {step: round(mb[step]) for step in range(0, len(mb), max(1, len(mb) // 10))}
        growth = 100 * (mb[last] - mb[half]) / max(1, last - half)
        told[part] = {"resident_mb": shown, "growth_mb_per_100_steps": round(growth, 1)}
    return told


def run_all(args: argparse.Namespace) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for name in (*_OURS, "trl"):
            if args.only not in (None, name):
                continue
            with tempfile.TemporaryDirectory(prefix="small-step-") as folder:
                place = Path(folder)
                run = run_trl(args, seed, place) if name == "trl" else run_ours(args, seed, _OURS[name], place)
            found.setdefault(name, []).append(run)
            print(f"seed {seed}: {name}: {1000 * run.cpu_s:.0f} ms a step", file=sys.stderr)
    return found


def summary(found: dict[str, list[Run]]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for name, runs in found.items():
        cpu = [run.cpu_s for run in runs]
        told[name] = {
            "cpu_ms_a_step": round(1000 * median(cpu), 1),
            "lowest": round(1000 * min(cpu), 1),
            "highest": round(1000 * max(cpu), 1),
            "parts_ms": {part: round(1000 * median(run.parts[part] for run in runs), 1) for part in runs[0].parts},
            "each": [round(1000 * one, 1) for one in cpu],
            "worker_share": round(median(run.worker_share for run in runs), 3),
            "steps_to_0.9": [steps_to(run.rewards) for run in runs],
            "last_rewards": [round(fmean(run.rewards[-3:]), 3) for run in runs],
        }
    for name, runs in found.items():
        if name != "trl" and "trl" in found:
            ratios = [ours.cpu_s / theirs.cpu_s for ours, theirs in zip(runs, found["trl"], strict=True)]
            told[f"{name}/trl"] = round(median(ratios), 3)
    return told


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="CPU seconds of a step of a small model: ours and TRL's")
    parser.add_argument("--model", default="models/arithmetic", help="of `polyrl data model arithmetic --out DIR`")
    parser.add_argument("--trl", default=str(Path.home() / ".cache/polyrl/engines/trl/bin/python"), metavar="PYTHON")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0, metavar="N")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--core", type=int, default=0, help="the one that everything runs on")
    parser.add_argument("--only", choices=("trl", *_OURS, "memory"), help="leave the others out")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    if args.only in (None, "trl") and not Path(args.trl).exists():
        raise UserError(f"{args.trl}: no such file; benchmarks/install_trl.sh installs TRL, --trl names its Python")
    if args.only == "memory":
        with tempfile.TemporaryDirectory(prefix="small-step-") as folder:
            told = run_memory(args, Path(folder))
    else:
        told = summary(run_all(args))
    print(json.dumps(told, indent=None if args.json else 2))
    return 0
