"""Attention over a paged cache, given to transformers through its own interface: the model itself runs unchanged.

A step's tokens travel flat, as one row: first one token of each sample that decodes, then the chunks that are
prefilled. Their keys and values go into the cache at `cells`; then each attends over the blocks of its own context.
`AttentionStep` describes a step; it is made once and shared by all layers.

On the CPU a row's result is bitwise the same regardless of the other rows in the step, and of whether the row decodes
or is prefilled again after a move. For that, only the number of rows of a matrix product varies, and is at least
`min_rows`; sums over a context are done in pieces, in order. The experts of a mixture choose their rows themselves, and
are not that exact.

packed.py has the attention over a trainer's packs. All other calls use torch's own attention.

Left out: the CUDA kernels (cuda/kernels.py), and the assignment of cells to samples (kv_cache.py, batching.py).
"""

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from polyrl.engines.builtin import packed

NAME = "polyrl_paged"

Tensor = torch.Tensor


GRAIN = 32
"""Contexts are padded to a multiple of this many tokens."""
PIECE = 128
"""Sums over a context are added piece by piece. MKL adds about 190 products in order, and more in blocks."""
MIN_ROWS = 4
"""With fewer, a matrix library multiplies a row by itself, and adds in another order."""
_MIN_ROWS_ON_INTEL, _FEW_INPUTS = 16, 64


@cache
def _is_intel() -> bool:
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False


def min_rows(num_in: int) -> int:
    """Return the rows that torch's product needs, so that each is as with any more; `num_in` numbers are summed.

    MKL has kernels of its own for few rows, on Intel's processors up to 15 where sums are long
    (tests/builtin/test_exactness.py).
    """
    return _MIN_ROWS_ON_INTEL if num_in > _FEW_INPUTS and _is_intel() else MIN_ROWS


class Rows(NamedTuple):
    """Rows of a step that attend together: some that decode, each with its context; or a chunk, all with the same."""

    first: int
    num: int
    num_contexts: int
    padded: int
    """Tokens of every context, a multiple of GRAIN."""
    gather: Tensor
    """(keys and values, kv heads, contexts, blocks), flat: the blocks of a layer's cache. Padding may be any block."""
    last: Tensor
    """(rows, 1): the position of the row's own token, the last that it sees."""
    masks: dict[int | None, Tensor]
    """By window; the first layer that needs one makes it."""

    @property
    def per_context(self) -> int:
        return self.num // self.num_contexts


class AttentionStep(NamedTuple):
    """The rows of a step, as attention needs them."""

    cells: Tensor
    """Where each row's key and value go."""
    parts: tuple[Rows, ...]
    """In the order of the rows. Rows after the last part are there to make up the number."""


