"""A worker's leases and what each has brought: what was sent, what is safe, what must be sent again.

    engine's news --> cells of a lease --> NewTokens frames, by offset --> acknowledged by number
                                  ^                    |
                                  +---- a break: back to what the manager says it has

Pure: no clock, no sockets. A lease is kept until its end is acknowledged; then the manager has all of it on file.
"""

from collections.abc import Iterable, Sequence

from polyrl.ids import LeaseId
from polyrl.wire import columns
from polyrl.wire.columns import CELL_BYTES
from polyrl.wire.frames import Ended, EndReason, HeldLease, NewTokens

_MAX_CELLS_A_FRAME = 1 << 20
_MAX_ENDS_A_FRAME = 512
"""Each may come with a text. With as many cells, a frame stays below what a manager takes."""


class _Stream:
    __slots__ = ("base", "cells", "detail", "end", "end_seq", "num_sent", "runs")

    def __init__(self, base: int) -> None:
        self.base = base
        """Tokens of the sample before this lease."""
        self.cells = bytearray()
        self.num_sent = 0
        """Tokens of this lease."""
        self.runs: list[tuple[int, int]] = []
        """(from this token of the lease, that version wrote)."""
        self.end: EndReason | None = None
        self.detail = ""
        self.end_seq: int | None = None
        """The number of the frame that reported the end."""

    @property
    def num_made(self) -> int:
        return len(self.cells) // CELL_BYTES


class LeaseBook:
    def __init__(self) -> None:
        self._streams: dict[LeaseId, _Stream] = {}
        self._changed: dict[LeaseId, None] = {}
        """Leases with something to send."""
        self._seq = 0
        self.num_tokens = 0
        """Made since the book was opened."""

    def __contains__(self, lease: LeaseId) -> bool:
        return lease in self._streams

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, lease: LeaseId, num_so_far: int) -> None:
        self._streams[lease] = _Stream(num_so_far)

    def running(self) -> list[LeaseId]:
        return [lease for lease, stream in self._streams.items() if stream.end is None]

    def add(self, lease: LeaseId, tokens: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        stream = self._streams.get(lease)
        if stream is None or stream.end is not None:
            return
        if not stream.runs or stream.runs[-1][1] != version:
            stream.runs.append((stream.num_made, version))
        stream.cells += columns.pack_cells(tokens, logprobs)
        self.num_tokens += len(tokens)
        self._changed[lease] = None

    def end(self, lease: LeaseId, reason: EndReason, detail: str = "") -> None:
        stream = self._streams.get(lease)
        if stream is None or stream.end is not None:
            return
        stream.end, stream.detail = reason, detail[:2000]
        self._changed[lease] = None

    def drop(self, lease: LeaseId) -> bool:
        """Forget a lease, wherever it stands. Whether there was one."""
        self._changed.pop(lease, None)
        return self._streams.pop(lease, None) is not None

    def clear(self) -> list[LeaseId]:
        """Forget everything; returns the leases that still ran."""
        running = self.running()
        self._streams, self._changed, self._seq = {}, {}, 0
        return running

    def take_frame(self) -> NewTokens | None:
        """Return the next frame to send, or None when nothing is left to say."""
        if not self._changed:
            return None
        self._seq += 1
        leases: list[int] = []
        offsets: list[int] = []
        counts: list[int] = []
        versions: list[int] = []
        cells: list[bytes] = []
        ended: list[Ended] = []
        room = _MAX_CELLS_A_FRAME
        for lease in list(self._changed):
            stream = self._streams[lease]
            for start, stop, version in _unsent(stream, room):
                leases.append(lease)
                offsets.append(stream.base + start)
                counts.append(stop - start)
                versions.append(version)
                cells.append(bytes(stream.cells[start * CELL_BYTES : stop * CELL_BYTES]))
                stream.num_sent = stop
                room -= stop - start
            if stream.num_sent < stream.num_made or len(ended) == _MAX_ENDS_A_FRAME:
                break
            if stream.end is not None:
                stream.end_seq = self._seq
                ended.append(Ended(lease, stream.base + stream.num_made, stream.end, stream.detail))
            del self._changed[lease]
        return NewTokens(
            self._seq,
            columns.pack_column("<u8", leases),
            columns.pack_column("<u4", offsets),
            columns.pack_column("<u4", counts),
            columns.pack_column("<i4", versions),
            b"".join(cells),
            tuple(ended),
        )

    def acknowledge(self, seq: int) -> None:
        """Note that all frames up to this one are safe: leases that ended in them are over."""
        over = [one for one, stream in self._streams.items() if stream.end_seq is not None and stream.end_seq <= seq]
        for lease in over:
            self.drop(lease)

    def hello(self) -> bytes:
        """Return the leases that we hold, packed."""
        return columns.pack_column("<u8", list(self._streams))

    def welcome(self, held: Iterable[HeldLease]) -> list[LeaseId]:
        """Go back to what the manager has. Returns the running leases that are over for it."""
        has = {LeaseId(one.lease): one.num_tokens for one in held}
        over = [lease for lease in self._streams if lease not in has]
        was_running = [lease for lease in over if self._streams[lease].end is None]
        for lease in over:
            self.drop(lease)
        for lease, stream in self._streams.items():
            stream.num_sent = min(stream.num_made, max(0, has[lease] - stream.base))
            stream.end_seq = None
            if stream.num_sent < stream.num_made or stream.end is not None:
                self._changed[lease] = None
        return was_running


def _unsent(stream: _Stream, most: int) -> list[tuple[int, int, int]]:
    """Return (from, to, version) of what is to be sent, in tokens of the lease; no more than `most` of them."""
    last = stream.num_sent + most
    parts: list[tuple[int, int, int]] = []
    for number, (start, version) in enumerate(stream.runs):
        stop = stream.runs[number + 1][0] if number + 1 < len(stream.runs) else stream.num_made
        start, stop = max(start, stream.num_sent), min(stop, last)
        if start < stop:
            parts.append((start, stop, version))
    return parts
