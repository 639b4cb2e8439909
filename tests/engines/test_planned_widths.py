"""The parallelism planner with real vLLM servers: a run starts two of one device, and goes on with one of two."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.engines.servers import python_of

from polyrl.config.recipe import ArithmeticTask
from polyrl.starters import arithmetic
from polyrl.telemetry.metrics import read_metrics

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1500)]
SETTINGS = (
    "manager.port=0", "data.prompts_per_step=32", "rounds.samples_per_prompt=8", "rollout.max_new_tokens=16",
    "validation.every_steps=0", "validation.at_start=false", "checkpoint.enabled=false", "algorithm.zero_variance=keep",
    "train.local_generation=false", "train.steps=4", "fleet.engine=vllm", "fleet.workers=2", "fleet.wait=true",
    "fleet.settings.slots=64", "fleet.settings.kv_tokens=8192",
    "parallelism.enabled=true", "parallelism.reshape_s=0", "parallelism.memory_gb=1",
    "parallelism.speed.fixed_s=0.01", "parallelism.speed.per_sample_s=0", "parallelism.speed.per_context_token_s=0",
    "parallelism.speed.tp_exponent=0.9",
)  # fmt: skip


def test_a_run_drains_its_servers_and_goes_on_with_wider_ones(tmp_path: Path):
    model, run_dir = tmp_path / "model", tmp_path / "run"
    arithmetic.make_model(model, seed=0, task=ArithmeticTask(), num_steps=30)
    given = (f"model.path={model}", *SETTINGS, f"fleet.engine_python={python_of('vllm')}", "--run-dir", str(run_dir))
    done = subprocess.run(
        [sys.executable, "-m", "polyrl", "train", "arithmetic", *given],
        capture_output=True, text=True, timeout=1400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "engines: 1 of 2 devices each: " in " ".join(done.stdout.split())
    lines = read_metrics(run_dir / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert all(float(line["actor/mismatch_kl/vllm/0"] or 0.0) < 1e-3 for line in lines)
    assert "tensor_parallel_size" in (run_dir / "logs" / "worker-2-server.log").read_text()
