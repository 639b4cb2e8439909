"""The CUDA runner on an emulated GPU (emulated_gpu.py): it answers as the CPU's does. On a real one: tests/gpu.

One case is for `make test`, the others for `make test-gpu-scripts`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.builtin.tiny_models import save_tiny

pytest.importorskip("triton", reason="Triton comes with a torch for GPUs, or by `pip install triton`")

SCRIPT = """
import asyncio, json, sys
what, model, root = sys.argv[1:]
sys.path.insert(0, root)
from tests.builtin import emulated_gpu
from polyrl.engines.builtin.config import BuiltinConfig
from polyrl.engines.builtin.engine import BuiltinEngine
from polyrl.engines.engine import Job
from polyrl.wire.frames import Sampling

class Sink:
    def __init__(self):
        self.text, self.logprobs, self.ends = {}, {}, {}
    def tokens(self, lease, tokens, logprobs, version):
        self.text.setdefault(lease, []).extend(tokens)
        self.logprobs.setdefault(lease, []).extend(logprobs)
    def ended(self, lease, reason, detail=""):
        self.ends[lease] = f"{reason} {detail}".strip()

def jobs():
    lengths = (1, 5, 16, 33, 33, 40, 8)
    ways = [Sampling(ignore_eos=True), Sampling(ignore_eos=True, temperature=0.7)]
    if what == "truncated":
        ways = [Sampling(ignore_eos=True, top_p=0.8), Sampling(ignore_eos=True), Sampling(ignore_eos=True, top_k=5)]
    if what == "speculating":
        ways = [Sampling(ignore_eos=True, temperature=0.0), Sampling(ignore_eos=True, temperature=0.2)]
    for number, length in enumerate(lengths * (1 + (what == "speculating"))):  # again, with answers to draft from
        number, lease = number % len(lengths), number + 1
        prompt = [7 + (3 * at if length == 33 else 5 * number + at) % 80 for at in range(length)]
        yield Job(lease, number, prompt, [], 4 + 2 * number, 99 + number, ways[number % len(ways)])

async def run(alone=False, is_gpu=True):
    config = BuiltinConfig(
        model=model, device="cpu", slots=4, kv_tokens=1024, block_tokens=16, chunk_tokens=32,
        compile=False, speculation="always" if what == "speculating" and is_gpu else "off",
        batch_invariant=what == "invariant", in_sleep="offload" if what == "offloading" else "keep",
    )
    engine, sink = BuiltinEngine(config), Sink()
    await engine.start(sink)
    async def until(is_there):
        while not is_there():
            assert engine.health() is None, engine.health()
            await asyncio.sleep(0.01)
    for job in jobs():
        engine.generate(job)
        if alone:
            await until(lambda: job.lease in sink.ends)
    if what in ("sleeping", "offloading"):
        await until(lambda: len(sink.text.get(2, ())) > 2)
        await engine.sleep()
        await engine.wake()
    await until(lambda: len(sink.ends) == len(list(jobs())))
    came = {"ends": sink.ends, "text": sink.text, "logprobs": sink.logprobs}
    came["accepted"] = engine.stats().speculated.num_accepted
    if type(engine._runner).__name__ == "CudaRunner":
        runner = engine._runner
        decoding = [*runner._graphs.values(), *runner._graphs_to_logits.values()]
        prefilling = [one.captured for one in runner._prefilling._graphs.values()]
        came["replays"] = [sum(one.graph.num_replays for one in some) for some in (decoding, prefilling)]
    await engine.close()
    return came

told = {"cpu": asyncio.run(run(is_gpu=False))}
emulated_gpu.install()
told["gpu"] = asyncio.run(run())
if what == "invariant":
    told["alone"] = asyncio.run(run(alone=True))
print(json.dumps(told))
"""


@pytest.mark.parametrize(
    ("what", "family", "num_layers"),
    [
        ("truncated", "llama", 1),
        pytest.param("plain", "qwen3", 2, marks=pytest.mark.gpu_scripts),
        pytest.param("invariant", "qwen2", 1, marks=pytest.mark.gpu_scripts),
        pytest.param("sleeping", "gemma3_text", 2, marks=pytest.mark.gpu_scripts),
        pytest.param("offloading", "qwen3", 1, marks=pytest.mark.gpu_scripts),
        pytest.param("speculating", "mistral", 1, marks=pytest.mark.gpu_scripts),
    ],
)
def test_answers_are_those_of_the_cpu(what: str, family: str, num_layers: int, tmp_path):
    """More samples than places, chunks of several steps, a prompt that two share, bursts."""
    model = save_tiny(family, tmp_path, num_hidden_layers=num_layers)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    argv = [sys.executable, "-c", SCRIPT, what, str(model), str(root)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    ours, theirs = told["gpu"], told["cpu"]
    num = 14 if what == "speculating" else 7
    assert ours["ends"] == theirs["ends"] == {str(lease): "length" for lease in range(1, num + 1)}
    assert ours["text"] == theirs["text"]
    for lease, logprobs in ours["logprobs"].items():
        assert logprobs == pytest.approx(theirs["logprobs"][lease], abs=1e-4)
    assert all(ours["replays"]), "it decodes and prefills from graphs"
    assert (ours["accepted"] > 20) == (what == "speculating")
    if what == "invariant":
        alone = told["alone"]
        assert (alone["text"], alone["logprobs"]) == (ours["text"], ours["logprobs"]), "to the last bit"
