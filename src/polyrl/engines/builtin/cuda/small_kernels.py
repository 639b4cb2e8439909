"""The kernels of a decode step of few samples (small_batch.py), for one NVIDIA GPU.

DEPENDENT kernels are launched while the one before them runs: they let the next one be launched, read what no kernel of
this step writes, and wait before they read the rest.
"""

# Triton's kernels are not Python that a type checker knows: see kernels.py.
# pyright: reportMissingImports=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from polyrl.engines.builtin.cuda.kernels import finite


@triton.jit
def embed_kernel(tokens, table, out, squares, ROWS: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr):
    """Take the rows of the tokens, and their sums of squares."""
    row, at = tl.program_id(0), tl.arange(0, WIDE)
    x = tl.load(table + tl.load(tokens + row) * K + at, mask=at < K, other=0.0)
    tl.store(out + row * K + at, x, mask=at < K)
    x = x.to(tl.float32)
    tl.store(squares + row, tl.sum(x * x, 0))


@triton.jit
def norm_kernel(x, norm, out, eps, K: tl.constexpr, WIDE: tl.constexpr, DEPENDENT: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, WIDE)
    if DEPENDENT:
        gdc_wait()
    TYPE: tl.constexpr = out.dtype.element_ty
    its = tl.load(x + row * K + at, mask=at < K, other=0.0).to(tl.float32)
    its = (its * tl.rsqrt(tl.sum(its * its, 0) / K + eps)).to(TYPE).to(tl.float32)
    its = its * tl.load(norm + at, mask=at < K, other=0.0).to(tl.float32)
    tl.store(out + row * K + at, its.to(TYPE), mask=at < K)


@triton.jit
def _normed(x, scale, norm, TYPE: tl.constexpr):
    """Round as the modules do."""
    return ((x.to(tl.float32) * scale).to(TYPE).to(tl.float32) * norm.to(tl.float32)).to(TYPE)


@triton.jit
def _activated(gate, up, TYPE: tl.constexpr):
    gate, up = gate.to(TYPE).to(tl.float32), up.to(TYPE).to(tl.float32)
    return (gate * tl.sigmoid(gate)).to(TYPE).to(tl.float32) * up


