"""Attention over a paged cache, given to transformers through its own interface: the model itself runs unchanged.

A step's tokens travel flat, as one row: first one token of each sample that decodes, then the chunks that are
prefilled. Their keys and values go into the cache at `slots`; then each attends over the slots of its own context. What
a step looks like is in `Step`, made once and shared by all layers.

Without a `step` the function attends as torch does, so that a trainer may run the same modules.

Left out: the CUDA kernels (cuda.py), and who has which slots (kv_cache.py, batching.py).
"""

from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "polyrl_paged"

Tensor = torch.Tensor


class ChunkContext(NamedTuple):
    """A prefilled chunk: its rows, and the slots of all tokens up to its last."""

    first_row: int
    num_rows: int
    slots: Tensor


class Step(NamedTuple):
    """What attention needs to know of a step."""

    slots: Tensor
    """Where each row's key and value go."""
    num_decoding: int
    context: Tensor
    """(num_decoding, longest): the slots of each decoding sample's tokens, the newest included; padded with any."""
    lengths: Tensor
    """(num_decoding,): how many of them count."""
    chunks: tuple[ChunkContext, ...]


class PagedKeysAndValues:
    """The cache's memory: a slot for each token, in every layer."""

    def __init__(self, num_layers: int, num_slots: int, num_heads: int, head_dim: int, like: Tensor) -> None:
        shape = (num_slots, num_heads, head_dim)
        self.keys = [torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(num_layers)]
        self.values = [torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(num_layers)]

    @property
    def num_bytes(self) -> int:
        return sum(one.numel() * one.element_size() for one in (*self.keys, *self.values))


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    step: Any = None,
    paged: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls: query (1, heads, rows, dim), key and value (1, kv heads, rows, dim)."""
    if step is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if not isinstance(step, Step):
        from polyrl.engines.builtin import cuda

        if softcap is not None:
            raise RuntimeError("soft-capped attention runs on the CPU only")
        its = (one[0].transpose(0, 1) for one in (query, key, value))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        out = cuda.attend(*its, module.paged_keys, module.paged_values, step, scale, sliding_window)  # type: ignore[arg-type]
        return out.unsqueeze(0), None
    layer: int = module.layer_idx  # type: ignore[assignment]
    keys, values = paged.keys[layer], paged.values[layer]
    keys.index_copy_(0, step.slots, key[0].transpose(0, 1))
    values.index_copy_(0, step.slots, value[0].transpose(0, 1))
    rows = query[0].transpose(0, 1)
    parts: list[Tensor] = []
    if step.num_decoding:
        parts.append(_decode(rows[: step.num_decoding], keys, values, step, scaling, sliding_window, softcap))
    for chunk in step.chunks:
        last = chunk.first_row + chunk.num_rows
        parts.append(
            _prefill(rows[chunk.first_row : last], keys, values, chunk.slots, scaling, sliding_window, softcap)
        )
    return torch.cat(parts).unsqueeze(0), None


def _decode(
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    step: Step,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """One token of each sample, over contexts padded to the longest. Heads that share a key are rows of one query."""
    num, num_heads, dim = rows.shape
    longest = step.context.shape[1]
    num_kv = keys.shape[1]
    flat = step.context.reshape(-1)
    its_keys = keys.index_select(0, flat).view(num, longest, num_kv, dim).transpose(1, 2)
    its_values = values.index_select(0, flat).view(num, longest, num_kv, dim).transpose(1, 2)
    query = rows.view(num, num_kv, num_heads // num_kv, dim)
    positions = torch.arange(longest, device=rows.device)
    mask = positions < step.lengths.unsqueeze(1)
    if window is not None:
        mask &= positions >= step.lengths.unsqueeze(1) - window
    out = _weigh(query, its_keys, its_values, mask.view(num, 1, 1, longest), scaling, softcap)
    return out.reshape(num, num_heads, dim)


def _prefill(
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    num, num_heads, _ = rows.shape
    total = slots.shape[0]
    groups = num_heads // keys.shape[1]
    its_keys = keys.index_select(0, slots).transpose(0, 1).repeat_interleave(groups, 0).unsqueeze(0)
    its_values = values.index_select(0, slots).transpose(0, 1).repeat_interleave(groups, 0).unsqueeze(0)
    query = rows.transpose(0, 1).unsqueeze(0)
    behind = torch.arange(total - num, total, device=rows.device).unsqueeze(1) - torch.arange(total, device=rows.device)
    mask = behind >= 0
    if window is not None:
        mask &= behind < window
    return _weigh(query, its_keys, its_values, mask, scaling, softcap)[0].transpose(0, 1)


def _weigh(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scaling: float | None, softcap: float | None
) -> Tensor:
    if softcap is None:
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = torch.tanh(query @ keys.transpose(-1, -2) * (scale / softcap)) * softcap
    return torch.softmax(scores.masked_fill(~mask, float("-inf")).float(), -1).to(query.dtype) @ values


def register() -> None:
    """Make the name known to transformers. May be called any number of times."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
