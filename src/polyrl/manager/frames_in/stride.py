"""A fast path for most frames of tokens: those in which the same leases go on, each where it stopped.

Nothing in such a frame concerns a single sample, so it is enough to compare its columns with their expected values. Its
cells wait here, and are shared out among the samples when one of these is read, or when many frames have come; the
number of tokens is known without that. Any other frame ends the stride and is taken in row by row (intake.py).

Rules kept here: a stride takes only frames that would be appended as a whole row by row. Reading a sample's tokens
(payload.py) ends its stride first, so that none are missing.

docs/results/relay.md has what it saves.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from polyrl.scheduling.core.fleet import Worker
from polyrl.wire import columns
from polyrl.wire.columns import CELL_BYTES, Vocabulary
from polyrl.wire.frames import NewTokens

if TYPE_CHECKING:
    from polyrl.manager.payload import SampleTokens

_MAX_FRAMES = 64
"""The most frames that wait, to bound the time that sharing them out takes."""
_U4: Any = np.dtype("<u4")
_CELLS: Any = np.dtype("<u8")


class Stride:
    def __init__(self, frame: NewTokens, all_tokens: "Sequence[SampleTokens]", worker: Worker, max_tokens: int) -> None:
        """Begin after a frame that was appended as a whole, one row for each sample. Its next frame has the same
        rows."""
        self._samples = all_tokens
        self._leases = frame.leases
        self._versions = frame.versions
        self._offsets = _after(frame.offsets, frame.counts)
        self._room = max_tokens - max(columns.unpack_column("I", self._offsets))
        """Tokens until the first of the samples reaches its cap."""
        self._numbers: list[int] | None = None
        """The offsets; made when the first one is asked for."""
        self._standing = _standing(worker)
        self._counts: list[bytes] = []
        self._cells: list[bytes] = []
        self._is_over = False
        for row, tokens in enumerate(all_tokens):
            tokens.stride, tokens.row = self, row

    def takes(self, frame: NewTokens, worker: Worker, vocabulary: Vocabulary) -> bool:
        """Take a frame that goes on as the last one did. Returns whether it does. Raises BadColumns."""
        if (
            self._is_over
            or frame.ended
            or frame.leases != self._leases
            or frame.offsets != self._offsets
            or frame.versions != self._versions
            or len(frame.counts) != len(frame.offsets)
            or self._standing != _standing(worker)
        ):
            return False
        least, most, num_bytes = _tally(frame.counts)
        if least == 0 or most > self._room or num_bytes != len(frame.cells):
            return False
        columns.check_cells(frame.cells, vocabulary)
        self._room -= most
        self._offsets, self._numbers = _after(frame.offsets, frame.counts), None
        self._counts.append(frame.counts)
        self._cells.append(frame.cells)
        if len(self._cells) == _MAX_FRAMES:
            self._share_out()
        return True

    def num_tokens(self, row: int) -> int:
        """Return the number of tokens of a row's sample, with those that wait. Where one row is asked for, all are."""
        if self._numbers is None:
            self._numbers = columns.unpack_column("I", self._offsets)
        return self._numbers[row]

    def end(self) -> None:
        """End the stride: its samples are whole, and go on without it."""
        if not self._is_over:
            self._is_over = True
            for tokens in self._samples:
                tokens.stride = None
            self._share_out()

    def _share_out(self) -> None:
        """Add the waiting cells to their samples, one piece each."""
        if not self._cells:
            return
        num = len(self._samples)
        counts: Any = np.frombuffer(b"".join(self._counts), _U4)
        cells: Any = np.frombuffer(b"".join(self._cells), _CELLS)
        rows = np.arange(len(counts), dtype=np.uint32) % num
        if num <= 1 << 16:
            rows = rows.astype(np.uint16)  # numbers of two bytes are sorted without comparing them
        by_sample = cells[np.argsort(np.repeat(rows, counts), kind="stable")].tobytes()
        self._counts, self._cells = [], []
        start = 0
        for tokens, end in zip(self._samples, accumulate(counts.reshape(-1, num).sum(axis=0).tolist()), strict=True):
            tokens.add_settled(by_sample[start * CELL_BYTES : end * CELL_BYTES])
            start = end


def _after(offsets: bytes, counts: bytes) -> bytes:
    """Return the sums of two columns, each as one long number: no sum overflows, since no sample is that long."""
    return (int.from_bytes(offsets, "little") + int.from_bytes(counts, "little")).to_bytes(len(offsets), "little")


@lru_cache(maxsize=64)
def _tally(counts: bytes) -> tuple[int, int, int]:
    """Return the smallest, the largest, and the bytes of all cells. Cached: engines decode in lock step."""
    numbers = columns.unpack_column("I", counts)
    return min(numbers), max(numbers), sum(numbers) * CELL_BYTES


def _standing(worker: Worker) -> tuple[int, int, int]:
    """Return a value that changes with a worker's version and leases: these are never reused, the newest is last."""
    return worker.version, len(worker.leases), next(reversed(worker.leases), -1)
