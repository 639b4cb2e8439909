"""Decode steps of few samples, written out: the same logits and cache as by the modules. In Triton's interpreter; on a
GPU, tests/gpu/check_engine.py compares the engine's answers with transformers'.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.builtin.tiny_models import save_tiny

pytest.importorskip("triton", reason="Triton comes with a torch for GPUs, or by `pip install triton`")

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "head_dim": 32,
}

SCRIPT = """
import sys
import torch
from tests.builtin import quick_interpreter
from polyrl.engines.builtin.cuda.kernels import DecodeStep
from polyrl.engines.builtin.cuda.merging import merge_projections
from polyrl.engines.builtin.cuda.small_batch import SmallBatch
from polyrl.engines.builtin.models import describe
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
loaded = describe(model, "x")
merge_projections(model)
small = SmallBatch.find(model, 128)
assert small is not None
torch.manual_seed(0)
attentions = [layer.self_attn for layer in model.model.layers]
shape = (20, loaded.num_kv_heads, 16, loaded.head_dim)
for one in attentions:
    one.register_buffer("paged_keys", torch.randn(shape), persistent=False)
    one.register_buffer("paged_values", torch.randn(shape), persistent=False)
tables, positions = torch.arange(18).view(3, 6).int(), torch.tensor([0, 33, 50])
tokens = torch.tensor([5, 6, 7])
with torch.inference_mode():
    for rows, splits in ((3, 1), (3, 4), (2, 1), (1, 4)):
        step = DecodeStep(tables[-rows:], positions[-rows:], splits)
        found = small.logits(tokens[-rows:], step)
        caches = [(one.paged_keys.clone(), one.paged_values.clone()) for one in attentions]
        hidden = model.model(
            input_ids=tokens[None, -rows:], position_ids=positions[None, -rows:],
            attention_mask=torch.zeros(1, 1, 1, 1), use_cache=False, step=step,
        ).last_hidden_state[0]
        assert (found - loaded.logits(hidden)).abs().max() < 1e-4, (rows, splits)
        for one, (keys, values) in zip(attentions, caches):
            assert (one.paged_keys - keys).abs().max() < 1e-4 and (one.paged_values - values).abs().max() < 1e-4
"""


def _run(script: str, *args: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    return subprocess.run(
        [sys.executable, "-c", script, *args], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    "family", ["qwen3", *(pytest.param(one, marks=pytest.mark.gpu_scripts) for one in ("qwen2", "mistral"))]
)
def test_a_step_that_is_written_out_gives_what_the_modules_give(family, tmp_path):
    done = _run(SCRIPT, str(save_tiny(family, tmp_path, tie_word_embeddings=False, **SIZES)))
    assert done.returncode == 0, done.stderr[-3000:]


NOT_KNOWN = """
import sys
import torch
from polyrl.engines.builtin.cuda.merging import merge_projections
from polyrl.engines.builtin.cuda.small_batch import SmallBatch, tune
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
merge_projections(model)
assert SmallBatch.find(model, 128) is None
for inputs, outputs in ((2048, 4096), (6144, 2048), (896, 1152), (4864, 896), (64, 64)):
    its = tune(inputs, outputs, gated=False)
    assert inputs % (its.step * its.splits) == 0, (inputs, outputs, its)
"""


def test_models_that_are_not_plain_decoders_run_through_their_modules(tmp_path):
    done = _run(NOT_KNOWN, str(save_tiny("gemma", tmp_path)))
    assert done.returncode == 0, done.stderr[-3000:]
