"""Which bytes of a version a tensor-parallel rank needs, and where they go: each rank reads its own slice, no more.

A rule says how one parameter of an engine is made of the tensors of a version:

    Whole         as it is, at every rank: norms, the biases of rows
    Columns       output features are split: rows of the matrix. Several tensors one under the other: gate and up
    Rows          input features are split: a stretch of every row of the matrix
    Heads         whole attention heads are split, several tensors one under the other: q, k and v. With more ranks than
                  heads of keys and values, neighbouring ranks hold the same head
    Vocabulary    rows are split after the table was padded with zeros to a multiple

`plan` turns a rule into copies between bytes; `fill` carries them out. Rules kept here: what does not divide is refused
in one line (BadShard), nothing is rounded. Left out: experts that are stacked in one tensor; copies to a device.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias, assert_never

import numpy as np

from polyrl.weights.chunks import View
from polyrl.weights.manifest import Layout, TensorEntry

VOCABULARY_MULTIPLE = 64
"""What the engines of the field pad a vocabulary to, before they split it."""


class BadShard(ValueError):
    """A tensor that cannot be split so. The message names it, what was found and what was expected."""


class Whole(NamedTuple):
    source: str


class Columns(NamedTuple):
    sources: tuple[str, ...]


class Rows(NamedTuple):
    source: str


class HeadsOf(NamedTuple):
    source: str
    num_heads: int


class Heads(NamedTuple):
    sources: tuple[HeadsOf, ...]


class Vocabulary(NamedTuple):
    source: str
    multiple: int = VOCABULARY_MULTIPLE


Rule: TypeAlias = Whole | Columns | Rows | Heads | Vocabulary


class Copy(NamedTuple):
    """Runs of bytes at equal distances in a version, to equal distances in the slice."""

    source_start: int
    target_start: int
    run_bytes: int
    num_runs: int = 1
    source_stride: int = 0
    target_stride: int = 0


class Shard(NamedTuple):
    """One rank's slice of one parameter. Bytes that no copy writes are zero."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    copies: tuple[Copy, ...]


def plan(rule: Rule, layout: Layout, rank: int, num_ranks: int) -> Shard:
    """What a rank's slice is made of. Raises BadShard."""
    if not 0 <= rank < num_ranks:
        raise BadShard(f"rank {rank} of {num_ranks}")
    match rule:
        case Whole(source):
            tensor = _tensor(layout, source)
            return Shard(tensor.dtype, tensor.shape, tensor.num_bytes, _copies([(tensor, 0, _num_rows(tensor))]))
        case Columns(sources):
            tensors = [_tensor(layout, source) for source in sources]
            return _stacked([_even_part(tensor, rank, num_ranks) for tensor in tensors])
        case Heads(sources):
            return _stacked([_heads_part(_tensor(layout, of.source), of.num_heads, rank, num_ranks) for of in sources])
        case Rows(source):
            return _stretch(_tensor(layout, source), rank, num_ranks)
        case Vocabulary(source, multiple):
            return _vocabulary(_tensor(layout, source), multiple, rank, num_ranks)
        case _:
            assert_never(rule)


def fill(shard: Shard, version: View, out: View) -> None:
    """Carry the copies out. `out` is a rank's own buffer, of the shard's size; what is not written becomes zero."""
    source, target = np.frombuffer(version, np.uint8), np.frombuffer(out, np.uint8)
    if len(target) != shard.num_bytes:
        raise BadShard(f"a buffer of {len(target)} bytes; expected {shard.num_bytes}")
    if sum(copy.run_bytes * copy.num_runs for copy in shard.copies) < shard.num_bytes:
        target[:] = 0
    for copy in shard.copies:
        _runs(target, copy.target_start, copy.target_stride, copy)[...] = _runs(
            source, copy.source_start, copy.source_stride, copy
        )


def decoder_rules(layout: Layout, *, num_heads: int, num_kv_heads: int, fused: bool = True) -> dict[str, Rule]:
    """The rules of a standard decoder, by the names that Hugging Face gives its tensors.

    Fused: q, k and v become `qkv_proj`, gate and up `gate_up_proj`, as engines hold them. A name that is tied is a
    parameter like any other.
    """
    rules: dict[str, Rule] = {}
    for name, tensor in layout.by_name.items():
        for parameter, rule in _rules_of(name, tensor, num_heads, num_kv_heads, fused=fused):
            rules[parameter] = rule
    return rules


_PROJECTION = re.compile(r"(.*\.)(q|k|v|o|gate|up|down)_proj\.(weight|bias)")
_TABLE = re.compile(r"(.*\.)?(embed_tokens|lm_head|wte)\.(weight|bias)")


def is_table(name: str) -> bool:
    """Whether a tensor has a row a token: embeddings, and the head."""
    return _TABLE.fullmatch(name) is not None


def _rules_of(
    name: str, tensor: TensorEntry, num_heads: int, num_kv_heads: int, *, fused: bool
) -> Iterator[tuple[str, Rule]]:
    if is_table(name):
        yield name, Vocabulary(tensor.name)
        return
    found = _PROJECTION.fullmatch(name)
    if found is None:
        yield name, Whole(tensor.name)
        return
    path, kind, what = found.groups()
    if kind in ("o", "down"):
        yield name, Rows(tensor.name) if what == "weight" else Whole(tensor.name)
    elif kind in ("q", "k", "v"):
        heads = {"q": num_heads, "k": num_kv_heads, "v": num_kv_heads}
        if not fused:
            yield name, Heads((HeadsOf(name, heads[kind]),))
        elif kind == "q":
            parts = tuple(HeadsOf(f"{path}{one}_proj.{what}", heads[one]) for one in heads)
            yield f"{path}qkv_proj.{what}", Heads(parts)
    elif not fused:
        yield name, Columns((name,))
    elif kind == "gate":
        yield f"{path}gate_up_proj.{what}", Columns((f"{path}gate_proj.{what}", f"{path}up_proj.{what}"))


