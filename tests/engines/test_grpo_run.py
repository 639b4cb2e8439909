"""GRPO with real servers: two vLLM workers and an SGLang one join a run, die, leave and join again, and it learns on.

Everything is a real process. The engines' log-probabilities are held against the trainer's in every step, so weights
that did not arrive whole would show.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.builtin.tiny_models import letters_of, save_tiny
from tests.engines.servers import python_of

from polyrl.cli.main import main
from polyrl.engines.served.server import ServerKind
from polyrl.telemetry.metrics import MetricValue, read_metrics

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]

PATIENCE_S = 900.0
RECIPE = """
name = "served"
model = { path = "model", dtype = "float32" }
train = { steps = 1000, local_generation = false, mismatch_warning = 1e-5 }
optimizer = { lr = 1e-3 }
rollout = { max_new_tokens = 32 }
data = { source = "rows.jsonl", reward = "their_reward:score", prompts_per_step = 4 }
validation = { at_start = false, every_steps = 0 }
rounds = { samples_per_prompt = 4 }
rewards = { processes = 1 }
manager = { port = 0 }
"""
REWARD = """
def score(given):
    return len(set(given.answer)) / 32
"""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2] / "src")}


class Run:
    """A trainer and its workers, as processes that end with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._all: list[subprocess.Popen[bytes]] = []
        self.trainer = self._start("trainer", "train", "recipe.toml", "train.run_dir=run")
        self.until(lambda: b"manager: http" in self.log("trainer"), "the manager is up")
        found = re.search(rb"manager: (\S+)", self.log("trainer"))
        assert found is not None
        self.url = found[1].decode()

    def worker(self, kind: ServerKind, name: str) -> "subprocess.Popen[bytes]":
        where = ("--join", self.url, "--token-file", "run/worker.token", "--name", name)
        engine = ("--engine", kind, "--engine-python", python_of(kind), "--model", "model")
        return self._start(name, "worker", *where, *engine, "slots=16", "kv_tokens=8192", f"log=server-{name}.log")

    def _start(self, name: str, *arguments: str) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{name}.log").open("wb") as log:
            started = subprocess.Popen(
                [sys.executable, "-m", "polyrl", *arguments],
                cwd=self.folder, env=ENVIRONMENT, stdout=log, stderr=log, process_group=0,
            )  # fmt: skip
        self._all.append(started)
        return started

    def log(self, name: str) -> bytes:
        return (self.folder / f"{name}.log").read_bytes()

    def steps(self) -> list[dict[str, MetricValue]]:
        path = self.folder / "run" / "metrics.jsonl"
        return list(read_metrics(path)) if path.exists() else []

    def wrote(self, kind: ServerKind, after: int = -1) -> list[float]:
        """How far this kind of engine was from the trainer, in the steps after that one that it wrote for."""
        numbers = [line.get(f"actor/mismatch_kl/{kind}/0") for line in self.steps() if int(line["step"] or 0) > after]
        return [one for one in numbers if isinstance(one, float)]

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + PATIENCE_S
        while not is_so():
            if time.monotonic() > until or self.trainer.poll() is not None:
                logs = [f"{one.name}: {one.read_text(errors='replace')[-1500:]}" for one in self.folder.glob("*.log")]
                pytest.fail("\n".join([f"not so: {what}", *logs]))
            time.sleep(0.2)

    def close(self) -> None:
        for one in self._all:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(one.pid, number)
                    one.wait(30.0)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    save_tiny("qwen3", tmp_path / "model", tokenizer=True, vocab_size=64, head_dim=32)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "their_reward.py").write_text(REWARD)
    rows = [json.dumps({"prompt": letters_of(list(range(3 + number, 7 + number)))}) for number in range(50)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    started = Run(tmp_path)
    try:
        yield started
    finally:
        started.close()


def test_a_run_learns_on_while_servers_of_both_kinds_join_die_and_leave(run: Run, capsys: pytest.CaptureFixture[str]):
    first, second, third = run.worker("vllm", "v1"), run.worker("vllm", "v2"), run.worker("sglang", "s1")
    run.until(lambda: len(run.wrote("vllm")) >= 2, "vLLM workers have written for two steps")
    first.send_signal(signal.SIGKILL)  # and with it its server
    late = run.worker("vllm", "v3")
    run.until(lambda: len(run.wrote("sglang")) >= 2, "the SGLang worker has written for two steps")
    second.send_signal(signal.SIGTERM)  # hands over, and leaves
    run.until(lambda: second.poll() is not None, "the second worker has left")
    assert second.returncode == 0, run.log("v2")
    left_at = len(run.steps())
    run.until(lambda: len(run.wrote("vllm", left_at)) >= 2, "the vLLM worker that came late has written")
    third.send_signal(signal.SIGKILL)
    killed_at = len(run.steps())
    run.until(lambda: len(run.steps()) >= killed_at + 3, "the last of them carries the run alone")
    run.trainer.send_signal(signal.SIGINT)
    assert run.trainer.wait(120.0) in (0, 130), run.log("trainer")
    assert late.poll() is None, run.log("v3")  # it waits for the run to go on

    assert main(["ledger", str(run.folder / "run"), "--verify"]) == 0, capsys.readouterr()
    for kind in ("vllm", "sglang"):
        assert max(run.wrote(kind)) < 1e-5
    assert b"above train.mismatch_warning" not in run.log("trainer")
    with capsys.disabled():
        print(
            f"\n{len(run.steps())} steps of GRPO; mismatch at most {max(run.wrote('vllm')):.1e} nats with vLLM in "
            f"{len(run.wrote('vllm'))} steps, {max(run.wrote('sglang')):.1e} with SGLang in {len(run.wrote('sglang'))}"
        )
