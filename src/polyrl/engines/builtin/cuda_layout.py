"""Where the tokens of a prefilling step lie on a GPU: chunks of several samples, row after row, and their contexts.

With `fixed_rows` a step is one chunk, and has so many rows. A token lies in the row of its position, counted from the
last multiple of `fixed_rows`, even when the tokens before it are cached: the rows before it and after it are filled
with tokens that nobody reads. So whatever is computed of a token is computed at the same place of the same shape.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from polyrl.engines.builtin.batching import Chunk

Numbers = np.ndarray[Any, np.dtype[np.int64]]
Borders = np.ndarray[Any, np.dtype[np.int32]]


class Layout(NamedTuple):
    tokens: Numbers
    positions: Numbers
    cells: Numbers
    """Where each row's key and value go."""
    rows: Numbers
    """Those whose next token is wanted."""
    blocks: Numbers
    """Of every context token, chunk after chunk; `within` is the place in it."""
    within: Numbers
    first_rows: Borders
    first_contexts: Borders
    longest_rows: int
    longest_context: int


class _Piece(NamedTuple):
    tokens: list[int]
    start: int
    blocks: Numbers
    """Of every token of the context."""
    samples: bool


def lay_out(chunks: Sequence[Chunk], block_tokens: int, nowhere: int, fixed_rows: int = 0) -> Layout:
    """`nowhere` is the block of what nobody reads."""
    pieces = [_piece(chunk, block_tokens) for chunk in chunks]
    if fixed_rows:
        (piece,) = pieces
        num_before = piece.start % fixed_rows
        num_after = fixed_rows - num_before - len(piece.tokens)
        pieces = [_filling(num_before, nowhere), piece, _filling(num_after, nowhere)]
        pieces = [one for one in pieces if one.tokens]
    counts, lengths = [len(one.tokens) for one in pieces], [len(one.blocks) for one in pieces]
    first_rows, first_contexts = (np.cumsum([0, *sizes]).astype(np.int32) for sizes in (counts, lengths))
    positions = np.concatenate([np.arange(one.start, len(one.blocks)) for one in pieces])
    return Layout(
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


def _piece(chunk: Chunk, block_tokens: int) -> _Piece:
    member, start, count, samples = chunk
    stop = start + count
    blocks = np.repeat(np.array(member.blocks, np.int64), block_tokens)[:stop]
    return _Piece(member.tokens[start:stop], start, blocks, samples)


def _filling(num: int, nowhere: int) -> _Piece:
    return _Piece([0] * num, 0, np.full(num, nowhere, np.int64), samples=False)
