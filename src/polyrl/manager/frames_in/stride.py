"""A worker in its stride: frame after frame, the same leases go on, each where it stopped.

Most frames are so, and nothing in them concerns a sample by itself: it is enough to compare columns with what they must
be now. Their cells wait here, and are shared out among the samples' texts when somebody wants one of these, or when
many have come; how many there are is known without that. A frame that is anything else ends the stride and is taken in
row by row (intake.py).

Rules kept here: a stride takes only what row by row would be appended as a whole. Whoever looks at a text (payload.py)
ends its stride first, so nobody sees a text that lacks something.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from polyrl.scheduling.core.fleet import Worker
from polyrl.wire import columns
from polyrl.wire.columns import CELL_BYTES, Vocabulary
from polyrl.wire.frames import NewTokens

_MAX_FRAMES = 64
"""So many wait at most, to bound what sharing out takes at once."""
_U4: Any = np.dtype("<u4")
_CELLS: Any = np.dtype("<u8")


class StridingText(Protocol):
    stride: "Stride | None"
    row: int

    def add_settled(self, cells: bytes) -> None: ...


class Stride:
    def __init__(self, frame: NewTokens, texts: Sequence[StridingText], worker: Worker, max_tokens: int) -> None:
        """After a frame that was appended as a whole, a row a text: each row of the next goes on from it."""
        self._texts = texts
        self._leases = frame.leases
        self._versions = frame.versions
        self._offsets = _after(frame.offsets, frame.counts)
        self._room = max_tokens - max(columns.unpack_column("I", self._offsets))
        """Tokens until the first of the samples may be full."""
        self._standing = _standing(worker)
        self._counts: list[bytes] = []
        self._cells: list[bytes] = []
        self._is_over = False
        for row, text in enumerate(texts):
            text.stride, text.row = self, row

    def takes(self, frame: NewTokens, worker: Worker, vocabulary: Vocabulary) -> bool:
        """Whether the frame goes on as the last one did. If so, all of it is taken. Raises BadColumns."""
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
        self._offsets = _after(frame.offsets, frame.counts)
        self._counts.append(frame.counts)
        self._cells.append(frame.cells)
        if len(self._cells) == _MAX_FRAMES:
            self._share_out()
        return True

    def num_tokens(self, row: int) -> int:
        """Of the text in that row, with those that wait."""
        return int.from_bytes(self._offsets[4 * row : 4 * row + 4], "little")

    def end(self) -> None:
        """Its texts are whole now, and go on without it."""
        if not self._is_over:
            self._is_over = True
            for text in self._texts:
                text.stride = None
            self._share_out()

    def _share_out(self) -> None:
        """One piece a text, whatever the number of frames."""
        if not self._cells:
            return
        num = len(self._texts)
        counts: Any = np.frombuffer(b"".join(self._counts), _U4)
        cells: Any = np.frombuffer(b"".join(self._cells), _CELLS)
        rows = np.arange(len(counts), dtype=np.uint32) % num
        if num <= 1 << 16:
            rows = rows.astype(np.uint16)  # numbers of two bytes are sorted without comparing them
        by_text = cells[np.argsort(np.repeat(rows, counts), kind="stable")].tobytes()
        self._counts, self._cells = [], []
        start = 0
        for text, end in zip(self._texts, accumulate(counts.reshape(-1, num).sum(axis=0).tolist()), strict=True):
            text.add_settled(by_text[start * CELL_BYTES : end * CELL_BYTES])
            start = end


def _after(offsets: bytes, counts: bytes) -> bytes:
    """The sums of two columns. As one long number each: no sum needs a fifth byte, since no sample is that long."""
    return (int.from_bytes(offsets, "little") + int.from_bytes(counts, "little")).to_bytes(len(offsets), "little")


@lru_cache(maxsize=64)
def _tally(counts: bytes) -> tuple[int, int, int]:
    """The least, the most, and the bytes of all their cells. An engine decodes in lock step: few are not known yet."""
    numbers = columns.unpack_column("I", counts)
    return min(numbers), max(numbers), sum(numbers) * CELL_BYTES


def _standing(worker: Worker) -> tuple[int, int, int]:
    """Changes with a worker's version and with its leases: these are never reused, and the newest is the last."""
    return worker.version, len(worker.leases), next(reversed(worker.leases), -1)