@triton.jit
def one_by_one_kernel(
    x, norm, weight, bias, residual, out, eps,
    K: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr,
    NORMED: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr, GATED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`out` = `residual` + norm(`x`) times `weight` + `bias`, for a few columns of it.

    GATED, the matrix has N more rows, and the product with them is weighed by the activation of the others.
    """
    TYPE: tl.constexpr = out.dtype.element_ty
    cols, steps, rows = tl.program_id(0) * COLS + tl.arange(0, COLS), tl.arange(0, STEP), tl.arange(0, ROWS)
    there = weight + cols[:, None].to(tl.int64) * K + steps[None, :]
    if DEPENDENT:
        gdc_launch_dependents()
    numbers = tl.load(there, mask=(steps < K)[None, :], other=0.0)
    more = numbers
    if GATED:
        more = tl.load(there + N * K, mask=(steps < K)[None, :], other=0.0)
    if DEPENDENT:
        gdc_wait()
    its = x + rows[:, None] * K + steps[None, :]
    scale = tl.full((ROWS, 1), 1.0, tl.float32)
    if NORMED:
        squares = tl.zeros((ROWS, STEP), tl.float32)
        for at in tl.static_range(0, K, STEP):
            part = tl.load(its + at, mask=(at + steps < K)[None, :], other=0.0).to(tl.float32)
            squares += part * part
        scale = tl.rsqrt(tl.sum(squares, 1) / K + eps)[:, None]
    total, gate = tl.zeros((ROWS, COLS, STEP), tl.float32), tl.zeros((ROWS, COLS, STEP), tl.float32)
    for at in tl.static_range(0, K, STEP):
        is_in = at + steps < K
        if at > 0:
            numbers = tl.load(there + at, mask=is_in[None, :], other=0.0)
            if GATED:
                more = tl.load(there + N * K + at, mask=is_in[None, :], other=0.0)
        part = tl.load(its + at, mask=is_in[None, :], other=0.0)
        if NORMED:
            part = _normed(part, scale, tl.load(norm + at + steps, mask=is_in, other=0.0)[None, :], TYPE)
        part = part.to(tl.float32)[:, None, :]
        if GATED:
            gate += numbers.to(tl.float32)[None, :, :] * part
            total += more.to(tl.float32)[None, :, :] * part
        else:
            total += numbers.to(tl.float32)[None, :, :] * part
    result = tl.sum(total, 2)
    if GATED:
        result = _activated(tl.sum(gate, 2), result, TYPE)
    if BIASED:
        result += tl.load(bias + cols)[None, :].to(tl.float32)
    result = result.to(TYPE).to(tl.float32)
    place = rows[:, None] * N + cols[None, :]
    if ADDED:
        result += tl.load(residual + place).to(tl.float32)
    tl.store(out + place, result.to(TYPE))


@triton.jit
def tiles_kernel(
    x, norm, weight, bias, residual, out, squares, parts, arrived, num_rows, eps,
    K: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr,
    SPLITS: tl.constexpr, TILES: tl.constexpr, NUM_TILES: tl.constexpr,
    NORMED: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr, GATED: tl.constexpr,
    PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """As `one_by_one_kernel`, with tensor cores: columns of the matrix are the rows of a tile.

    A program sums a share of each column, and the last of them to end adds the shares up, in their order. `squares` has
    the sums of squares of `x`, in as many parts as its writer had programs: each kernel that adds to a residual writes
    them.
    """
    TYPE: tl.constexpr = out.dtype.element_ty
    tile, split = tl.program_id(0), tl.program_id(1)
    cols, steps, rows = tile * COLS + tl.arange(0, COLS), tl.arange(0, STEP), tl.arange(0, ROWS)
    first = split * (K // SPLITS)
    there = weight + cols[:, None].to(tl.int64) * K + steps[None, :]
    if DEPENDENT:
        gdc_launch_dependents()
    first_numbers = tl.load(there + first)
    if DEPENDENT:
        gdc_wait()
    is_row = rows < num_rows
    its = x + rows[None, :] * K + steps[:, None]
    scale = tl.full((1, ROWS), 1.0, tl.float32)
    if NORMED:
        tiles = tl.arange(0, TILES)
        sums = tl.load(squares + tiles[:, None] * ROWS + rows[None, :], mask=(tiles < NUM_TILES)[:, None], other=0.0)
        scale = tl.rsqrt(tl.sum(sums, 0) / K + eps)[None, :]
    total, gate = tl.zeros((COLS, ROWS), tl.float32), tl.zeros((COLS, ROWS), tl.float32)
    for at in range(first + STEP, first + K // SPLITS, STEP):
        numbers = tl.load(there + at)
        part = tl.load(its + at, mask=is_row[None, :], other=0.0)
        if NORMED:
            part = _normed(part, scale, tl.load(norm + at + steps)[:, None], TYPE)
        total = tl.dot(numbers, part, total, input_precision=PRECISION)
        if GATED:
            gate = tl.dot(tl.load(there + N * K + at), part, gate, input_precision=PRECISION)
    part = tl.load(its + first, mask=is_row[None, :], other=0.0)
    if NORMED:
        part = _normed(part, scale, tl.load(norm + first + steps)[:, None], TYPE)
    total = tl.dot(first_numbers, part, total, input_precision=PRECISION)
    if GATED:
        gate = tl.dot(tl.load(there + N * K + first), part, gate, input_precision=PRECISION)
    place = rows[None, :] * N + cols[:, None]
    is_last = True
    if SPLITS > 1:
        tl.store(parts + split * ROWS * N + place, total)
        tl.debug_barrier()
        is_last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            total = tl.zeros((COLS, ROWS), tl.float32)
            for number in tl.static_range(SPLITS):
                total += tl.load(parts + number * ROWS * N + place, cache_modifier=".cg")
            tl.store(arrived + tile, 0)
    if is_last:
        if GATED:
            total = _activated(total, gate, TYPE)
        if BIASED:
            total += tl.load(bias + cols)[:, None].to(tl.float32)
        total = total.to(TYPE).to(tl.float32)
        if ADDED:
            total += tl.load(residual + place, mask=is_row[None, :], other=0.0).to(tl.float32)
            total = total.to(TYPE).to(tl.float32)
            tl.store(squares + tile * ROWS + rows, tl.sum(total * total, 0))
        tl.store(out + place, total.to(TYPE), mask=is_row[None, :])


@triton.jit
def _turned(
    its, is_head, norm_one, norm_two, cos, sin, eps, HALF: tl.constexpr, NORMED: tl.constexpr, TYPE: tl.constexpr
):
    """Return the two halves of heads, normed and turned to their position: (heads, half) each."""
    halves = tl.arange(0, HALF)[None, :]
    one = tl.load(its + halves, mask=is_head, other=0.0).to(tl.float32)
    two = tl.load(its + HALF + halves, mask=is_head, other=0.0).to(tl.float32)
    if NORMED:
        scale = tl.rsqrt((tl.sum(one * one, 1) + tl.sum(two * two, 1)) / (2 * HALF) + eps)[:, None]
        one, two = (
            _normed(one, scale, norm_one, TYPE).to(tl.float32),
            _normed(two, scale, norm_two, TYPE).to(tl.float32),
        )
    return (one * cos - two * sin).to(TYPE), (two * cos + one * sin).to(TYPE)


@triton.jit
def _halves(at, HALF: tl.constexpr):
    halves = tl.arange(0, HALF)
    return tl.load(at + halves)[None, :].to(tl.float32), tl.load(at + HALF + halves)[None, :].to(tl.float32)


@triton.jit
def _look(
    one, two, keys_one, keys_two, values, is_seen, best, total, gathered, scale,
    PRECISION: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Add a block of the context: keys (half, tokens) each, values (tokens, dim)."""
    scores = tl.dot(one, keys_one, input_precision=PRECISION)
    scores = tl.dot(two, keys_two, scores, input_precision=PRECISION) * scale
    scores = tl.where(is_seen[None, :], scores, -1.0e30)
    new_best = tl.maximum(best, tl.max(scores, 1))
    weights = tl.exp(scores - new_best[:, None])
    shrink = tl.exp(best - new_best)
    gathered = gathered * shrink[:, None] + tl.dot(weights.to(TYPE), values, input_precision=PRECISION)
    return new_best, total * shrink + tl.sum(weights, 1), gathered


@triton.jit
def attention_kernel(
    heads, query_norm, key_norm, cos, sin, keys, values, tables, positions, out, parts, sums, waiting,
    table_stride, scale, eps, window,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, NORMED: tl.constexpr, PRECISION: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One sample, one kv head, one share of its context. The last share to end puts all of them together.

    All that earlier steps wrote is read before the kernel waits for this step's queries, keys and values. A share
    without a block looks at one that is hidden, which weighs nothing beside the newest token.
    """
    DIM: tl.constexpr = 2 * HALF
    TYPE: tl.constexpr = out.dtype.element_ty
    sample, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if DEPENDENT:
        gdc_launch_dependents()
    newest = tl.load(positions + sample).to(tl.int32)
    first = tl.maximum(newest + 1 - window, 0)
    num_blocks = tl.cdiv(newest, BLOCK)
    first_block = first // BLOCK
    share = tl.cdiv(num_blocks - first_block, SPLITS)
    begin = first_block + split * share
    end = tl.minimum(begin + share, num_blocks)
    rows, within, dims = tl.arange(0, ROWS), tl.arange(0, BLOCK), tl.arange(0, DIM)
    is_head = (rows < GROUP)[:, None]
    its_table = tables + sample * table_stride
    in_keys = within[None, :] * DIM + tl.arange(0, HALF)[:, None]
    in_values = within[:, None] * DIM + dims[None, :]
    at = (tl.load(its_table + tl.where(begin < end, begin, 0)).to(tl.int64) * NUM_KV + head) * BLOCK * DIM
    keys_one, keys_two = tl.load(keys + at + in_keys), tl.load(keys + at + HALF + in_keys)
    its_values = tl.load(values + at + in_values)
    angles = newest.to(tl.int64) * HALF + tl.arange(0, HALF)
    c, s = tl.load(cos + angles)[None, :].to(tl.float32), tl.load(sin + angles)[None, :].to(tl.float32)
    query_one, query_two, key_one, key_two = c, c, c, c
    if NORMED:
        query_one, query_two = _halves(query_norm, HALF)
        key_one, key_two = _halves(key_norm, HALF)
    if DEPENDENT:
        gdc_wait()
    its = heads + sample * (GROUP + 2) * NUM_KV * DIM
    its_heads = its + (head * GROUP + rows)[:, None] * DIM
    one, two = _turned(its_heads, is_head, query_one, query_two, c, s, eps, HALF, NORMED, TYPE)
    best, total = tl.full((ROWS,), -1.0e30, tl.float32), tl.zeros((ROWS,), tl.float32)
    gathered = tl.zeros((ROWS, DIM), tl.float32)
    position = begin * BLOCK + within
    is_seen = (position < tl.minimum(newest, end * BLOCK)) & (position >= first)
    best, total, gathered = _look(
        one, two, keys_one, keys_two, its_values, is_seen, best, total, gathered, scale, PRECISION, TYPE
    )
    for number in range(begin + 1, end):
        at = (tl.load(its_table + number).to(tl.int64) * NUM_KV + head) * BLOCK * DIM
        position = number * BLOCK + within
        best, total, gathered = _look(
            one, two, tl.load(keys + at + in_keys), tl.load(keys + at + HALF + in_keys),
            tl.load(values + at + in_values),
            (position < newest) & (position >= first), best, total, gathered, scale, PRECISION, TYPE,
        )  # fmt: skip
    if split == SPLITS - 1:
        its_key = its + (NUM_KV * GROUP + head) * DIM + tl.zeros((1,), tl.int32)[:, None]
        is_there = (tl.arange(0, HALF) >= 0)[None, :]
        its_one, its_two = _turned(its_key, is_there, key_one, key_two, c, s, eps, HALF, NORMED, TYPE)
        its_value = tl.load(its + (NUM_KV * (GROUP + 1) + head) * DIM + dims)
        block = tl.load(its_table + newest // BLOCK).to(tl.int64)
        at = ((block * NUM_KV + head) * BLOCK + newest % BLOCK) * DIM
        there = keys + at + tl.arange(0, HALF)[None, :]
        tl.store(there, its_one)
        tl.store(there + HALF, its_two)
        tl.store(values + at + dims, finite(its_value))
        score = tl.sum(one.to(tl.float32) * its_one.to(tl.float32), 1)
        score = (score + tl.sum(two.to(tl.float32) * its_two.to(tl.float32), 1)) * scale
        new_best = tl.maximum(best, score)
        weight, shrink = tl.exp(score - new_best), tl.exp(best - new_best)
        gathered = gathered * shrink[:, None] + weight[:, None] * its_value.to(tl.float32)[None, :]
        total = total * shrink + weight
        best = new_best
    place = sample * NUM_KV * GROUP + head * GROUP + rows
    if SPLITS == 1:
        result = gathered / tl.where(rows < GROUP, total, 1.0)[:, None]
        tl.store(out + place[:, None] * DIM + dims[None, :], result.to(TYPE), mask=is_head)
    else:
        tl.store(parts + (place[:, None] * SPLITS + split) * DIM + dims[None, :], gathered, mask=is_head)
        tl.store(sums + (place * SPLITS + split) * 2, best, mask=rows < GROUP)
        tl.store(sums + (place * SPLITS + split) * 2 + 1, total, mask=rows < GROUP)
        tl.debug_barrier()
        counter = waiting + sample * NUM_KV + head
        if tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(counter, 0)
            splits = tl.arange(0, SPLITS)
            for member in tl.static_range(GROUP):
                at_head = sample * NUM_KV * GROUP + head * GROUP + member
                where = at_head * SPLITS + splits
                its_best = tl.load(sums + where * 2, cache_modifier=".cg")
                its_total = tl.load(sums + where * 2 + 1, cache_modifier=".cg")
                its_parts = tl.load(parts + where[:, None] * DIM + dims[None, :], cache_modifier=".cg")
                grown = tl.exp(its_best - tl.max(its_best, 0))
                result = tl.sum(its_parts * grown[:, None], 0) / tl.sum(its_total * grown, 0)
                tl.store(out + at_head * DIM + dims, result.to(TYPE))
