"""Tokens on the wire and in memory: cells of eight bytes, a token id (int32) and its log-probability (float32).

A frame carries the new cells of many samples as one column, with columns of leases, offsets, counts and versions beside
it (little endian). There is no object a token anywhere: cells are appended to a sample's buffer by slice, journalled as
they came, and read as numpy views.

Rules kept here: nothing of a frame is believed before `check` has seen it. Columns fit each other, every count is at
least 1, token ids are not negative, log-probabilities are finite and not above 0 (by more than rounding).
"""

import struct
import sys
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

CELL_BYTES = 8
CELL: Any = np.dtype([("token", "<i4"), ("logprob", "<f4")])
TOKEN_IDS: Any = np.dtype("<i4")
if sys.byteorder != "little":
    raise ImportError("columns are little endian, and read as they are: this machine is not")

_pack_cell = struct.Struct("<if").pack
_least, _most = np.minimum.reduce, np.maximum.reduce
"""As `min` and `max` of an array, without what these do in Python first: half of their time where a frame is small."""
_FEW = 8
"""Up to so many cells, numpy takes longer to begin than it saves."""

MAX_LOGPROB = 1e-3
"""Rounding in an engine's softmax may lift a certain token's log-probability a little above 0."""
_SURELY_GOOD = bytes([*range(struct.pack("<f", MAX_LOGPROB)[3]), *range(0x80, 0xFF)])
"""The highest byte (sign and most of the exponent) of log-probabilities that are finite and surely below the most."""


class BadColumns(ValueError):
    """A frame that cannot be true. The message says what is wrong with it, in a line."""


class Columns(NamedTuple):
    """What a frame brings, by lease: so many cells after `offsets` tokens, up to this byte of the column of cells."""

    leases: list[int]
    offsets: list[int]
    """Tokens of the sample before these."""
    counts: list[int]
    versions: list[int]
    ends: list[int]


def pack_cells(tokens: Sequence[int], logprobs: Sequence[float]) -> bytes:
    if len(tokens) == len(logprobs) <= _FEW:
        return b"".join(map(_pack_cell, tokens, logprobs))
    cells: Any = np.empty(len(tokens), CELL)
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


def unpack_column(kind: str, packed: bytes) -> list[int]:
    """Numbers of a format of `struct`. For the few that a frame has, this is five times as fast as numpy."""
    return memoryview(packed).cast(kind).tolist()  # type: ignore[call-overload]


def check(leases: bytes, offsets: bytes, counts: bytes, versions: bytes, cells: bytes) -> Columns:
    """Read and check the columns of a frame. Raises BadColumns."""
    if len(leases) % 8 or len(cells) % CELL_BYTES:
        raise BadColumns("a column ends inside a number")
    num = len(leases) // 8
    if not len(offsets) == len(counts) == len(versions) == 4 * num:
        raise BadColumns(f"columns of {num} leases do not fit each other")
    num_tokens = unpack_column("I", counts)
    ends = [CELL_BYTES * end for end in accumulate(num_tokens)]
    if (ends[-1] if num else 0) != len(cells):
        raise BadColumns("the counts do not add up to the cells")
    if 0 in num_tokens:
        raise BadColumns("a lease without a token")
    check_cells(cells)
    return Columns(
        unpack_column("Q", leases), unpack_column("I", offsets), num_tokens, unpack_column("i", versions), ends
    )


def check_cells(cells: bytes) -> None:
    """Raises BadColumns if a token or a log-probability cannot be one."""
    signs, highest = cells[3::CELL_BYTES], cells[7::CELL_BYTES]  # of either, the byte with its sign
    if signs.isascii() and not highest.translate(None, _SURELY_GOOD):
        return  # nearly always; also when there are none. Numpy takes five times as long for the few of a frame
    view = view_cells(cells)
    logprobs = view["logprob"]
    if _least(view["token"]) < 0:
        raise BadColumns("a token id below 0")
    worst = float(_most(logprobs))  # NaN if any is NaN
    if not worst <= MAX_LOGPROB or _least(logprobs) == -np.inf:
        raise BadColumns("a log-probability that is not a number from -infinity (excluded) to 0")
