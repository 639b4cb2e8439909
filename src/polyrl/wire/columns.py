"""Tokens on the wire and in memory: cells of eight bytes, a token id (int32) and its log-probability (float32).

A frame carries the new cells of many samples as one column, with columns of leases, offsets, counts and versions beside
it (little endian). There is no object a token anywhere: cells are appended to a sample's buffer by slice, journalled as
they came, and read as numpy views.

Rules kept here: nothing of a frame is believed before `check` has seen it. Columns fit each other, every count is at
least 1, token ids are not negative, log-probabilities are finite and not above 0 (by more than rounding).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

CELL_BYTES = 8
CELL: Any = np.dtype([("token", "<i4"), ("logprob", "<f4")])
TOKEN_IDS: Any = np.dtype("<i4")
MAX_LOGPROB = 1e-3
"""Rounding in an engine's softmax may lift a certain token's log-probability a little above 0."""


class BadColumns(ValueError):
    """A frame that cannot be true. The message says what is wrong with it, in a line."""


class Entry(NamedTuple):
    """What a frame brings of one lease: so many cells, from this byte of its column to that one."""

    lease: int
    offset: int
    """Tokens of the sample before these."""
    count: int
    version: int
    start: int
    end: int


def pack_cells(tokens: Sequence[int], logprobs: Sequence[float]) -> bytes:
    cells = np.empty(len(tokens), CELL)
    cells["token"] = tokens
    cells["logprob"] = logprobs
    return cells.tobytes()


def view_cells(cells: bytes | bytearray | memoryview) -> Any:
    """Fields `token` and `logprob`, without a copy. While it is held, a bytearray cannot grow."""
    return np.frombuffer(cells, CELL)


def tokens_of(cells: bytes | bytearray | memoryview) -> bytes:
    """The token ids alone, packed."""
    return view_cells(cells)["token"].tobytes()


def pack_tokens(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, TOKEN_IDS).tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    return np.frombuffer(packed, TOKEN_IDS).tolist()


def pack_column(kind: str, numbers: Sequence[int]) -> bytes:
    return np.asarray(numbers, kind).tobytes()


def check(leases: bytes, offsets: bytes, counts: bytes, versions: bytes, cells: bytes) -> list[Entry]:
    """Read and check the columns of a frame. Raises BadColumns."""
    if len(leases) % 8 or len(cells) % CELL_BYTES:
        raise BadColumns("a column ends inside a number")
    num = len(leases) // 8
    if not len(offsets) == len(counts) == len(versions) == 4 * num:
        raise BadColumns(f"columns of {num} leases do not fit each other")
    ends = np.cumsum(np.frombuffer(counts, "<u4"), dtype=np.int64)
    if (int(ends[-1]) if num else 0) * CELL_BYTES != len(cells):
        raise BadColumns("the counts do not add up to the cells")
    check_cells(cells)
    count_list = np.frombuffer(counts, "<u4").tolist()
    if 0 in count_list:
        raise BadColumns("a lease without a token")
    end_list = (ends * CELL_BYTES).tolist()
    start_list = [0, *end_list[:-1]]
    return list(
        map(
            Entry,
            np.frombuffer(leases, "<u8").tolist(),
            np.frombuffer(offsets, "<u4").tolist(),
            count_list,
            np.frombuffer(versions, "<i4").tolist(),
            start_list,
            end_list,
        )
    )


def check_cells(cells: bytes) -> None:
    """Raises BadColumns if a token or a log-probability cannot be one."""
    if not cells:
        return
    view = view_cells(cells)
    if int(view["token"].min()) < 0:
        raise BadColumns("a token id below 0")
    worst = float(view["logprob"].max())  # NaN if any is NaN
    if not worst <= MAX_LOGPROB or float(view["logprob"].min()) == -np.inf:
        raise BadColumns("a log-probability that is not a number from -infinity (excluded) to 0")
