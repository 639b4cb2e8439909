"""The GPU kernels, on the CPU: Triton's interpreter runs them as they are. Speed and the rest: tests/gpu, by hand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton comes with a torch for GPUs, or by `pip install triton`")

DECODING = """
import torch
from polyrl.engines.builtin.cuda import kernels
torch.manual_seed(0)
num, heads, num_kv, dim, block, num_blocks = 5, 6, 2, 32, 16, 40
lengths = torch.tensor([1, 16, 17, 50, 63])
tables = torch.zeros(num, 8, dtype=torch.int32)
free = torch.randperm(num_blocks).int().tolist()
for row, length in enumerate(lengths.tolist()):
    for at in range(-(-length // block)):
        tables[row, at] = free.pop()
query, key, value = (torch.randn(num, one, dim) for one in (heads, num_kv, num_kv))
for window, splits in ((kernels.EVERYTHING, 1), (kernels.EVERYTHING, 4), (20, 2), (1, 1)):
    keys, values = torch.randn(num_blocks, num_kv, block, dim), torch.randn(num_blocks, num_kv, block, dim)
    out = kernels.paged_decode(query, key, value, keys, values, tables, lengths - 1, dim**-0.5, window, splits)
    for row, length in enumerate(lengths.tolist()):
        its = tables[row, : -(-length // block)].long()
        first = max(0, length - window)
        its_keys = keys[its].transpose(1, 2).reshape(-1, num_kv, dim)[first:length]
        its_values = values[its].transpose(1, 2).reshape(-1, num_kv, dim)[first:length]
        assert torch.equal(its_keys[-1], key[row]), "the newest key is in the cache"
        scores = torch.einsum("hgd,thd->hgt", query[row].view(num_kv, -1, dim), its_keys) * dim**-0.5
        wanted = torch.einsum("hgt,thd->hgd", scores.softmax(-1), its_values).reshape(heads, dim)
        assert (wanted - out[row]).abs().max() < 1e-5, (row, window, splits)
key[0], value[0] = float("nan"), float("inf")
kernels.paged_decode(query, key, value, keys, values, tables, lengths - 1, dim**-0.5, kernels.EVERYTHING, 4)
assert values.isfinite().all(), "the next one to have the block reads them, at weight zero"
key[0], value[0] = 0.5, 0.5
out = kernels.paged_decode(query, key, value, keys, values, tables, lengths, dim**-0.5, kernels.EVERYTHING, 4)
assert out[0].isnan().all() and out[1:].isfinite().all(), "its own context has a key that is no number"
"""

DRAWING = """
import torch
from polyrl.engines.builtin import sampling
from polyrl.engines.builtin.cuda import kernels
torch.manual_seed(0)
logits, temperatures = torch.randn(7, 10_000) * 2, torch.rand(7) + 0.5
temperatures[3] = 0.0
seeds, positions = torch.randint(0, 1 << 62, (7,)), torch.arange(7) * 13
assert kernels.uniforms(seeds, positions).tolist() == sampling.uniforms(seeds.tolist(), positions.tolist()).tolist()
for _ in range(6):
    numbers = torch.rand(7, dtype=torch.float64)
    tokens, logprobs = kernels.draw(logits, temperatures, numbers)
    wanted, wanted_logprobs = sampling.draw(logits, sampling.Draws(temperatures, numbers, [], is_plain=False))
    assert torch.equal(tokens, wanted)
    assert (logprobs - wanted_logprobs).abs().max() < 1e-4
all_drawn, all_logprobs, cursor = torch.zeros(3, 9, dtype=torch.int64), torch.zeros(3, 9), torch.tensor([1])
last, at, answers = torch.zeros(9, dtype=torch.int64), torch.arange(9), torch.arange(9) * 2
kernels.note(tokens, logprobs, cursor, all_drawn, all_logprobs, last, at, answers)
assert torch.equal(all_drawn[1, :7], tokens) and torch.equal(all_logprobs[1, :7], logprobs)
assert not all_drawn[[0, 2]].any() and not all_drawn[:, 7:].any() and cursor.item() == 2
assert torch.equal(last[:7], tokens) and at.tolist() == [1, 2, 3, 4, 5, 6, 7, 7, 8] and answers[6] == 13
"""

EDGES = """
import torch
from polyrl.engines.builtin.cuda import kernels
torch.manual_seed(0)
num, half = 768, kernels.STRETCH
logits = torch.full((num, 2 * half), -60.0)
logits[:, :3000], logits[:, half:] = torch.randn(num, 3000), torch.randn(num, half)
edges = logits.double().softmax(-1)[:, :half].sum(-1)
numbers = edges - torch.rand(num, dtype=torch.float64) * 1e-6
tokens, logprobs = kernels.draw(logits, torch.ones(num), numbers)
assert logprobs.min() > -20, "a token without weight was drawn"
"""

CHUNKS = """
import torch
from torch._dynamo.testing import CompileCounter
from polyrl.engines.builtin.cuda import kernels
torch.manual_seed(0)
counter = CompileCounter()
compiled = torch.compile(kernels.attend_one_by_one, backend=counter, dynamic=True)
for rows, contexts in (([3, 5], [3, 9]), ([1, 4, 2], [8, 4, 2]), ([6, 2, 2, 2, 0, 0], [6, 7, 2, 30, 0, 0])):
    first_rows, first_contexts = (torch.tensor([0, *one]).cumsum(0) for one in (rows, contexts))
    query = torch.randn(sum(rows), 4, 16)
    keys, values = torch.randn(2, sum(contexts), 4, 16)
    for window in (kernels.EVERYTHING, 3):
        out = compiled(query, keys, values, first_rows, first_contexts, 0.25, window)
        for number, (num, total) in enumerate(zip(rows, contexts)):
            row, at = int(first_rows[number]), int(first_contexts[number])
            for i in range(num):
                seen = slice(at + max(0, total - num + i + 1 - window), at + total - num + i + 1)
                scores = torch.einsum("hd,thd->ht", query[row + i], keys[seen]) * 0.25
                wanted = torch.einsum("ht,thd->hd", scores.softmax(-1), values[seen])
                assert (wanted - out[row + i]).abs().max() < 1e-5, (rows, number, i, window)
assert counter.frame_count <= 2, "compiled once for each window"
"""

PREFILLING = """
import torch
from polyrl.engines.builtin.cuda import kernels
torch.manual_seed(0)
num, dim, block, num_blocks = 11, 32, 8, 20
for num_kv in (1, 3, 4):
    keys, values = torch.randn(2, num_blocks, num_kv, block, dim)
    before = keys.clone(), values.clone()
    merged = torch.randn(num, 3 * num_kv, dim)
    key, value = merged[:, :num_kv], merged[:, 2 * num_kv :]
    value[4, 0, 5] = float("nan")
    cells = torch.randperm(num_blocks * block)[:num]
    blocks, within = torch.cat([cells // block, torch.arange(7)]), torch.cat([cells % block, torch.arange(7)])
    its_keys, its_values = kernels.write_and_gather(key, value, keys, values, cells, blocks, within)
    for cache, old, new in zip((keys, values), before, (key, value.nan_to_num(0.0))):
        old[cells // block, :, cells % block] = new
        assert torch.equal(cache, old), "what belongs to others stays as it was"
    assert torch.equal(its_keys, keys[blocks, :, within]) and torch.equal(its_values, values[blocks, :, within])
"""

OTHERS = {"drawing": DRAWING, "edges": EDGES, "chunks": CHUNKS, "prefilling": PREFILLING}
"""Of kernels that test_cuda_runner.py runs too, against the engine on the CPU."""


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(DECODING, id="decoding"),
        *(pytest.param(one, id=name, marks=pytest.mark.gpu_scripts) for name, one in OTHERS.items()),
    ],
)
def test_a_kernel_gives_what_torch_gives(script):
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    argv = [sys.executable, "-c", f"import tests.builtin.quick_interpreter\n{script}"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
