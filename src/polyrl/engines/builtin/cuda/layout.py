"""Where the tokens of a prefilling step lie on a GPU: chunks of several samples, row after row, and their contexts.

With a `shape` a step is padded to it, with rows and contexts that are never read: there are few shapes, and a CUDA
graph for each (prefill.py).

`in_place`, a step is one chunk. A token lies in the row of its position, counted from the last multiple of the shape's
rows, even when the tokens before it are cached. So all results for a token are computed at the same place
of the same shape.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from polyrl.engines.builtin.batching import Chunk

Numbers = np.ndarray[Any, np.dtype[np.int64]]
RowBorders = np.ndarray[Any, np.dtype[np.int32]]


_ROWS = (128, 256, 512, 1024, 2048)
"""The numbers of rows of shapes. With more rows the GPU is busier than the host, which can launch every kernel."""
_PIECES = 64
"""The number of pieces of a shape: chunks and padding."""
MOST_CONTEXTS = 65_536
"""The most context tokens of a step with a graph, whose memory stays. Cached prompts give few rows, long contexts."""
_MORE_CONTEXTS = 8
"""Padding contexts, which are never read. Layers are compiled for any sizes; two sizes that happen to be equal are
taken for the same one, and compiled again when they differ. So the number of contexts never equals the number of rows,
and neither equals the model's width.
"""


class GraphShape(NamedTuple):
    rows: int
    contexts: int


class StepLayout(NamedTuple):
    tokens: Numbers
    positions: Numbers
    cells: Numbers
    """Where each row's key and value go."""
    rows: Numbers
    """The rows whose next token is wanted."""
    blocks: Numbers
    """The block of every context token, chunk after chunk; `within` is the place in the block."""
    within: Numbers
    first_rows: RowBorders
    first_contexts: RowBorders
    longest_rows: int
    longest_context: int


class _Piece(NamedTuple):
    tokens: list[int]
    start: int
    blocks: Numbers
    """The block of every token of the context."""
    samples: bool


def shape_of(chunks: Sequence[Chunk], width: int, in_place: int = 0) -> GraphShape | None:
    """Return the smallest shape that holds these rows; None if they are too many. `width` is the model's; `in_place`
    the number of rows, where it is given.
    """
    num_rows = sum(chunk.count for chunk in chunks)
    rows = in_place or next((one for one in _ROWS if one >= num_rows), 0)
    if not in_place and rows == width:
        rows += _ROWS[0]
    if not rows or len(chunks) + 2 > _PIECES:
        return None
    made_up = rows if in_place else rows - num_rows  # the same shape, whatever is cached
    num_contexts = sum(chunk.start + chunk.count for chunk in chunks) + made_up
    contexts = 2 * rows
    while contexts < num_contexts:
        contexts *= 4
    shape = GraphShape(rows, contexts + _MORE_CONTEXTS)
    return shape if in_place or shape.contexts <= MOST_CONTEXTS else None


def lay_out(
    chunks: Sequence[Chunk], block_tokens: int, nowhere: int, shape: GraphShape | None = None, *, in_place: bool = False
) -> StepLayout:
    """Lay out a step. `nowhere` is the block of padding, which is never read."""
    pieces = [_piece(chunk, block_tokens) for chunk in chunks]
    if shape is not None:
        num_left = shape.rows - sum(len(one.tokens) for one in pieces)
        num_before = pieces[0].start % shape.rows if in_place else 0
        pieces = [_filling(num_before, nowhere), *pieces, _filling(num_left - num_before, nowhere)]
        pieces = [one for one in pieces if one.tokens]
    counts, lengths = [len(one.tokens) for one in pieces], [len(one.blocks) for one in pieces]
    first_rows, first_contexts = (np.cumsum([0, *sizes]).astype(np.int32) for sizes in (counts, lengths))
    positions = np.concatenate([np.arange(one.start, len(one.blocks)) for one in pieces])
    its = StepLayout(
        tokens=np.concatenate([np.array(one.tokens, np.int64) for one in pieces]),
        positions=positions,
        cells=np.concatenate([one.blocks[one.start :] for one in pieces]) * block_tokens + positions % block_tokens,
        rows=np.array([end - 1 for one, end in zip(pieces, first_rows[1:], strict=True) if one.samples], np.int64),
        blocks=np.concatenate([one.blocks for one in pieces]),
        within=np.concatenate([np.arange(length) % block_tokens for length in lengths]),
        first_rows=first_rows,
        first_contexts=first_contexts,
        longest_rows=max(counts),
        longest_context=max(lengths),
    )
    return _made_up(its, nowhere, shape)


def _made_up(its: StepLayout, nowhere: int, shape: GraphShape | None) -> StepLayout:
    """Pad the layout: with contexts that belong to no piece and, to fill a graph's shape, with empty pieces."""
    num_more = _MORE_CONTEXTS if shape is None else shape.contexts - len(its.blocks)
    its = its._replace(
        blocks=np.pad(its.blocks, (0, num_more), constant_values=nowhere), within=np.pad(its.within, (0, num_more))
    )
    if shape is None:
        return its
    num_empty = _PIECES + 1 - len(its.first_rows)
    return its._replace(
        first_rows=np.pad(its.first_rows, (0, num_empty), mode="edge"),
        first_contexts=np.pad(its.first_contexts, (0, num_empty), mode="edge"),
        longest_rows=shape.rows,
        longest_context=shape.contexts,
    )


def _piece(chunk: Chunk, block_tokens: int) -> _Piece:
    member, start, count, samples = chunk
    stop = start + count
    blocks = np.repeat(np.array(member.blocks, np.int64), block_tokens)[:stop]
    return _Piece(member.tokens[start:stop], start, blocks, samples)


def _filling(num: int, nowhere: int) -> _Piece:
    return _Piece([0] * num, 0, np.full(num, nowhere, np.int64), samples=False)