class PagedKeysAndValues:
    """The cache's memory: in every layer, for each head, blocks of cells for a token each."""

    def __init__(
        self, num_layers: int, num_blocks: int, block_tokens: int, num_heads: int, head_dim: int, like: Tensor
    ) -> None:
        shape = (2, num_heads, num_blocks * block_tokens, head_dim)
        self._block = block_tokens * head_dim
        self._layers = [_untouched_zeros(shape, like.dtype) for _ in range(num_layers)]
        """Keys, then values."""
        self.has_numbers = True
        """All keys are finite, also those that no row attends to."""
        self._gathered = torch.empty((0, self._block), dtype=like.dtype)

    @property
    def num_bytes(self) -> int:
        return sum(layer.nbytes for layer in self._layers)

    def write(self, layer: int, cells: Tensor, both: Tensor) -> None:
        """Write keys, then values: (rows, 2 x kv heads, dim). NaN and infinite values are written as 0: even at weight
        zero they would spoil the next sample that gets the block. A NaN key spoils the samples that read it, as it
        should.
        """
        both[:, both.shape[1] // 2 :].nan_to_num_(0.0, 0.0, 0.0)
        self._layers[layer].flatten(0, 1).index_copy_(1, cells, both.transpose(0, 1))

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy blocks from `sources` to `targets`."""
        for layer in self._layers:
            blocks = layer.view(2 * layer.shape[1], -1, self._block)
            blocks[:, targets] = blocks[:, sources]

    def gather(self, layer: int, part: Rows) -> tuple[Tensor, Tensor]:
        """Keys and values of a part's contexts, (kv heads x contexts, padded, dim) each, until the next are gathered.

        They are written into the same memory again and again, since new memory has to be cleared first.
        """
        num = len(part.gather)
        if len(self._gathered) < num:
            self._gathered = self._gathered.new_empty((num + num // 4, self._block))
        both, found = self._layers[layer], self._gathered[:num]
        torch.index_select(both.view(-1, self._block), 0, part.gather, out=found)
        found = found.view(2, both.shape[1] * part.num_contexts, -1, both.shape[3])
        return found[0, :, : part.padded], found[1, :, : part.padded]


class PagedStep(NamedTuple):
    """A step on the CPU, and the cache that it is over."""

    step: AttentionStep
    cache: PagedKeysAndValues


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory that the system clears page by page, as it is used: a cache is made at every waking, for the most that a
    round may need, and `torch.zeros` would write all of it.
    """
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


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
    pack: Any = None,
    paged: PagedStep | None = None,
    step: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend, as the function that transformers calls: query (1, heads, rows, dim), key and value (1, kv heads, rows,
    dim).

    The caller of the model says how, by one of three keywords: `pack` as a trainer does, `paged` over the blocks of a
    cache on the CPU, `step` on a GPU; without any, as torch does.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if pack is not None:
        return packed.attend(query, key, value, pack, scaling, sliding_window, softcap), None
    if paged is not None:
        return _attend_blocks(module, query, key, value, paged, scale, sliding_window, softcap), None
    if step is not None:
        return _attend_on_gpu(module, query, key, value, step, scale, sliding_window, softcap), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


def _attend_blocks(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    paged: PagedStep,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    both = torch.cat([key[0], value[0]]).transpose(0, 1)
    no_number = (both - both).sum((1, 2)).view(-1, 1, 1)  # zero, where all are numbers
    step, cache = paged
    cache.has_numbers &= bool(no_number.isfinite().all())
    cache.write(module.layer_idx, step.cells, both)
    out = attend_parts(query[0].transpose(0, 1) * scale, module.layer_idx, step, cache, window, softcap)
    return (out + no_number).unsqueeze(0)


def _attend_on_gpu(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step: Any,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    from polyrl.engines.builtin.cuda import kernels
    from polyrl.engines.builtin.cuda.verify_kernel import VerifyStep, paged_verify

    if softcap is not None:
        raise RuntimeError("soft-capped attention runs on the CPU only")
    rows, keys, values = (one[0].transpose(0, 1) for one in (query, key, value))
    cache = (module.paged_keys, module.paged_values)
    if isinstance(step, VerifyStep):
        wide = kernels.EVERYTHING if window is None else window
        out = paged_verify(rows, keys, values, *cache, *step[:3], scale, wide, step.num_tokens, step.splits)
    else:
        out = kernels.attend(rows, keys, values, *cache, step, scale, window)
    return out.unsqueeze(0)


def attend_parts(
    queries: Tensor,
    layer: int,
    step: AttentionStep,
    paged: PagedKeysAndValues,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend with scaled queries, part by part; (rows, heads, dim) each."""
    found = queries.new_empty(queries.shape)
    end = 0
    for part in step.parts:
        end = part.first + part.num
        keys, values = paged.gather(layer, part)
        hide = _hide if paged.has_numbers else _hide_whatever
        _attend(queries[part.first : end], keys, values, part, window, softcap, hide, found[part.first : end])
    found[end:] = 0.0
    return found


def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    part: Rows,
    window: int | None,
    softcap: float | None,
    hide: Callable[[Tensor, Tensor], object],
    out: Tensor,
) -> None:
    """Attend. Rows of a chunk and heads of a group look at the same keys, and become rows of one query."""
    num_heads, dim = queries.shape[1:]
    num_kv = len(keys) // part.num_contexts
    group = num_heads // num_kv
    num_rows = part.per_context * group
    apart = (part.num_contexts, part.per_context, num_kv, group, dim)
    together = (num_kv, part.num_contexts, part.per_context, group, dim)
    query = queries.new_zeros((len(keys), max(min_rows(dim), num_rows), dim))
    query[:, :num_rows].view(together).copy_(queries.view(apart).permute(2, 0, 1, 3, 4))
    scores = torch.bmm(query, keys.transpose(1, 2))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    hide(scores.view(num_kv, part.num_contexts, -1, part.padded), _mask(part, window, group, query))
    weighed = _weigh(torch.softmax(scores, -1), values)[:, :num_rows]
    out.view(apart).copy_(weighed.view(together).permute(1, 2, 0, 3, 4))


_hide = Tensor.add_


def _hide_whatever(scores: Tensor, mask: Tensor) -> None:
    """Hide scores that are NaN too; several times slower than `_hide`."""
    scores.masked_fill_(mask < 0, float("-inf"))


def _mask(part: Rows, window: int | None, group: int, query: Tensor) -> Tensor:
    """Return the mask, (contexts, rows of a query or 1, padded): minus infinity where a row does not look."""
    mask = part.masks.get(window)
    if mask is None:
        positions = torch.arange(part.padded)
        hidden = positions > part.last
        if window is not None:
            hidden |= positions <= part.last - window
        mask = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill_(hidden, float("-inf"))
        mask = mask.view(part.num_contexts, part.per_context, part.padded)
        if part.per_context > 1:
            mask = mask.repeat_interleave(group, 1)
            mask = pad(mask, (0, 0, 0, query.shape[1] - mask.shape[1]))
        part.masks[window] = mask
    return mask


def go_on(part: Rows) -> None:
    """Go on to the next step of a burst: every context is a token longer."""
    part.last.add_(1)
    for window, mask in part.masks.items():
        of_rows = mask.view(part.num, part.padded)
        of_rows.scatter_(1, part.last, 0.0)
        if window is not None:
            gone = part.last - window
            of_rows.scatter_(1, gone.clamp(min=0), torch.where(gone < 0, 0.0, float("-inf")).to(mask.dtype))


def _weigh(weights: Tensor, values: Tensor) -> Tensor:
    """Return the sum of the values by weight: piece by piece from the first, since what follows a context weighs
    nothing."""
    if weights.shape[2] <= PIECE:
        return torch.bmm(weights, values)
    out = torch.bmm(weights[:, :, :PIECE], values[:, :PIECE])
    for start in range(PIECE, weights.shape[2], PIECE):
        out.baddbmm_(weights[:, :, start : start + PIECE], values[:, start : start + PIECE])
    return out


def register() -> None:
    """Make the name known to transformers. May be called any number of times."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