class _Stripe(NamedTuple):
    tensor: TensorEntry
    first_row: int
    num_rows: int


def _even_part(tensor: TensorEntry, rank: int, num_ranks: int) -> _Stripe:
    rows = _divided(tensor, _num_rows(tensor), num_ranks, "rows")
    return _Stripe(tensor, rank * rows, rows)


def _heads_part(tensor: TensorEntry, num_heads: int, rank: int, num_ranks: int) -> _Stripe:
    head_rows = _divided(tensor, _num_rows(tensor), num_heads, "rows, as heads,")
    if num_heads >= num_ranks:
        heads = _divided(tensor, num_heads, num_ranks, "heads")
        return _Stripe(tensor, rank * heads * head_rows, heads * head_rows)
    if num_ranks % num_heads:
        raise BadShard(f"{tensor.name}: {num_heads} heads cannot be held by {num_ranks} ranks in equal numbers")
    return _Stripe(tensor, rank // (num_ranks // num_heads) * head_rows, head_rows)


def _stacked(stripes: list[_Stripe]) -> Shard:
    """Stripes of rows, one under the other."""
    first = stripes[0].tensor
    for tensor, _, _ in stripes:
        if (tensor.dtype, tensor.shape[1:]) != (first.dtype, first.shape[1:]):
            raise BadShard(f"{tensor.name} of {tensor.dtype} {tensor.shape} cannot be put under {first.name}")
    shape = (sum(stripe.num_rows for stripe in stripes), *first.shape[1:])
    copies = _copies([(stripe.tensor, stripe.first_row, stripe.num_rows) for stripe in stripes])
    return Shard(first.dtype, shape, math.prod(shape) * first.item_bytes, copies)


def _stretch(tensor: TensorEntry, rank: int, num_ranks: int) -> Shard:
    if len(tensor.shape) != 2:
        raise BadShard(f"{tensor.name} of shape {tensor.shape}; expected a matrix, to split its rows")
    num_rows, num_columns = tensor.shape
    columns = _divided(tensor, num_columns, num_ranks, "columns")
    run_bytes, row_bytes = columns * tensor.item_bytes, num_columns * tensor.item_bytes
    copy = Copy(tensor.start + rank * run_bytes, 0, run_bytes, num_rows, row_bytes, run_bytes)
    return Shard(tensor.dtype, (num_rows, columns), num_rows * run_bytes, (copy,))


def _vocabulary(tensor: TensorEntry, multiple: int, rank: int, num_ranks: int) -> Shard:
    """Padded to the multiple, and then so that it divides."""
    num_rows = _num_rows(tensor)
    unit = math.lcm(multiple, num_ranks)
    rows = -(-num_rows // unit) * unit // num_ranks
    first = min(rank * rows, num_rows)
    shape = (rows, *tensor.shape[1:])
    copies = _copies([(tensor, first, min(rows, num_rows - first))])
    return Shard(tensor.dtype, shape, math.prod(shape) * tensor.item_bytes, copies)


def _copies(stripes: list[tuple[TensorEntry, int, int]]) -> tuple[Copy, ...]:
    copies: list[Copy] = []
    written = 0
    for tensor, first_row, num_rows in stripes:
        row_bytes = math.prod(tensor.shape[1:]) * tensor.item_bytes
        if num_rows * row_bytes:
            copies.append(Copy(tensor.start + first_row * row_bytes, written, num_rows * row_bytes))
        written += num_rows * row_bytes
    return tuple(copies)


def _runs(buffer: np.ndarray[Any, Any], start: int, stride: int, copy: Copy) -> np.ndarray[Any, Any]:
    """The copy's bytes in a buffer, as (run, byte). The last byte is looked at first: strides are not checked."""
    stop = start + (copy.num_runs - 1) * stride + copy.run_bytes
    if copy.num_runs == 0 or copy.run_bytes == 0:
        return buffer[:0].reshape(copy.num_runs, copy.run_bytes)
    if stop > len(buffer):
        raise BadShard(f"a copy up to byte {stop} of a buffer of {len(buffer)}")
    shape, strides = (copy.num_runs, copy.run_bytes), (stride, 1)
    return np.lib.stride_tricks.as_strided(buffer[start:stop], shape, strides)


def _tensor(layout: Layout, name: str) -> TensorEntry:
    if name not in layout.by_name:
        raise BadShard(f"no tensor {name!r} in the layout")
    return layout.by_name[name]


def _num_rows(tensor: TensorEntry) -> int:
    return tensor.shape[0] if tensor.shape else 1


def _divided(tensor: TensorEntry, count: int, by: int, what: str) -> int:
    if by < 1 or count % by:
        raise BadShard(f"{tensor.name}: {count} {what} cannot be split into {by}")
    return count // by


def bytes_read(rules: Mapping[str, Rule], layout: Layout, rank: int, num_ranks: int) -> int:
    """How much of a version a rank reads."""
    shards = [plan(rule, layout, rank, num_ranks) for rule in rules.values()]
    return sum(copy.run_bytes * copy.num_runs for shard in shards for copy in shard.copies)
