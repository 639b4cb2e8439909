"""Which bytes of a version a tensor-parallel rank holds of a parameter that every server has under its own name.

    WholeTensor      as it is, at every rank: norms
    VocabularyRows   rows are split after the table was padded with zeros to a multiple

Left out: what a server fuses or splits in a way of its own. Its loader cuts that, and knows how.
"""

import math
import re
from typing import NamedTuple, TypeAlias, assert_never

from polyrl.weights.manifest import Layout, TensorEntry

VOCABULARY_MULTIPLE = 64
"""What the engines of the field pad a vocabulary to, before they split it."""


class BadShard(ValueError):
    """A slice that cannot be. The message says what was asked for."""


class WholeTensor(NamedTuple):
    source: str


class VocabularyRows(NamedTuple):
    source: str
    multiple: int = VOCABULARY_MULTIPLE


Rule: TypeAlias = WholeTensor | VocabularyRows


class Shard(NamedTuple):
    """One rank's slice of one parameter: a run of the version's bytes, and zeros up to its size."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    start: int
    """In the version; so is `end`."""
    end: int


def plan(rule: Rule, layout: Layout, rank: int, num_ranks: int) -> Shard:
    """What a rank's slice is made of. Raises BadShard."""
    if not 0 <= rank < num_ranks:
        raise BadShard(f"rank {rank} of {num_ranks}")
    match rule:
        case WholeTensor(source):
            tensor = _tensor(layout, source)
            return Shard(tensor.dtype, tensor.shape, tensor.num_bytes, tensor.start, tensor.end)
        case VocabularyRows(source, multiple):
            return _vocabulary(_tensor(layout, source), multiple, rank, num_ranks)
        case _:
            assert_never(rule)


_TABLE = re.compile(r"(.*\.)?(embed_tokens|lm_head|wte)\.(weight|bias)")


def is_table(name: str) -> bool:
    """Whether a tensor has a row a token: embeddings, and the head."""
    return _TABLE.fullmatch(name) is not None


def _vocabulary(tensor: TensorEntry, multiple: int, rank: int, num_ranks: int) -> Shard:
    """Padded to the multiple, and then so that it divides."""
    num_rows = tensor.shape[0] if tensor.shape else 1
    unit = math.lcm(multiple, num_ranks)
    rows = -(-num_rows // unit) * unit // num_ranks
    row_bytes = math.prod(tensor.shape[1:]) * tensor.item_bytes
    first, end = (min(one * rows, num_rows) for one in (rank, rank + 1))
    return Shard(
        dtype=tensor.dtype,
        shape=(rows, *tensor.shape[1:]),
        num_bytes=rows * row_bytes,
        start=tensor.start + first * row_bytes,
        end=tensor.start + end * row_bytes,
    )


def _tensor(layout: Layout, name: str) -> TensorEntry:
    if name not in layout.by_name:
        raise BadShard(f"no tensor {name!r} in the layout")
    return layout.by_name[name]
