"""How small deltas of real optimizer steps are, and how fast a core makes and applies them.

A decoder of 31 million parameters (random, scale 0.02) is trained by AdamW in float32, served in bfloat16. Its loss is
a policy gradient, back-propagated for real: log-probabilities of sampled tokens times advantages that are normalised in
a group and carry no signal, which is what most of an RL gradient is. After 40 steps Adam's moments are steady; the next
20 are measured. Sizes include the delta's manifest. Speeds are model bytes over seconds of one thread's CPU
time, so that neighbours on the machine do not count; the best step is given too.

Beside it, in the same run, the published sparse codec: 16-bit gaps, new values, zstd-1.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import zstandard
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import parser_of, tell
from polyrl.weights import delta
from polyrl.weights.chunks import bad_chunks, table_of
from polyrl.weights.manifest import Layout, Manifest, encode
from polyrl.weights.tensors import layout_of, snapshot

GOALS = {
    "delta_ratio": 130.0,
    "delta_ratio_3e6": 50.0,
    "times_smaller_than_published": 2.0,
    "encode_gb_s": 1.5,
    "apply_gb_s": 5.0,
}


class Size(NamedTuple):
    vocab: int = 8192
    width: int = 512
    inner: int = 1536
    num_heads: int = 8
    num_layers: int = 8
    group: int = 4
    num_tokens: int = 32
    warmup_steps: int = 40
    measured_steps: int = 20


QUICK = Size(vocab=1024, width=128, inner=384, num_heads=4, num_layers=2, warmup_steps=10, measured_steps=3)


def main(argv: Sequence[str]) -> int:
    args = parser_of("delta", argv, __doc__).parse_args(argv)
    result = measure(quick=args.quick)
    return tell(result, [f"{key:<34}{value}" for key, value in result.items()], as_json=args.json)


def measure(*, quick: bool = False) -> dict[str, Any]:
    """Ratios at two learning rates, and speeds at the smaller one."""
    size = QUICK if quick else Size()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        small, large = _run(size, 1e-6), _run(size, 3e-6)
    finally:
        torch.set_num_threads(threads)
    return {
        "delta_ratio": round(small.ratio, 1),
        "delta_ratio_3e6": round(large.ratio, 1),
        "published_ratio": round(small.published_ratio, 1),
        "published_ratio_3e6": round(large.published_ratio, 1),
        "times_smaller_than_published": round(small.ratio / small.published_ratio, 2),
        "times_smaller_than_published_3e6": round(large.ratio / large.published_ratio, 2),
        "encode_gb_s": round(small.encode_gb_s, 2),
        "encode_best_gb_s": round(small.encode_best_gb_s, 2),
        "encode_3e6_gb_s": round(large.encode_gb_s, 2),
        "apply_gb_s": round(small.apply_gb_s, 2),
        "apply_best_gb_s": round(small.apply_best_gb_s, 2),
        "apply_3e6_gb_s": round(large.apply_gb_s, 2),
        "changed_share": round(small.changed_share, 4),
        "changed_share_3e6": round(large.changed_share, 4),
        "parameters": small.num_parameters,
        "steps": size.measured_steps,
        "gradients": "policy gradient of a decoder, back-propagated; AdamW, float32 masters, bfloat16 serving weights",
        "goals": GOALS,
    }


class _Outcome(NamedTuple):
    ratio: float
    published_ratio: float
    encode_gb_s: float
    encode_best_gb_s: float
    apply_gb_s: float
    apply_best_gb_s: float
    changed_share: float
    num_parameters: int


def _run(size: Size, lr: float) -> _Outcome:
    torch.manual_seed(1)
    model = _Decoder(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.999), weight_decay=0.01)
    layout = layout_of(model.state_dict(), "bfloat16", architecture="bench")
    for _ in range(size.warmup_steps):
        _step(model, optimizer, size)
    before, after, held = (bytearray(layout.num_bytes) for _ in range(3))
    snapshot(model.state_dict(), layout, before)
    held[:] = before
    base = Manifest(0, layout, table_of(before), "")
    encode_s: list[float] = []
    apply_s: list[float] = []
    num_delta_bytes = num_published_bytes = num_changed = 0
    for number in range(1, size.measured_steps + 1):
        _step(model, optimizer, size)
        snapshot(model.state_dict(), layout, after)
        target = Manifest(number, layout, table_of(after), base.digest)
        seconds, encoded = _timed(partial(delta.encode, before, after, layout))
        encode_s.append(seconds)
        found, blob = delta.seal(encoded, base, target)
        seconds, _ = _timed(partial(delta.apply, found, layout, blob, held))
        apply_s.append(seconds)
        if bad_chunks(held, target.chunks):
            raise AssertionError(f"step {number}: the delta led to another version")
        num_delta_bytes += len(blob) + len(encode(found))
        num_bytes, changed = _published(before, after, layout)
        num_published_bytes += num_bytes
        num_changed += changed
        before, after, base = after, before, target
    full = sum(one.num_bytes for one in layout.tensors)
    num_elements = sum(one.num_elements for one in layout.tensors)
    return _Outcome(
        ratio=full * size.measured_steps / num_delta_bytes,
        published_ratio=full * size.measured_steps / num_published_bytes,
        encode_gb_s=full / median(encode_s) / 1e9,
        encode_best_gb_s=full / min(encode_s) / 1e9,
        apply_gb_s=full / median(apply_s) / 1e9,
        apply_best_gb_s=full / min(apply_s) / 1e9,
        changed_share=num_changed / size.measured_steps / num_elements,
        num_parameters=num_elements,
    )


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.thread_time()
    result = work()
    return time.thread_time() - start, result


def _published(old: bytearray, new: bytearray, layout: Layout) -> tuple[int, int]:
    """Bytes of the published codec, without any frame around them, and how many elements changed."""
    num_bytes = num_changed = 0
    for one in layout.tensors:
        before = np.frombuffer(old, np.uint16, one.num_elements, one.start)
        after = np.frombuffer(new, np.uint16, one.num_elements, one.start)
        where = np.flatnonzero(before != after)
        if not len(where):
            continue
        gaps = np.diff(where, prepend=-1) - 1
        jumps = np.insert(gaps % 65535, np.repeat(np.arange(len(gaps)), gaps // 65535), 65535).astype(np.uint16)
        columns = (jumps.tobytes(), after[where].tobytes())
        apart = sum(len(zstandard.compress(column, 1)) for column in columns)
        num_bytes += min(apart, len(zstandard.compress(b"".join(columns), 1)))
        num_changed += len(where)
    return num_bytes, num_changed


def _step(model: "_Decoder", optimizer: torch.optim.Optimizer, size: Size) -> None:
    """One update from one group: tokens drawn from the model, and rewards that are noise."""
    tokens = torch.randint(size.vocab, (size.group, size.num_tokens))
    rewards = torch.randn(size.group)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    logits = model(tokens)
    sampled = torch.distributions.Categorical(logits=logits.detach()).sample()
    logprobs = -functional.cross_entropy(logits.flatten(0, 1), sampled.flatten(), reduction="none")
    loss = -(advantages[:, None] * logprobs.view(tokens.shape)).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


class _Layer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.num_heads = size.num_heads
        self.input_norm, self.mlp_norm = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.qkv_proj = nn.Linear(size.width, 3 * size.width, bias=False)
        self.o_proj = nn.Linear(size.width, size.width, bias=False)
        self.gate_proj = nn.Linear(size.width, size.inner, bias=False)
        self.up_proj = nn.Linear(size.width, size.inner, bias=False)
        self.down_proj = nn.Linear(size.inner, size.width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.qkv_proj(self.input_norm(hidden)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = (one.transpose(1, 2) for one in heads.unbind(2))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.o_proj(mixed.transpose(1, 2).flatten(2))
        inside = self.mlp_norm(hidden)
        return hidden + self.down_proj(functional.silu(self.gate_proj(inside)) * self.up_proj(inside))


class _Decoder(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(size.vocab, size.width)
        self.layers = nn.ModuleList(_Layer(size) for _ in range(size.num_layers))
        self.norm = nn.RMSNorm(size.width)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed_tokens(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return functional.linear(self.norm(hidden), self.embed_tokens.weight)
