"""Tokens on the wire and in memory: cells of eight bytes, a token id (int32) and its log-probability (float32).

A frame carries the new cells of many samples as one column, with columns of leases, offsets, counts and versions beside
it (little endian). There is no object a token anywhere: cells are appended to a sample's buffer by slice, journalled as
they came, and read as numpy views.

Rules kept here: nothing of a frame is believed before `check` and `check_cells` have seen it. Columns fit each other,
every count is at least 1, token ids are of the run's vocabulary, log-probabilities are what those of a drawn token can
be: not above 0 (by more than rounding), and not below `MIN_LOGPROB`.
"""

import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import numpy as np

CELL_BYTES = 8
PIECE_BYTES = 4 << 20
"""Lists without a bound (orders, the samples of a group, prompts) travel in pieces of about this size: a frame
has a limit (frames.py), and its reader holds all of it twice for a moment."""
Item = TypeVar("Item")
CELL: Any = np.dtype([("token", "<i4"), ("logprob", "<f4")])
TOKEN_IDS: Any = np.dtype("<i4")
_UNSIGNED: Any = np.dtype("<u4")
if sys.byteorder != "little":
    raise ImportError("columns are little endian, and read as they are: this machine is not")

_pack_cell = struct.Struct("<if").pack
_least, _most = np.minimum.reduce, np.maximum.reduce
"""As `min` and `max` of an array, without what these do in Python first: half of their time where a frame is small."""
_FEW = 8
"""Up to this number of cells, numpy takes longer to start than it saves."""
_FEW_CELLS = 160
"""Up to this number, ids are compared with a vocabulary by their bytes."""

MAX_LOGPROB = 1e-3
"""Rounding in an engine's softmax may lift a certain token's log-probability a little above 0."""
MIN_LOGPROB = -100.0
"""A token of probability e^-100 is never drawn: not once in all tokens that were ever generated."""
_SURELY_GOOD = bytes([*range(struct.pack("<f", MAX_LOGPROB)[3]), *range(0x80, struct.pack("<f", MIN_LOGPROB)[3])])
"""The highest byte (sign and most of the exponent) of log-probabilities that are surely between the two."""
ANY_ID = 1 << 31
"""The size of a vocabulary that is not known: ids have four bytes and no sign."""


class BadColumns(ValueError):
    """A frame that cannot be true. The message says what is wrong with it, in a line."""


class Columns(NamedTuple):
    """The rows of a frame, a list a column. `ends` are the bytes at which each row's cells end."""

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
    """Return the token ids alone, packed."""
    return view_cells(cells)["token"].tobytes()


def pack_tokens(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, TOKEN_IDS).tobytes()


def unpack_tokens(packed: bytes) -> list[int]:
    return np.frombuffer(packed, TOKEN_IDS).tolist()


def view_tokens(packed: bytes) -> Any:
    """Token ids, without a copy."""
    return np.frombuffer(packed, TOKEN_IDS)


def pack_column(kind: str, numbers: Sequence[int]) -> bytes:
    return np.asarray(numbers, kind).tobytes()


def unpack_column(kind: str, packed: bytes) -> list[int]:
    """Numbers of a format of `struct`. For the few that a frame has, this is five times as fast as numpy."""
    return memoryview(packed).cast(kind).tolist()  # type: ignore[call-overload]


def check(leases: bytes, offsets: bytes, counts: bytes, versions: bytes, cells: bytes) -> Columns:
    """Read the columns of a frame, and check that they fit each other. `check_cells` checks the content of cells.

    Raises BadColumns.
    """
    if len(leases) % 8 or len(cells) % CELL_BYTES:
        raise BadColumns(
            f"columns of {len(leases)} and {len(cells)} bytes; expected eight a number: one ends inside a number"
        )
    num = len(leases) // 8
    if not len(offsets) == len(counts) == len(versions) == 4 * num:
        raise BadColumns(f"columns that do not fit each other; expected {num} numbers in each")
    num_tokens = unpack_column("I", counts)
    ends = [CELL_BYTES * end for end in accumulate(num_tokens)]
    if (ends[-1] if num else 0) != len(cells):
        raise BadColumns(
            f"counts that add up to {sum(num_tokens)}; expected {len(cells) // CELL_BYTES}, as there are cells"
        )
    if 0 in num_tokens:
        raise BadColumns("a lease without a token; expected one at least")
    return Columns(
        unpack_column("Q", leases), unpack_column("I", offsets), num_tokens, unpack_column("i", versions), ends
    )


class Vocabulary:
    """Token ids from 0 to `size` - 1, and how those of a frame are compared with it in little time."""

    def __init__(self, size: int = ANY_ID) -> None:
        self.size = size
        self._place = (max(1, size - 1).bit_length() - 1) // 8
        """The place of the highest byte that an id can use; the bytes above it are 0."""
        self._surely_below = bytes(range(size >> 8 * self._place))
        """Values of that byte by which an id is surely below the size. With another one, ids are compared whole."""
        self._empty = tuple(range(self._place + 1, 4))

    def holds(self, cells: bytes) -> bool:
        """Return whether all ids of these cells are its own. Numpy takes longer than bytes do where cells are few."""
        if len(cells) > _FEW_CELLS * CELL_BYTES or cells[self._place :: CELL_BYTES].translate(None, self._surely_below):
            return bool(_most(np.frombuffer(cells, _UNSIGNED)[::2]) < self.size)  # below 0 is a large number here
        for place in self._empty:  # noqa: SIM110  a generator takes twice as long
            if cells[place::CELL_BYTES].strip(b"\0"):
                return False
        return True


ANY_VOCABULARY = Vocabulary()


def check_cells(cells: bytes, vocabulary: Vocabulary) -> None:
    """Raises BadColumns if a token or a log-probability cannot be one."""
    if not vocabulary.holds(cells):
        raise BadColumns(why_no_ids(view_cells(cells)["token"], vocabulary.size))
    if cells[7::CELL_BYTES].translate(None, _SURELY_GOOD) and (why := why_no_logprobs(view_cells(cells)["logprob"])):
        raise BadColumns(why)


def why_no_ids(tokens: "np.ndarray[Any, Any]", size: int) -> str:
    """Return why some of these tokens, at least one, are not ids of a vocabulary of this size; empty if all are."""
    least, most = int(_least(tokens)), int(_most(tokens))
    if least >= 0 and most < size:
        return ""
    wrong = least if least < 0 else most
    if size == ANY_ID:
        return f"token id {wrong}; expected 0 or more"
    return f"token id {wrong}; expected 0 to {size - 1}, the vocabulary's"


def why_no_logprobs(logprobs: "np.ndarray[Any, Any]") -> str:
    """Why some of these, of which there is at least one, are no log-probabilities of drawn tokens; or empty."""
    least, most = float(_least(logprobs)), float(_most(logprobs))  # NaN if any is NaN
    if most <= MAX_LOGPROB and least >= MIN_LOGPROB:
        return ""
    return f"a log-probability of {least if not least >= MIN_LOGPROB else most:g}, expected {MIN_LOGPROB:g} to 0"


def in_pieces(
    items: Iterable[Item], num_bytes_of: Callable[[Item], int], piece_bytes: int = PIECE_BYTES
) -> Iterator[tuple[Item, ...]]:
    """Split items, in order, into pieces of one or more; none exceeds `piece_bytes` by more than its last item."""
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
