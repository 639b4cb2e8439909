"""Deltas made on a GPU: are they right, and how fast? Run by hand on a machine that has one; CI has none.

python tests/gpu/check_delta.py            qwen3-1.7b, one element in a hundred changed by one unit in the last place
python tests/gpu/check_delta.py --small    a small model on the device that is here

Needs numpy, torch, msgspec, zstandard, xxhash and blake3. Prints one JSON object. Goals: `delta_ms` at most 150,
`load_pinned_ms`, which is the copy of an install, at most 100.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2] / "src"), str(Path(__file__).parents[2])]  # it is run as a file

import torch  # noqa: E402
from tests.gpu.setting import DEVICE, SMALL, need_a_gpu_or_small, synchronize  # noqa: E402

from polyrl.engines.builtin.installing import StagedTensors  # noqa: E402
from polyrl.weights import delta  # noqa: E402
from polyrl.weights.chunks import bad_chunks, table_of  # noqa: E402
from polyrl.weights.manifest import Manifest, encode  # noqa: E402
from polyrl.weights.tensors import layout_of, pair_up, pin, snapshot  # noqa: E402
from polyrl.weights.tensors_gpu import GpuDeltaEncoder  # noqa: E402

QWEN3_1_7B = {"vocab": 151_936, "width": 2048, "inner": 6144, "layers": 28, "heads": 16, "kv_heads": 8, "head_dim": 128}
SMALL_SHAPE = {"vocab": 4096, "width": 256, "inner": 512, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 64}
NUM_STEPS = 6
THREADS = min(8, os.cpu_count() or 1)


def load_into(served, layout, view):
    """Install a version as the builtin engine does."""
    StagedTensors(pair_up(served, layout, view)).put()


def shapes(size):
    """Names and shapes of a Qwen3 checkpoint with tied embeddings."""
    width, inner, head = size["width"], size["inner"], size["head_dim"]
    yield "model.embed_tokens.weight", (size["vocab"], width)
    yield "model.norm.weight", (width,)
    for index in range(size["layers"]):
        layer = f"model.layers.{index}."
        yield layer + "input_layernorm.weight", (width,)
        yield layer + "post_attention_layernorm.weight", (width,)
        yield layer + "self_attn.q_norm.weight", (head,)
        yield layer + "self_attn.k_norm.weight", (head,)
        yield layer + "self_attn.q_proj.weight", (size["heads"] * head, width)
        yield layer + "self_attn.k_proj.weight", (size["kv_heads"] * head, width)
        yield layer + "self_attn.v_proj.weight", (size["kv_heads"] * head, width)
        yield layer + "self_attn.o_proj.weight", (width, size["heads"] * head)
        yield layer + "mlp.gate_proj.weight", (inner, width)
        yield layer + "mlp.up_proj.weight", (inner, width)
        yield layer + "mlp.down_proj.weight", (width, inner)


def change(state, share):
    """So many elements, by one unit up or down."""
    for tensor in state.values():
        bits = tensor.view(torch.int16)
        where = torch.rand(tensor.shape, device=tensor.device) < share
        bits += torch.where(where, torch.randint_like(bits, 0, 2) * 2 - 1, 0).to(torch.int16)


def timed(work, *args, **options):
    """What it gave, and milliseconds until the device has done it too."""
    synchronize()
    start = time.perf_counter()
    result = work(*args, **options)
    synchronize()
    return result, (time.perf_counter() - start) * 1e3


def take_steps(state, layout, encoder, before, after):
    """Deltas of NUM_STEPS changes, each applied on the host to `before` and compared with the device's state."""
    base = Manifest(0, layout, table_of(before, threads=THREADS), "")
    rows = []
    for step in range(1, NUM_STEPS + 1):
        change(state, 0.01)
        encoded, made_ms = timed(encoder.encode, state)
        snapshot(state, layout, after)
        target = Manifest(step, layout, table_of(after, threads=THREADS), base.digest)
        (found, blob), sealed_ms = timed(delta.seal, encoded, base, target, threads=THREADS)
        _, applied_ms = timed(delta.apply, found, layout, blob, before, threads=THREADS)
        assert bad_chunks(before, target.chunks, THREADS) == [], f"step {step}: the delta led to another version"
        rows.append((made_ms, sealed_ms, applied_ms, len(blob) + len(encode(found))))
        base = target
    made, sealed, applied, sizes = zip(*rows, strict=True)
    return {
        "delta_first_ms": made[0],
        "delta_ms": statistics.median(made[1:]),
        "delta_worst_ms": max(made[1:]),
        "seal_ms": statistics.median(sealed),
        "apply_ms": statistics.median(applied),
        "delta_bytes": sizes[-1],
        "ratio": layout.num_bytes / sizes[-1],
    }


def main():
    need_a_gpu_or_small()
    size = SMALL_SHAPE if SMALL else QWEN3_1_7B
    torch.manual_seed(1)
    state = {name: torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) * 0.02 for name, shape in shapes(size)}
    layout = layout_of(state, architecture="Qwen3ForCausalLM")
    before, after = bytearray(layout.num_bytes), bytearray(layout.num_bytes)
    figures = {
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu",
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "threads": THREADS,
        "parameters": sum(one.num_elements for one in layout.tensors),
        "version_bytes": layout.num_bytes,
    }
    print("snapshots", file=sys.stderr)
    _, figures["snapshot_first_ms"] = timed(snapshot, state, layout, before)
    _, figures["snapshot_ms"] = timed(snapshot, state, layout, before)
    figures["pinned"] = pin(before) and pin(after)
    assert not pin(before), "what is pinned is not pinned again; and what comes next does not hear of it"
    _, figures["snapshot_pinned_ms"] = timed(snapshot, state, layout, before)

    print("deltas", file=sys.stderr)
    encoder, figures["hold_ms"] = timed(GpuDeltaEncoder, layout, state, threads=THREADS)
    figures.update(take_steps(state, layout, encoder, before, after))

    print("the same on the host", file=sys.stderr)
    change(state, 0.01)
    on_device = encoder.encode(state)
    snapshot(state, layout, after)
    on_host, figures["host_delta_ms"] = timed(delta.encode, before, after, layout, threads=THREADS)
    figures["same_bytes_as_on_the_host"] = on_device == on_host

    print("from float32 masters", file=sys.stderr)
    change(state, 0.01)
    masters = {name: tensor.float() for name, tensor in state.items()}
    _, figures["delta_from_masters_ms"] = timed(encoder.encode, masters)

    print("install", file=sys.stderr)
    served = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    load_into(served, layout, after)
    _, figures["load_pinned_ms"] = timed(load_into, served, layout, after)
    pageable = bytearray(after)
    _, figures["load_ms"] = timed(load_into, served, layout, pageable)
    print(
        json.dumps({name: round(one, 2) if isinstance(one, float) else one for name, one in figures.items()}, indent=2)
    )
    return 0 if figures["same_bytes_as_on_the_host"] else 1


if __name__ == "__main__":
    sys.exit(main())
