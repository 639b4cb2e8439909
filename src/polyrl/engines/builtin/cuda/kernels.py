"""Kernels for one NVIDIA GPU: attention of one token a sample over the paged cache, and drawing tokens.

The cache of a layer is (blocks, kv heads, tokens of a block, dim): what one program reads of a block lies in a row. A
program takes one sample, one kv head and a share of its context (split-KV), with all query heads that share the kv head
as rows of one small matrix product; a second kernel puts the shares together.

Drawing reads the logits twice: once for the maximum and the sum of every stretch of the vocabulary, then the one
stretch that the random number falls into.
"""

from typing import Any, NamedTuple

import torch

# Triton comes with a torch for GPUs, and its kernels are not Python that a type checker knows: launch options are no
# parameters of them, and numbers become `constexpr`.
# pyright: reportMissingImports=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false
import triton
import triton.language as tl

from polyrl.engines.builtin import sampling
from polyrl.engines.builtin.packed import Borders, flash

Tensor = torch.Tensor

EVERYTHING = 1 << 30
"""A window that leaves nothing out."""
DECODE_TUNING = {"num_warps": 1, "num_stages": 3}
"""Measured on an H200; docs/results/builtin-engine.md."""
STRETCH = 4096
"""Tokens of the vocabulary that one program sums."""


@triton.jit
def finite(x):
    """Replace NaN and infinity by 0: the next sample with the block reads the rest of it, at weight zero."""
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0)


