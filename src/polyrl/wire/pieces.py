"""Splitting what is large into frames of a size that any connection bears.

A frame has a limit (frames.py), and whoever reads it holds all of it twice for a moment. What can be long without end
(orders, the samples of a group, prompts) travels in pieces of about `PIECE_BYTES`; a single item is never cut.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

PIECE_BYTES = 4 << 20

Item = TypeVar("Item")


def in_pieces(
    items: Iterable[Item], num_bytes_of: Callable[[Item], int], piece_bytes: int = PIECE_BYTES
) -> Iterator[tuple[Item, ...]]:
    """In order; each piece has at least one item, and goes beyond `piece_bytes` by no more than its last one."""
    piece: list[Item] = []
    num_bytes = 0
    for item in items:
        piece.append(item)
        num_bytes += num_bytes_of(item)
        if num_bytes >= piece_bytes:
            yield tuple(piece)
            piece, num_bytes = [], 0
    if piece:
        yield tuple(piece)
