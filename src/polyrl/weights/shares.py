"""Which part of every version a node holds, if the nodes of a trainer serve versions together.

    share = share_of(layout, chunk_bytes, number, num_nodes)
    share.chunks, share.served        the chunks that it serves, and their bytes
    share.pieces                      the pieces that it compares for deltas
    share.held                        the bytes that it needs for both

Shares are equal runs of chunks. Each chunk is in one share, and so is each piece: that in which it begins. A piece that
ends in the next share is why `held` goes on a little beyond `served`. One node's share is the whole version.
"""

from typing import NamedTuple, Protocol

from polyrl.weights import delta
from polyrl.weights.manifest import Layout


class VersionShare(NamedTuple):
    chunks: range
    served: range
    pieces: list[delta.Piece]
    held: range


class ServingNodes(Protocol):
    """The nodes of a trainer that serve every version together, and this one's place among them."""

    @property
    def number(self) -> int: ...

    @property
    def size(self) -> int: ...

    def exchange(self, data: bytes) -> list[bytes]:
        """Return every node's bytes, in the order of nodes. For the thread that publishes."""
        ...

    def exchange_beside(self, data: bytes) -> list[bytes]:
        """Do the same for the thread that makes deltas."""
        ...


class OneNode:
    number, size = 0, 1

    def exchange(self, data: bytes) -> list[bytes]:
        return [data]

    exchange_beside = exchange


def share_of(layout: Layout, chunk_bytes: int, number: int, num_nodes: int) -> VersionShare:
    num_chunks = -(-layout.num_bytes // chunk_bytes)
    chunks = range(num_chunks * number // num_nodes, num_chunks * (number + 1) // num_nodes)
    served = range(chunks.start * chunk_bytes, min(chunks.stop * chunk_bytes, layout.num_bytes))
    pieces = [one for one in delta.pieces_of(layout) if one.start in served]
    end = max((one.start + one.num_elements * one.item_bytes for one in pieces), default=served.stop)
    return VersionShare(chunks, served, pieces, range(served.start, max(end, served.stop)))