@triton.jit
def _at(block, within, heads, dims, NUM_KV: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Return where the heads of one token lie in a layer's cache: (heads, dim)."""
    return ((block * NUM_KV + heads[:, None]) * BLOCK + within) * DIM + dims[None, :]


@triton.jit
def _write_kernel(
    key, value, keys, values, cells, key_stride, value_stride,
    NUM_KV: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Put a row's key and value at its cell."""
    row = tl.program_id(0)
    cell = tl.load(cells + row)
    heads, dims = tl.arange(0, HEADS), tl.arange(0, DIM)
    there = _at(cell // BLOCK, cell % BLOCK, heads, dims, NUM_KV, DIM, BLOCK)
    here = heads[:, None] * DIM + dims[None, :]
    is_head = (heads < NUM_KV)[:, None]
    tl.store(keys + there, tl.load(key + row * key_stride + here, mask=is_head), mask=is_head)
    tl.store(values + there, finite(tl.load(value + row * value_stride + here, mask=is_head)), mask=is_head)


@triton.jit
def _gather_kernel(
    keys, values, blocks, within, its_keys, its_values,
    NUM_KV: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Take a token's key and value out of the cache."""
    token = tl.program_id(0).to(tl.int64)
    heads, dims = tl.arange(0, HEADS), tl.arange(0, DIM)
    there = _at(tl.load(blocks + token), tl.load(within + token), heads, dims, NUM_KV, DIM, BLOCK)
    here = (token * NUM_KV + heads[:, None]) * DIM + dims[None, :]
    is_head = (heads < NUM_KV)[:, None]
    tl.store(its_keys + here, tl.load(keys + there, mask=is_head), mask=is_head)
    tl.store(its_values + here, tl.load(values + there, mask=is_head), mask=is_head)


@triton.jit
def _decode_kernel(
    query, key, value, keys, values, tables, positions, out, sums,
    key_stride, value_stride, table_stride, scale, window,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One sample, one kv head, one share of the context: the weighted values, their maximum and their sum.

    The newest token is not read from the cache: the program with the last share takes it from the input, and writes it
    to the cache. With a single share the result is final: it is divided by the sum and stored in the output's type.
    """
    sample, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    newest = tl.load(positions + sample).to(tl.int32)
    first = tl.maximum(newest + 1 - window, 0)
    num_blocks = tl.cdiv(newest, BLOCK)
    first_block = first // BLOCK
    share = tl.cdiv(num_blocks - first_block, SPLITS)
    begin = first_block + split * share
    end = tl.minimum(begin + share, num_blocks)
    rows, dims, within = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, BLOCK)
    heads = head * GROUP + rows
    asked = tl.load(
        query + (sample * NUM_KV * GROUP + heads)[:, None] * DIM + dims[None, :],
        mask=(rows < GROUP)[:, None],
        other=0.0,
    )
    best = tl.full((ROWS,), -1.0e30, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    gathered = tl.zeros((ROWS, DIM), tl.float32)
    for number in range(begin, end):
        block = tl.load(tables + sample * table_stride + number).to(tl.int64)
        at = (block * NUM_KV + head) * BLOCK * DIM
        its_keys = tl.load(keys + at + within[:, None] * DIM + dims[None, :])
        scores = tl.dot(asked, tl.trans(its_keys), input_precision=PRECISION) * scale
        position = number * BLOCK + within
        scores = tl.where(((position < newest) & (position >= first))[None, :], scores, -1.0e30)
        new_best = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp(scores - new_best[:, None])
        shrink = tl.exp(best - new_best)
        its_values = tl.load(values + at + within[:, None] * DIM + dims[None, :])
        gathered = gathered * shrink[:, None] + tl.dot(
            weights.to(its_values.dtype), its_values, input_precision=PRECISION
        )
        total = total * shrink + tl.sum(weights, 1)
        best = new_best
    if split == SPLITS - 1:
        its_key = tl.load(key + sample * key_stride + head * DIM + dims)
        its_value = tl.load(value + sample * value_stride + head * DIM + dims)
        block = tl.load(tables + sample * table_stride + newest // BLOCK).to(tl.int64)
        at = ((block * NUM_KV + head) * BLOCK + newest % BLOCK) * DIM
        tl.store(keys + at + dims, its_key)
        tl.store(values + at + dims, finite(its_value))
        score = tl.sum(asked.to(tl.float32) * its_key.to(tl.float32)[None, :], 1) * scale
        new_best = tl.maximum(best, score)
        weight, shrink = tl.exp(score - new_best), tl.exp(best - new_best)
        gathered = gathered * shrink[:, None] + weight[:, None] * its_value.to(tl.float32)[None, :]
        total = total * shrink + weight
        best = new_best
    where = (sample * NUM_KV * GROUP + heads) * SPLITS + split
    if SPLITS == 1:
        gathered = gathered / total[:, None]
    tl.store(
        out + where[:, None] * DIM + dims[None, :], gathered.to(out.dtype.element_ty), mask=(rows < GROUP)[:, None]
    )
    if SPLITS > 1:
        tl.store(sums + where * 2, best, mask=rows < GROUP)
        tl.store(sums + where * 2 + 1, total, mask=rows < GROUP)


@triton.jit
def _combine_kernel(parts, sums, out, DIM: tl.constexpr, SPLITS: tl.constexpr):
    """Put the shares of one sample's head together."""
    at = tl.program_id(0)
    dims, splits = tl.arange(0, DIM), tl.arange(0, SPLITS)
    best = tl.load(sums + (at * SPLITS + splits) * 2)
    total = tl.load(sums + (at * SPLITS + splits) * 2 + 1)
    scale = tl.exp(best - tl.max(best, 0))
    values = tl.load(parts + (at * SPLITS + splits)[:, None] * DIM + dims[None, :])
    result = tl.sum(values * scale[:, None], 0) / tl.sum(total * scale, 0)
    tl.store(out + at * DIM + dims, result.to(out.dtype.element_ty))


def num_splits(num_samples: int, num_kv: int, num_processors: int) -> int:
    """Return the number of shares that fills the GPU, a power of two."""
    splits = 1
    while num_samples * num_kv * splits < 3 * num_processors and splits < 32:
        splits *= 2
    return splits


def _rows(heads: Tensor) -> Tensor:
    """Return each row's heads side by side; rows may be apart, as those of a merged product are."""
    return heads if heads.stride(2) == 1 and heads.stride(1) == heads.shape[2] else heads.contiguous()


class DecodeStep(NamedTuple):
    """A decode step: one token of each sample. All tensors have fixed addresses, for a CUDA graph."""

    tables: Tensor
    positions: Tensor
    """The positions of the newest tokens."""
    splits: int


class PrefillStep(NamedTuple):
    """Chunks of several samples in a row, and where the tokens of their contexts are."""

    cells: Tensor
    blocks: Tensor
    """The block of every context token, chunk after chunk."""
    within: Tensor
    first_rows: Tensor
    first_contexts: Tensor
    longest_rows: int
    longest_context: int


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    step: DecodeStep | PrefillStep,
    scale: float,
    window: int | None,
) -> Tensor:
    """query (rows, heads, dim), key and value (rows, kv heads, dim)."""
    wide = EVERYTHING if window is None else window
    if isinstance(step, DecodeStep):
        return paged_decode(query, key, value, keys, values, step.tables, step.positions, scale, wide, step.splits)
    its_keys, its_values = write_and_gather(key, value, keys, values, step.cells, step.blocks, step.within)
    if query.dtype == torch.float32:  # flash attention has none; correct, a chunk at a time
        groups = query.shape[1] // key.shape[1]
        its_keys, its_values = its_keys.repeat_interleave(groups, 1), its_values.repeat_interleave(groups, 1)
        return attend_one_by_one(query, its_keys, its_values, step.first_rows, step.first_contexts, scale, wide)
    rows, contexts = Borders(step.first_rows, step.longest_rows), Borders(step.first_contexts, step.longest_context)
    return flash(query, its_keys, its_values, rows, contexts, scale, window)


# Writing to the cache is a custom operation that declares the mutation: compiled with the rest, it copied the cache.


@torch.library.custom_op("polyrl::write_and_gather", mutates_args=("keys", "values"))
def write_and_gather(
    key: Tensor, value: Tensor, keys: Tensor, values: Tensor, cells: Tensor, blocks: Tensor, within: Tensor
) -> tuple[Tensor, Tensor]:
    """key and value (rows, kv heads, dim): write them; then the keys and values of all context tokens, in a row."""
    num, num_kv, dim = key.shape
    key, value = _rows(key), _rows(value)
    sizes = {"NUM_KV": num_kv, "HEADS": triton.next_power_of_2(num_kv), "DIM": dim, "BLOCK": keys.shape[2]}
    _write_kernel[(num,)](key, value, keys, values, cells, key.stride(0), value.stride(0), **sizes)
    its_keys, its_values = (one.new_empty((len(blocks), num_kv, dim)) for one in (keys, values))
    _gather_kernel[(len(blocks),)](keys, values, blocks, within, its_keys, its_values, **sizes)
    return its_keys, its_values


@write_and_gather.register_fake
def _(
    key: Tensor, value: Tensor, keys: Tensor, values: Tensor, cells: Tensor, blocks: Tensor, within: Tensor
) -> tuple[Tensor, Tensor]:
    shape = (blocks.shape[0], keys.shape[1], keys.shape[3])
    return keys.new_empty(shape), values.new_empty(shape)


@torch.library.custom_op("polyrl::attend_one_by_one", mutates_args=())
def attend_one_by_one(
    query: Tensor, keys: Tensor, values: Tensor, first_rows: Tensor, first_contexts: Tensor, scale: float, window: int
) -> Tensor:
    """Chunk by chunk. An operation of its own: else every number of chunks is compiled anew."""
    rows, contexts = first_rows.tolist(), first_contexts.tolist()
    parts: list[Tensor] = []
    for row, next_row, at, next_at in zip(rows, rows[1:], contexts, contexts[1:], strict=False):
        num, total = next_row - row, next_at - at
        if not num:
            continue
        behind = torch.arange(total - num, total, device=query.device).unsqueeze(1)
        behind = behind - torch.arange(total, device=query.device)
        mask = (behind >= 0) & (behind < window)
        its = (one.transpose(0, 1) for one in (query[row:next_row], keys[at:next_at], values[at:next_at]))
        out = torch.nn.functional.scaled_dot_product_attention(*its, attn_mask=mask, scale=scale)
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


@attend_one_by_one.register_fake
def _(
    query: Tensor, keys: Tensor, values: Tensor, first_rows: Tensor, first_contexts: Tensor, scale: float, window: int
) -> Tensor:
    return query.new_empty(query.shape)


@torch.library.custom_op("polyrl::paged_decode", mutates_args=("keys", "values"))
def paged_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    positions: Tensor,
    scale: float,
    window: int,
    splits: int,
) -> Tensor:
    """query (rows, heads, dim), key and value (rows, kv heads, dim): write, and attend. One row a sample."""
    num, num_heads, dim = query.shape
    num_kv, block = keys.shape[1], keys.shape[2]
    query, key, value = query.contiguous(), _rows(key), _rows(value)
    group = num_heads // num_kv
    out = torch.empty_like(query)
    parts, sums = out, positions
    if splits > 1:
        parts = torch.empty((num, num_heads, splits, dim), dtype=torch.float32, device=query.device)
        sums = torch.empty((num, num_heads, splits, 2), dtype=torch.float32, device=query.device)
    _decode_kernel[(num, num_kv, splits)](
        query, key, value, keys, values, tables, positions, parts, sums, key.stride(0), value.stride(0),
        tables.stride(0), scale, window,
        NUM_KV=num_kv, GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), DIM=dim, BLOCK=block, SPLITS=splits,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32", **DECODE_TUNING,
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[(num * num_heads,)](parts, sums, out, DIM=dim, SPLITS=splits, num_warps=1)
    return out


@paged_decode.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    positions: Tensor,
    scale: float,
    window: int,
    splits: int,
) -> Tensor:
    return torch.empty_like(query)


# Drawing


@triton.jit
def _stretch_kernel(
    logits, temperatures, best, total, stride, vocab, NUM: tl.constexpr, STRETCH: tl.constexpr, COLD: tl.constexpr
):  # fmt: skip
    """Compute the maximum of a stretch, and the sum of the exponentials beside it."""
    row, number = tl.program_id(0), tl.program_id(1)
    at = number * STRETCH + tl.arange(0, STRETCH)
    temperature = tl.load(temperatures + row)
    temperature = tl.where(temperature < COLD, 1.0, temperature)
    x = tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32) / temperature
    m = tl.max(x, 0)
    tl.store(best + row * NUM + number, m)
    tl.store(total + row * NUM + number, tl.sum(tl.exp(x - m), 0))


@triton.jit
def _pick_kernel(
    logits, temperatures, best, total, uniforms, tokens, logprobs, stride, vocab,
    NUM: tl.constexpr, PADDED: tl.constexpr, STRETCH: tl.constexpr, COLD: tl.constexpr,
):  # fmt: skip
    """Pick the stretch that the random number falls into, and there the first token at which the sum passes it.

    The likeliest token of all, if the temperature is as good as zero. The stretch was summed in another order: a number
    beyond its end by that much takes its likeliest token, never one without weight. The running sum is of float64: it
    is added up as a tree, and in float32 a token without weight could end above the one before it.
    """
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    greedy = temperature < COLD
    temperature = tl.where(greedy, 1.0, temperature)
    numbers = tl.arange(0, PADDED)
    bests = tl.load(best + row * NUM + numbers, mask=numbers < NUM, other=float("-inf"))
    top = tl.max(bests, 0)
    sums = tl.load(total + row * NUM + numbers, mask=numbers < NUM, other=0.0)
    mass = (sums * tl.exp(bests - top)).to(tl.float64)
    cumulative = tl.cumsum(mass, 0)
    whole = tl.max(cumulative, 0)
    cut = tl.load(uniforms + row) * whole
    passed = tl.where(greedy, bests == top, cumulative > cut)
    chosen = tl.minimum(tl.min(tl.where(passed, numbers, NUM), 0), NUM - 1)
    before = tl.max(tl.where(numbers == chosen - 1, cumulative, 0.0), 0)
    at = chosen * STRETCH + tl.arange(0, STRETCH)
    x = tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32) / temperature
    ends = tl.cumsum(tl.exp(x - top).to(tl.float64), 0)
    is_beyond = tl.max(ends, 0) <= cut - before
    here = tl.where(greedy | is_beyond, x == tl.max(x, 0), ends > cut - before)
    token = tl.minimum(tl.min(tl.where(here, at, vocab), 0), vocab - 1)
    tl.store(tokens + row, token)
    logit = tl.sum(tl.where(at == token, x, 0.0), 0)
    tl.store(logprobs + row, logit - (top + tl.log(whole).to(tl.float32)))


