"""Attention of several tokens a sample over the paged cache, for drafts that are verified (verifying.py).

As in kernels.py, a program takes one sample, one kv head and a share of its context. The rows of its matrix product are
all query heads of that kv head, for every token of the sample in turn: the context is read once for all of them.
Keys and values are written first; then each row looks at what is in the cache up to its own position.
"""

from typing import NamedTuple

import torch

# pyright: reportMissingImports=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false
import triton
import triton.language as tl

from polyrl.engines.builtin.cuda.kernels import _combine_kernel, _rows, _write_kernel

Tensor = torch.Tensor


class VerifyStep(NamedTuple):
    """A step with several tokens of each sample. All tensors have fixed addresses, for a CUDA graph."""

    tables: Tensor
    """(samples, blocks)."""
    positions: Tensor
    """(samples x tokens of each)."""
    cells: Tensor
    """Where each row's key and value go."""
    num_tokens: int
    """Of each sample."""
    splits: int


@triton.jit
def _verify_kernel(
    query, keys, values, tables, positions, out, sums, table_stride, scale, window,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One sample, one kv head, one share of the context: the weighted values, their maximum and their sum.

    A row may see nothing of a share: its sum is 0 then, and its share weighs nothing.
    """
    sample, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows, dims, within = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, BLOCK)
    is_row = rows < TOKENS * GROUP
    token = sample * TOKENS + rows // GROUP
    newest = tl.load(positions + token, mask=is_row, other=0).to(tl.int32)
    first = tl.maximum(newest + 1 - window, 0)
    num_blocks = tl.max(newest, 0) // BLOCK + 1
    first_block = tl.min(tl.where(is_row, first, 2147483647), 0) // BLOCK
    share = tl.cdiv(num_blocks - first_block, SPLITS)
    begin = first_block + split * share
    end = tl.minimum(begin + share, num_blocks)
    heads = token * NUM_KV * GROUP + head * GROUP + rows % GROUP
    asked = tl.load(query + heads[:, None] * DIM + dims[None, :], mask=is_row[:, None], other=0.0)
    best = tl.full((ROWS,), -1.0e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    gathered = tl.zeros((ROWS, DIM), tl.float32)
    for number in range(begin, end):
        block = tl.load(tables + sample * table_stride + number).to(tl.int64)
        at = (block * NUM_KV + head) * BLOCK * DIM
        its_keys = tl.load(keys + at + within[:, None] * DIM + dims[None, :])
        scores = tl.dot(asked, tl.trans(its_keys), input_precision=PRECISION) * scale
        position = (number * BLOCK + within)[None, :]
        is_seen = (position <= newest[:, None]) & (position >= first[:, None])
        new_best = tl.maximum(best, tl.max(tl.where(is_seen, scores, -1.0e30), 1))
        weights = tl.where(is_seen, tl.exp(scores - new_best[:, None]), 0.0)
        shrink = tl.exp(best - new_best)
        its_values = tl.load(values + at + within[:, None] * DIM + dims[None, :])
        gathered = gathered * shrink[:, None] + tl.dot(
            weights.to(its_values.dtype), its_values, input_precision=PRECISION
        )
        total = total * shrink + tl.sum(weights, 1)
        best = new_best
    where = heads * SPLITS + split
    if SPLITS == 1:
        gathered = gathered / total[:, None]
    tl.store(out + where[:, None] * DIM + dims[None, :], gathered.to(out.dtype.element_ty), mask=is_row[:, None])
    if SPLITS > 1:
        tl.store(sums + where * 2, best, mask=is_row)
        tl.store(sums + where * 2 + 1, total, mask=is_row)


@torch.library.custom_op("polyrl::paged_verify", mutates_args=("keys", "values"))
def paged_verify(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    positions: Tensor,
    cells: Tensor,
    scale: float,
    window: int,
    num_tokens: int,
    splits: int,
) -> Tensor:
    """query (rows, heads, dim), key and value (rows, kv heads, dim): write, and attend. `num_tokens` rows a sample."""
    num, num_heads, dim = query.shape
    num_kv, block = keys.shape[1], keys.shape[2]
    query, key, value = query.contiguous(), _rows(key), _rows(value)
    sizes = {"NUM_KV": num_kv, "DIM": dim, "BLOCK": block}
    _write_kernel[(num,)](
        key, value, keys, values, cells, key.stride(0), value.stride(0),
        HEADS=triton.next_power_of_2(num_kv), **sizes,
    )  # fmt: skip
    out = torch.empty_like(query)
    parts, sums = out, positions
    if splits > 1:
        parts = torch.empty((num, num_heads, splits, dim), dtype=torch.float32, device=query.device)
        sums = torch.empty((num, num_heads, splits, 2), dtype=torch.float32, device=query.device)
    group = num_heads // num_kv
    rows = max(16, triton.next_power_of_2(num_tokens * group))
    _verify_kernel[(num // num_tokens, num_kv, splits)](
        query, keys, values, tables, positions, parts, sums, tables.stride(0), scale, window,
        GROUP=group, TOKENS=num_tokens, ROWS=rows, SPLITS=splits,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32", **sizes, **_tuning(rows),
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[(num * num_heads,)](parts, sums, out, DIM=dim, SPLITS=splits, num_warps=1)
    return out


@paged_verify.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    positions: Tensor,
    cells: Tensor,
    scale: float,
    window: int,
    num_tokens: int,
    splits: int,
) -> Tensor:
    return torch.empty_like(query)


def _tuning(rows: int) -> dict[str, int]:
    """Return the kernel's tuning: one warp holds 16 rows, as in decoding."""
    return {"num_warps": min(4, rows // 16), "num_stages": 3 if rows <= 32 else 2}
