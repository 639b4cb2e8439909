"""A run on a GPU that is killed and goes on, against one that never was: equal to the last bit? If not, how far off?

python tests/gpu/check_resume.py                       bfloat16; cuBLAS with a workspace of its own
python tests/gpu/check_resume.py --plain               without that
python tests/gpu/check_resume.py --deterministic       also torch.use_deterministic_algorithms
python tests/gpu/check_resume.py --dtype float32       without flash attention
python tests/gpu/check_resume.py --device cpu          on the CPU, where all must be equal
python tests/gpu/check_resume.py --small               on the CPU, eight steps and two kills

Two runs are left alone: what differs between them is the device's doing, not a kill's. Then one is killed with SIGKILL,
within a step and while a checkpoint is written, by turns: the trainer alone, and all of its processes at once. The
model is random and its reward means nothing, but gradients are real. Prints one JSON object; exit code 1 when
something is lost or left behind, and on a CPU also when anything differs.
"""

import argparse
import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]  # it is run as a file

from polyrl.rewards.reward import RewardInput  # noqa: E402  the rest is imported where it is used: rewards need it not

MARK = "POLYRL_CHECK_RESUME"
"""In the environment of whatever we start, and they start."""
DETERMINISTIC = (
    "import sys, torch; torch.use_deterministic_algorithms(True, warn_only=True); "
    "from polyrl.cli.main import main; sys.exit(main())"
)
TOLD = ("reward/mean", "reward/std", "token/response_length/mean", "actor/pg_loss", "actor/entropy", "actor/grad_norm")
PROMPTS = 8
PATIENCE_S = 240.0
VICTIMS = ("trainer", "all of them")
MOMENTS = ("in a step", "in a step", "in a checkpoint", "in a checkpoint")


def share_of_digits(given: RewardInput) -> float:
    """The reward."""
    return sum(one.isdigit() for one in given.answer) / max(1, len(given.answer))


class Runs:
    """Starts `polyrl` with one environment, and finds what is left of it."""

    def __init__(self, root: Path, options: argparse.Namespace) -> None:
        self.root, self._options = root, options
        self._mark = f"{MARK}={os.getpid()}"
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        name, _, value = self._mark.partition("=")
        self._environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", name: value}
        if not options.plain:
            self._environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

    def train(self, name: str) -> subprocess.Popen[bytes]:
        return self._start(
            name, "train", "arithmetic", "--run-dir", str(self.root / name), f"model.path={self.root / 'model'}",
            f"model.device={self._options.device}", f"model.dtype={self._options.dtype}", "train.mode=synchronous",
            f"train.steps={self._options.steps}", "checkpoint.every_steps=3", "manager.port=0", "optimizer.lr=1e-3",
            "data.reward=tests.gpu.check_resume:share_of_digits", f"data.prompts_per_step={PROMPTS}",
            "validation.every_steps=0", "validation.at_start=false",
        )  # fmt: skip

    def resume(self, name: str) -> subprocess.Popen[bytes]:
        return self._start(name, "train", "--resume", str(self.root / name))

    def verify(self, name: str) -> str:
        """What is wrong with its ledger; empty if nothing is."""
        command = [sys.executable, "-m", "polyrl", "ledger", str(self.root / name), "--verify", "--json"]
        told = subprocess.run(command, env=self._environment, capture_output=True, timeout=PATIENCE_S, check=False)
        if told.returncode != 0:
            return told.stderr.decode()[-1000:] or f"exit code {told.returncode}"
        return "" if json.loads(told.stdout)["steps"] == self._options.steps else "steps are missing"

    def _start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        how = ("-c", DETERMINISTIC) if self._options.deterministic else ("-m", "polyrl")
        with (self.root / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, *how, *arguments], env=self._environment, stdout=log, stderr=log, cwd=self.root
            )

    def said(self, name: str) -> str:
        return (self.root / f"{name}.log").read_text(errors="replace")

    def alive(self) -> list[int]:
        """Processes of ours, and those that they started."""
        found: list[int] = []
        for folder in Path("/proc").iterdir():
            try:
                is_ours = folder.name.isdigit() and self._mark.encode() in (folder / "environ").read_bytes().split(
                    b"\0"
                )
            except OSError:
                continue
            if is_ours and not is_gone(folder):
                found.append(int(folder.name))
        return found


