"""The parallelism planner with real vLLM servers: a run starts two of one device, and goes on with one of two.

The speed that the plan is made from is configured here, so that two devices are expected to be faster. On the CPU a
device is a process of the server.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.builtin.tiny_models import letters_of, save_tiny
from tests.engines.servers import python_of

from polyrl.telemetry.metrics import read_metrics

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800)]
RECIPE = """
name = "planned"
model = {{ path = "model", dtype = "float32" }}
train = {{ steps = 3, local_generation = false }}
optimizer = {{ lr = 1e-3 }}
rollout = {{ max_new_tokens = 16 }}
data = {{ source = "rows.jsonl", reward = "their_reward:score", prompts_per_step = 32 }}
algorithm = {{ zero_variance = "keep" }}
validation = {{ at_start = false, every_steps = 0 }}
checkpoint = {{ enabled = false }}
rounds = {{ samples_per_prompt = 8 }}
rewards = {{ processes = 1 }}
manager = {{ port = 0 }}
[fleet]
engine = "vllm"
engine_python = "{python}"
workers = 2
wait = true
settings = {{ slots = 256, kv_tokens = 16384 }}
[parallelism]
enabled = true
reshape_s = 0.0
memory_gb = 1.0
speed = {{ fixed_s = 0.01, per_sample_s = 0.0, per_context_token_s = 0.0, tp_exponent = 0.9 }}
"""
REWARD = """
def score(given):
    return len(set(given.answer)) / 32
"""


def test_a_run_drains_its_servers_and_goes_on_with_a_wider_one(tmp_path: Path):
    save_tiny("qwen3", tmp_path / "model", tokenizer=True, vocab_size=64, head_dim=32)
    (tmp_path / "recipe.toml").write_text(RECIPE.format(python=python_of("vllm")))
    (tmp_path / "their_reward.py").write_text(REWARD)
    rows = [json.dumps({"prompt": letters_of(list(range(3 + number, 7 + number)))}) for number in range(50)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run(
        [sys.executable, "-m", "polyrl", "train", "recipe.toml", "--run-dir", "run"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1700, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "engines: 1 of 2 devices each: " in " ".join(done.stdout.split())
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    told = [line["actor/mismatch_kl/vllm/0"] for line in lines]
    assert all(isinstance(one, float) and one < 1e-4 for one in told), "what both widths wrote is the trainer's policy"
    assert "'tensor_parallel_size': 2" in (tmp_path / "run/logs/worker-2-server.log").read_text()