def draw(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Return (tokens, log-probabilities), as sampling.draw does without truncation."""
    num, vocab = logits.shape
    stretches = triton.cdiv(vocab, STRETCH)
    best = torch.empty((num, stretches), dtype=torch.float32, device=logits.device)
    total = torch.empty_like(best)
    _stretch_kernel[(num, stretches)](
        logits, temperatures, best, total, logits.stride(0), vocab,
        NUM=stretches, STRETCH=STRETCH, COLD=sampling.GREEDY, num_warps=8,
    )  # fmt: skip
    tokens = torch.empty(num, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(num, dtype=torch.float32, device=logits.device)
    _pick_kernel[(num,)](
        logits, temperatures, best, total, uniforms, tokens, logprobs, logits.stride(0), vocab,
        NUM=stretches, PADDED=triton.next_power_of_2(stretches), STRETCH=STRETCH, COLD=sampling.GREEDY, num_warps=8,
    )  # fmt: skip
    return tokens, logprobs


@triton.jit
def _note_kernel(drawn, logprobs, cursor, all_drawn, all_logprobs, tokens, positions, answers, stride):
    """Write down what a row drew, and go to its next position."""
    row = tl.program_id(0)
    at = tl.load(cursor) * stride + row
    token = tl.load(drawn + row)
    tl.store(all_drawn + at, token)
    tl.store(all_logprobs + at, tl.load(logprobs + row))
    tl.store(tokens + row, token)
    tl.store(positions + row, tl.load(positions + row) + 1)
    tl.store(answers + row, tl.load(answers + row) + 1)


def note(
    drawn: Tensor, logprobs: Tensor, cursor: Tensor, all_drawn: Tensor, all_logprobs: Tensor, tokens: Tensor,
    positions: Tensor, answers: Tensor,
) -> None:  # fmt: skip
    """Row `cursor` of `all_drawn` and `all_logprobs` gets what was drawn; then all step on."""
    _note_kernel[(len(drawn),)](
        drawn, logprobs, cursor, all_drawn, all_logprobs, tokens, positions, answers, all_drawn.stride(0), num_warps=1
    )
    cursor += 1


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Compute sampling.uniforms on the device; the 64-bit integers wrap around, as that requires."""
    bits = _mix(_mix(seeds) + positions * _signed(sampling.GAMMA))
    return _shift(bits, 11).double() * 2.0**-53


def _mix(bits: Tensor) -> Tensor:
    bits = bits + _signed(sampling.GAMMA)
    for count, factor in sampling.ROUNDS:
        bits = (bits ^ _shift(bits, count)) * _signed(factor)
    return bits ^ _shift(bits, 31)


def _shift(bits: Tensor, count: int) -> Tensor:
    """Shift right, with zeros from the left; torch's own shift copies the sign bit."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def num_processors() -> int:
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return properties.multi_processor_count
