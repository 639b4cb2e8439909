"""A recipe of examples/environments, trained with a worker beside it; undisturbed, or with processes killed.

    polyrl train examples/environments/frozen-lake.toml environments.python=.venv-environments --run-dir runs/lake
    python -m tests.environments.disturbed frozen-lake --model models/frozen-lake --against runs/lake

trains it again, kills a worker, the host and the manager on the way, and compares the rewards of each step. Hosts and
managers that are killed are started again by the run; workers by this script.
"""

import argparse
import json
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

from tests.processes import children

from polyrl.telemetry.metrics import read_metrics

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "environments"
PATIENCE_S = 300.0
ENGINE = {"slots": 64, "kv_tokens": 65536}
FLEET = (
    "fleet.workers=1",
    "fleet.wait=true",
    f"fleet.settings={{ slots = {ENGINE['slots']}, kv_tokens = {ENGINE['kv_tokens']} }}",
)


def package_python() -> Path:
    """The environment with the packages: that of `make environments`, unless ENVIRONMENTS_PYTHON names another."""
    return Path(os.environ.get("ENVIRONMENTS_PYTHON") or ROOT / ".venv-environments")


def surroundings() -> dict[str, str]:
    found = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, found)), "OMP_NUM_THREADS": "1"}


def polyrl(log: Path, *arguments: str) -> "subprocess.Popen[bytes]":
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "polyrl", *arguments], stdout=output, stderr=output, env=surroundings()
        )


class TrainedHere:
    """One run with one worker. `kills` says after which step who is killed."""

    def __init__(self, recipe: str, model: Path, python: Path, folder: Path, settings: tuple[str, ...] = ()) -> None:
        self.model, self.folder, self.run_dir = model, folder, folder / "run"
        self.worker: subprocess.Popen[bytes] | None = None
        self.killed: list[str] = []
        folder.mkdir(parents=True)
        given = (
            f"model.path={model}",
            f"environments.python={python}",
            "manager.port=0",
            *FLEET,
        )
        self.trainer = polyrl(
            folder / "train.log",
            *("train", str(EXAMPLES / f"{recipe}.toml"), *given, *settings, "--run-dir", str(self.run_dir)),
        )

    def play(self, kills: dict[int, str]) -> None:
        """Train to the end. Raises AssertionError with the end of the log if that fails, or somebody was not killed."""
        try:
            draw = random.Random(0)
            for step, victim in sorted(kills.items()):
                self._wait(lambda wanted=step: self.num_steps >= wanted, f"{step} steps are trained")
                time.sleep(draw.uniform(0.0, self._shortest_step_s))
                self._check(self.trainer.poll() is None, f"it ended before {victim} was killed: give it more steps")
                self._kill(victim)
            self.trainer.wait(PATIENCE_S * 2)
            self._check(self.trainer.returncode == 0, f"exit code {self.trainer.returncode}")
        finally:
            for process in (self.trainer, self.worker):
                if process is not None and process.poll() is None:
                    process.kill()
                    process.wait()

    @property
    def num_steps(self) -> int:
        return len(self.rewards())

    @property
    def _shortest_step_s(self) -> float:
        """A kill comes within it: the last step may have waited half a minute for a host to start again."""
        return min(float(one["time/step_total"] or 0.0) for one in read_metrics(self.run_dir / "metrics.jsonl"))

    def rewards(self) -> list[tuple[Any, ...]]:
        return rewards_of(self.run_dir)

    def _start_worker(self) -> None:
        url = json.loads((self.run_dir / "manager.json").read_text())["url"]
        joining = ("--join", url, "--token-file", str(self.run_dir / "worker.token"), "--model", str(self.model))
        settings = ("dtype=float32", *(f"{key}={value}" for key, value in ENGINE.items()))
        log, number = self.folder / "worker.log", len(self.killed)
        self.worker = polyrl(log, "worker", *joining, "--engine", "builtin", "--name", f"again-{number}", *settings)

    def _kill(self, victim: str) -> None:
        if victim == "worker" and self.worker is not None:
            self.worker.kill()
            self.worker.wait()
        else:
            self._wait(lambda: bool(children(self.trainer.pid, victim)), f"{victim} runs")
            for pid in children(self.trainer.pid, victim):
                os.kill(pid, signal.SIGKILL)
        if victim == "worker":
            self._start_worker()
        self.killed.append(victim)

    def _wait(self, holds: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + PATIENCE_S
        while not holds() and self.trainer.poll() is None:
            self._check(time.monotonic() < until, f"not within {PATIENCE_S:.0f} s: {what}")
            time.sleep(0.05)
        self._check(self.trainer.poll() in (None, 0), f"it ended before: {what}")

    def _check(self, holds: bool, what: str) -> None:
        if not holds:
            log = (self.folder / "train.log").read_text(errors="replace")
            raise AssertionError(f"{what}\n{log[-3000:]}")


def rewards_of(run_dir: Path) -> list[tuple[Any, ...]]:
    """Mean and spread of the rewards of each step, and the tokens that were drawn."""
    told = ("step", "reward/mean", "reward/std", "token/response_length/mean")
    file = run_dir / "metrics.jsonl"
    return [tuple(line.get(name) for name in told) for line in read_metrics(file)] if file.is_file() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--python", type=Path, default=package_python())
    parser.add_argument("--against", type=Path, required=True, help="the directory of an undisturbed run")
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run = TrainedHere(args.recipe, args.model, args.python, Path(folder) / "killed")
        run.play({2: "worker", 4: "env", 6: "manager", 9: "env", 12: "worker"})
        print(f"{time.monotonic() - began:.0f} s, killed: {', '.join(run.killed)}")
        expected = rewards_of(args.against)
        print(*run.rewards(), sep="\n")
        print("the same as undisturbed" if run.rewards() == expected else "NOT the same as undisturbed")


if __name__ == "__main__":
    main()