def is_gone(folder: Path) -> bool:
    """Ended, and only not yet asked about."""
    try:
        return (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it ends with the one before
            os.kill(pid, signal.SIGKILL)


def until(holds: Callable[[], bool], process: subprocess.Popen[bytes], pause_s: float = 0.02) -> bool:
    """Whether it came to hold before the process ended."""
    end = time.monotonic() + PATIENCE_S
    while not holds():
        if process.poll() is not None:
            return False
        assert time.monotonic() < end, "it does not go on"
        time.sleep(pause_s)
    return True


def steps_told(run_dir: Path) -> list[dict[str, Any]]:
    from polyrl.telemetry.metrics import FILE_NAME, read_metrics

    return list(read_metrics(run_dir / FILE_NAME)) if (run_dir / FILE_NAME).exists() else []


def kill_and_go_on(runs: Runs, num_kills: int) -> dict[str, Any]:
    """Train a run to its end, killing it on the way."""
    from polyrl.run.checkpoints import wait_for_manager_to_end
    from polyrl.trainer.state import checkpoint

    name, draw = "killed", random.Random(0)
    run_dir = runs.root / name
    folder = run_dir / checkpoint.FOLDER
    kills: list[dict[str, Any]] = []
    resumed_s: list[float] = []
    began, process, first = time.monotonic(), runs.train(name), 0
    while True:
        if not until(lambda first=first: len(steps_told(run_dir)) > first, process):
            break
        if kills:
            resumed_s.append(round(time.monotonic() - began, 1))
        if len(kills) == num_kills:
            break
        if not until(lambda first=first: len(steps_told(run_dir)) > first + 1, process):  # the first one compiles
            break
        moment, victim = MOMENTS[len(kills) % len(MOMENTS)], VICTIMS[len(kills) % len(VICTIMS)]
        if moment == "in a step":
            time.sleep(draw.uniform(0.0, 1.5 * steps_told(run_dir)[-1]["time/step_total"]))
        elif not until(lambda: any(folder.glob(".step-*")), process, 0.0005):
            break
        if process.poll() is not None:
            break
        kill([process.pid] if victim == "trainer" else runs.alive())
        process.wait()
        kills.append({
            "moment": moment, "killed": victim, "steps_told": len(steps_told(run_dir)),
            "half_a_checkpoint_is_there": any(folder.glob(".step-*")),
        })  # fmt: skip
        print(f"killed {victim} {moment}, after {len(steps_told(run_dir))} steps", file=sys.stderr, flush=True)
        wait_for_manager_to_end(run_dir)
        said = len(runs.said(name))
        began, process = time.monotonic(), runs.resume(name)
        if not until(lambda said=said: "at step " in runs.said(name)[said:], process):
            break
        first = int(runs.said(name)[said:].partition("at step ")[2].split()[0] or 0)
    code = process.wait(PATIENCE_S)
    return {"kills": kills, "seconds_from_resume_to_the_first_step_told": resumed_s, "exit_code": code}


def compare(one: Path, other: Path) -> dict[str, Any]:
    """Their metrics, step by step, and all that their last checkpoints hold."""
    import torch

    from polyrl.trainer.state import checkpoint

    lines, theirs = steps_told(one), steps_told(other)
    told: dict[str, Any] = {}
    for name in TOLD:
        pairs = [(float(a[name] or 0), float(b[name] or 0)) for a, b in zip(lines, theirs, strict=True)]
        differ = [step for step, (a, b) in enumerate(pairs) if a != b]
        if differ:
            most = max(abs(a - b) / max(abs(a), abs(b)) for a, b in (pairs[step] for step in differ))
            told[name] = {"first_step": differ[0], "steps": len(differ), "most_relative": most}
    (state, tensors), (its_state, its_tensors) = (checkpoint.load(checkpoint.found(run)[-1]) for run in (one, other))
    assert state.next_step == its_state.next_step and tensors.keys() == its_tensors.keys()
    apart: dict[str, Any] = {}
    unequal = [key for key in tensors if not torch.equal(tensors[key], its_tensors[key])]
    if unequal:
        square = sum(float((tensors[key].double() - its_tensors[key].double()).square().sum()) for key in unequal)
        whole = sum(float(tensors[key].double().square().sum()) for key in unequal)
        apart = {"tensors": len(unequal), "of": len(tensors), "relative": math.sqrt(square / whole) if whole else None}
    return {
        "steps": len(lines), "metrics_equal": not told, "weights_and_optimizer_equal": not unequal,
        "metrics_apart": told, "tensors_apart": apart,
    }  # fmt: skip


def make_model(folder: Path, *, is_large: bool) -> None:
    """Large: 22 million parameters. What is saved of it takes long enough to be killed meanwhile."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from polyrl.data import characters

    width, layers, head = (512, 8, 64) if is_large else (64, 2, 16)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(characters.VOCABULARY), hidden_size=width, intermediate_size=2 * width,
            num_hidden_layers=layers, num_attention_heads=width // head, num_key_value_heads=width // head,
            head_dim=head, max_position_embeddings=512, tie_word_embeddings=False, pad_token_id=characters.PAD_ID,
            eos_token_id=characters.END_ID, bos_token_id=None,
        )
    )  # fmt: skip
    model.save_pretrained(folder)
    characters.save_tokenizer(folder)


def in_shared_memory() -> set[str]:
    """OpenMP's own are left out: whoever links it and is killed leaves a page behind."""
    return {one.name for one in Path("/dev/shm").iterdir() if not one.name.startswith("__KMP_")}


def main(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder), options)
        try:
            return check(runs, options)
        finally:
            kill(runs.alive())  # only where something went wrong


