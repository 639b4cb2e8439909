"""Attention over a paged cache, given to transformers through its own interface: the model itself runs unchanged.

A step's tokens travel flat, as one row: first one token of each sample that decodes, then the chunks that are
prefilled. Their keys and values go into the cache at `slots`; then each attends over the slots of its own context. What
a step looks like is in `Step`, made once and shared by all layers.

On the CPU a row's result is the same to the last bit whatever else is in the step, and whether it decodes or is
prefilled again after a move. For that, every matrix product has a fixed shape but for its number of rows, of which
there are at least MIN_ROWS, and sums over a context are done in pieces, in order. A mixture's experts choose their rows
themselves, and are not that exact.

With a `pack` the function attends as a trainer needs it (packed.py); with neither as torch does.

Left out: the CUDA kernels (cuda.py), and who has which slots (kv_cache.py, batching.py).
"""

from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from polyrl.engines.builtin import packed

NAME = "polyrl_paged"

Tensor = torch.Tensor


PIECE = 128
"""Contexts are padded to whole pieces of this many tokens. MKL adds about 190 products in order, and more in blocks."""
MIN_ROWS = 4
"""With fewer, MKL multiplies a row by itself, and adds in another order."""


class Rows(NamedTuple):
    """Rows of a step that attend together: all that decode, each with its context; or a chunk, all with the same."""

    first: int
    num: int
    num_contexts: int
    padded: int
    """Of every context."""
    gather: Tensor
    """(contexts, kv heads, padded), flat: where keys and values lie in a layer's cache. What pads may be anywhere."""
    last: Tensor
    """(rows, 1): the position of the row's own token, the last that it sees."""
    masks: dict[int | None, Tensor]
    """By window; the first layer that needs one makes it."""

    @property
    def per_context(self) -> int:
        return self.num // self.num_contexts


class Step(NamedTuple):
    """What attention needs to know of a step."""

    slots: Tensor
    """Where each row's key and value go."""
    parts: tuple[Rows, ...]
    """In the order of the rows. Rows after the last part are there to make up the number."""


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
    pack: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls: query (1, heads, rows, dim), key and value (1, kv heads, rows, dim)."""
    if pack is not None:
        return packed.attend(query, key, value, pack, scaling, sliding_window, softcap), None
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
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    results = [_attend(rows, keys, values, part, scale, sliding_window, softcap) for part in step.parts]
    num_left = len(rows) - sum(part.num for part in step.parts)
    if num_left:
        results.append(rows.new_zeros((num_left, *rows.shape[1:])))
    return torch.cat(results).unsqueeze(0), None


def _attend(
    rows: Tensor, keys: Tensor, values: Tensor, part: Rows, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """What looks at the same keys, rows of a chunk and heads of a group, are rows of one query."""
    num_kv, dim = keys.shape[1:]
    num, group = part.num_contexts, rows.shape[1] // num_kv
    query = rows[part.first : part.first + part.num].view(num, part.per_context, num_kv, group, dim).transpose(1, 2)
    query = query.reshape(num * num_kv, part.per_context * group, dim) * scale
    num_rows = query.shape[1]
    query = pad(query, (0, 0, 0, max(0, MIN_ROWS - num_rows)))
    its_keys = keys.view(-1, dim).index_select(0, part.gather).view(num * num_kv, part.padded, dim)
    its_values = values.view(-1, dim).index_select(0, part.gather).view(num * num_kv, part.padded, dim)
    scores = torch.bmm(query, its_keys.transpose(1, 2))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores.view(num, num_kv, -1, part.padded).add_(_mask(part, window, group, scores.dtype))
    scores -= scores.amax(-1, keepdim=True)
    out = _weigh(scores.exp_(), its_values)[:, :num_rows]
    return out.view(num, num_kv, part.per_context, group, dim).transpose(1, 2).reshape(part.num, num_kv * group, dim)


def _mask(part: Rows, window: int | None, group: int, dtype: torch.dtype) -> Tensor:
    """(contexts, 1, rows of a query or 1, padded): minus infinity where a row does not look."""
    mask = part.masks.get(window)
    if mask is None:
        positions = torch.arange(part.padded)
        hidden = positions > part.last
        if window is not None:
            hidden |= positions <= part.last - window
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        mask = mask.view(part.num_contexts, 1, part.per_context, part.padded)
        if part.per_context > 1:
            mask = mask.repeat_interleave(group, 2)
            mask = pad(mask, (0, 0, 0, max(0, MIN_ROWS - mask.shape[2])))
        part.masks[window] = mask
    return mask


def _weigh(weights: Tensor, values: Tensor) -> Tensor:
    """The mean of the values by weight: piece by piece from the first, since what follows a context weighs nothing."""
    out = torch.bmm(weights[:, :, :PIECE], values[:, :PIECE])
    total = weights[:, :, :PIECE].sum(-1, keepdim=True)
    for start in range(PIECE, weights.shape[2], PIECE):
        piece = weights[:, :, start : start + PIECE]
        out.baddbmm_(piece, values[:, start : start + PIECE])
        total += piece.sum(-1, keepdim=True)
    return out.div_(total)


def register() -> None:
    """Make the name known to transformers. May be called any number of times."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