def check(runs: Runs, options: argparse.Namespace) -> int:
    import torch

    began, shared_before = time.monotonic(), in_shared_memory()
    make_model(runs.root / "model", is_large=options.device == "cuda")
    alone = {name: runs.train(name) for name in ("whole", "whole-again")}
    codes = {name: process.wait(PATIENCE_S) for name, process in alone.items()}
    whole_s = time.monotonic() - began
    print(f"two runs left alone took {whole_s:.0f} s", file=sys.stderr, flush=True)
    for name in (name for name, code in codes.items() if code):
        print(runs.said(name)[-3000:], file=sys.stderr)
        return 1
    killed = kill_and_go_on(runs, options.kills)
    if killed["exit_code"]:
        print(json.dumps(killed), runs.said("killed")[-3000:], file=sys.stderr)
        return 1
    time.sleep(2.0)  # a manager whose trainer is gone puts its files away
    of_kills, of_device = (compare(runs.root / "whole", runs.root / name) for name in ("killed", "whole-again"))
    wrong = {name: told for name in ("whole", "killed") if (told := runs.verify(name))}
    left = {"processes": runs.alive(), "shared_memory": sorted(in_shared_memory() - shared_before)}
    not_the_same = "is not what it was, bit for bit" in runs.said("killed")
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    print(json.dumps({
        "device": device, "torch": torch.__version__, "dtype": options.dtype, "mode": "synchronous",
        "cublas_workspace": not options.plain, "deterministic_algorithms": options.deterministic,
        "steps": options.steps, "num_kills": len(killed["kills"]), **killed,
        "killed_against_whole": of_kills, "whole_again_against_whole": of_device,
        "warned_that_a_version_came_out_otherwise": not_the_same,
        "ledger": wrong or "verified", "left_behind": left,
        "seconds": {"both_whole_runs": round(whole_s, 1), "all": round(time.monotonic() - began, 1)},
    }, indent=2))  # fmt: skip
    is_equal = of_kills["metrics_equal"] and of_kills["weights_and_optimizer_equal"]
    is_right = not wrong and not any(left.values()) and len(killed["kills"]) >= options.kills
    return 0 if is_right and (is_equal or options.device != "cpu") else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    if given.small:
        given.device, given.dtype, given.steps, given.kills = "cpu", "float32", 8, 2
    sys.exit(main(given))
