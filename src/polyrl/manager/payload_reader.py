"""Reading a run's payload again: the files of a killed manager become the tokens that it held.

Rows of tokens are many, and each concerns a few bytes. So they are gathered, as columns, until there are enough; then
the rows of each lease are brought together, and what goes on where its sample's tokens end, as nearly all does, is
added in one piece. The rest (repeated tokens, another version, a lease that ended before) is taken row by row.

Rules kept here: the order in the journal tells late rows from timely ones. A lease that ended, or was followed by
another of its sample, is closed at the row where that happened: later rows under it are dropped. Rows of groups that
the scheduler has forgotten are not even gathered.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from polyrl.errors import JournalError
from polyrl.ids import GroupId, SampleId, group_of
from polyrl.manager.calls import CallRecord
from polyrl.manager.notes import (
    AnyNote,
    CallKept,
    EpisodeKept,
    Granted,
    HostOpened,
    PromptsSupplied,
    RewardKept,
    RunOpened,
    SessionOpened,
    VersionOffered,
)
from polyrl.manager.payload import Payload, SampleTokens, append_cells
from polyrl.scheduling.scheduler import Scheduler
from polyrl.wire.columns import CELL_BYTES
from polyrl.wire.frames import Ended, NewTokens

_ROWS_A_LANE = 256
_MIN_ROWS = 1 << 16
_GATHERED_BYTES = 32 << 20
"""Rows go to their samples once there are this many per lease, or this many bytes in all: the cost is per lease."""
_MAX_SPAN = 1 << 23
"""Leases that are no further apart than this are found in a table, and others by bisection."""
_NEVER = 1 << 62
_COLUMNS = {"leases": "<u8", "offsets": "<u4", "counts": "<u4", "versions": "<i4", "cells": "<u8"}
_EMPTY = np.uint64((1 << 64) - 1)
"""Marks a missing cell: its token would be -1."""


class _Lane:
    """A lease, and which rows under its number count for its sample."""

    __slots__ = ("by", "closed_at", "from_token", "lease", "opened_at", "sample", "tokens")

    def __init__(
        self, lease: int, sample: SampleId, tokens: SampleTokens, from_token: int, by: tuple[str, str]
    ) -> None:
        self.lease, self.sample, self.tokens = lease, sample, tokens
        self.from_token, self.by = from_token, by
        """The first token's position, until its sample is known; its worker, and that worker's engine."""
        self.opened_at, self.closed_at = 0, _NEVER

    def begin(self) -> None:
        if self.from_token >= 0:
            self.tokens.lease_to(*self.by, self.from_token)
            self.from_token = -1

    def is_in_time(self, row: int) -> bool:
        return self.opened_at <= row < self.closed_at


class _Rows(NamedTuple):
    """Gathered rows, as columns, in the order in which they came."""

    lanes: Any
    """The place of its lease among those that are known; -1 for an unknown one."""
    offsets: Any
    counts: Any
    versions: Any
    cells: Any


class _Run(NamedTuple):
    """Rows of one lease and one version, and the cells of all of them, if each goes on from the last."""

    lane: int
    version: int
    first_row: int
    last_row: int
    offset: int
    """The first row's."""
    start: int
    end: int
    """Its cells' place among those of all runs."""
    goes_on: bool


class PayloadReader:
    """Rebuilds the payload of a run that was killed, from its journal."""

    def __init__(self, wanted: Container[GroupId]) -> None:
        """`wanted`: the groups whose payload may still be needed."""
        self._wanted = wanted
        self._payload = Payload()
        self._lanes: dict[int, _Lane] = {}
        """The open ones, by lease."""
        self._lane_of: dict[SampleId, _Lane] = {}
        """The newest of each sample."""
        self._engine_of: dict[str, str] = {}
        self._touched: dict[int, _Lane] = {}
        """Lanes that opened or closed since rows were shared out last."""
        self._parts: dict[str, list[bytes]] = {name: [] for name in _COLUMNS}
        self._num_rows = self._num_bytes = 0

    def _open(self, lease: int, number: int, from_token: int, worker: str) -> None:
        sample = SampleId(number)
        if lease in self._lanes or lease in self._touched:  # a manager started again, and says all that holds
            self._share_out()
        former = self._lanes.pop(lease, None)
        if former is not None and self._lane_of.get(former.sample) is former:
            del self._lane_of[former.sample]
        if group_of(sample) not in self._wanted:
            return
        if (before := self._lane_of.get(sample)) is not None:
            self._close(before)
        lane = _Lane(
            lease, sample, self._payload.tokens_of(sample), from_token, (worker, self._engine_of.get(worker, ""))
        )
        lane.opened_at = self._num_rows
        self._lanes[lease] = self._touched[lease] = self._lane_of[sample] = lane

    def _close(self, lane: _Lane) -> None:
        """Close a lane: later rows under it are late."""
        if self._lanes.get(lane.lease) is lane:
            del self._lanes[lane.lease]
            lane.closed_at = self._num_rows
            self._touched[lane.lease] = lane

    def tokens(self, frames: Sequence[NewTokens]) -> None:
        num_rows = self._num_rows
        _, *columns, ended = zip(*map(structs.astuple, frames), strict=True)
        if any(ended):  # the row at which a lease ends counts; most frames end none
            for frame in frames:
                self._num_rows += len(frame.leases) // 8
                self._end(frame.ended)
        for parts, pieces in zip(self._parts.values(), columns, strict=True):  # joined while they are still at hand
            parts.append(b"".join(pieces))
        num_rows += len(self._parts["leases"][-1]) // 8
        self._num_rows = num_rows
        self._num_bytes += len(self._parts["cells"][-1])
        enough = max(_MIN_ROWS, _ROWS_A_LANE * (len(self._lanes) + len(self._touched)))
        if num_rows > enough or self._num_bytes > _GATHERED_BYTES:
            self._share_out()

    def _end(self, ended: Sequence[Ended]) -> None:
        for one in ended:
            lane = self._lanes.get(one.lease)
            if lane is not None:
                self._close(lane)
                if one.reason in ("stop", "length"):
                    lane.tokens.finish = one.reason
                    if lane.tokens.calls:
                        lane.tokens.calls[-1].close(one.num_tokens, one.reason)

    def note(self, note: AnyNote) -> None:
        match note:
            case Granted():
                for lease in zip(note.leases, note.samples, note.from_tokens, note.workers, strict=True):
                    self._open(*lease)
            case PromptsSupplied():
                for prompt in note.prompts:
                    if (group := GroupId(prompt.group)) in self._wanted:
                        self._payload.prompts[group] = prompt
            case RewardKept():
                if group_of(SampleId(note.sample)) in self._wanted:
                    tokens = self._payload.tokens_of(SampleId(note.sample))
                    tokens.reward, tokens.parts = note.value, note.parts
            case VersionOffered():
                self._share_out()  # what the version has written so far keeps the digest that it had
                self._payload.offer(note)
            case SessionOpened():
                self._engine_of[note.facts.name] = note.facts.engine
            case CallKept() | EpisodeKept():
                self._note_of_episode(note)
            case RunOpened() | HostOpened():
                pass

    def _note_of_episode(self, note: CallKept | EpisodeKept) -> None:
        sample = SampleId(note.sample)
        if group_of(sample) not in self._wanted:
            return
        tokens = self._payload.tokens_of(sample)
        num_calls = note.number if isinstance(note, CallKept) else note.num_calls
        if note.is_cut:
            self._share_out()  # some of what came before goes
            tokens.cut(num_calls, note.num_tokens)
        del tokens.calls[num_calls:]
        if isinstance(note, EpisodeKept):
            tokens.end_episode(note.finish, note.reward, note.parts, note.untrained)
        else:
            prompt = (note.base, note.kept, note.tokens)
            tokens.calls.append(CallRecord(*prompt, note.start, note.max_tokens, note.stop_ids, note.stop))

    def finish(self, scheduler: Scheduler | None) -> Payload:
        """Return the payload, with the groups of every open step."""
        self._share_out()
        for group in {} if scheduler is None else scheduler.desk.groups.values():
            self._payload.expect(group.step, group.id)
        return self._payload

    # Sharing out what was gathered

    def _share_out(self) -> None:
        """Give every sample its rows, lease by lease: of two leases of a sample, the older has the smaller number."""
        lanes = {**self._lanes, **self._touched} if self._num_rows else self._touched
        in_order = [lanes[lease] for lease in sorted(lanes)]
        if self._num_rows and in_order:
            rows = _columns_of(self._parts, [lane.lease for lane in in_order])
            runs, cells = _runs_of(rows)
            self._add(in_order, rows, runs, cells)
        for lane in in_order:
            lane.begin()
        for lane in self._touched.values():
            lane.opened_at = 0
        self._parts = {name: [] for name in _COLUMNS}
        self._touched, self._num_rows, self._num_bytes = {}, 0, 0

    def _add(self, lanes: Sequence[_Lane], rows: _Rows, runs: Sequence[_Run], cells: memoryview) -> None:
        new = [place for place, lane in enumerate(lanes) if lane.from_token >= 0]
        new.append(len(lanes))
        num_begun = 0
        odd: dict[int, list[int]] | None = None
        for place, version, first_row, last_row, offset, start, end, goes_on in runs:
            while new[num_begun] <= place:
                lanes[new[num_begun]].begin()
                num_begun += 1
            lane = lanes[place]
            tokens = lane.tokens
            in_time = lane.opened_at <= first_row and last_row < lane.closed_at
            if goes_on and in_time and offset == tokens.num_tokens:
                if version != tokens.version:
                    tokens.begin_segment(version)
                tokens.add_settled(cells[start:end])
            else:
                odd = _rows_by_lane(rows) if odd is None else odd
                _add_one_by_one(lane, rows, odd.pop(place, ()))


def _columns_of(parts: Mapping[str, Sequence[bytes]], leases: Sequence[int]) -> _Rows:
    """Return all rows, with the place of each one's lease among `leases`, which rise."""
    columns: list[Any] = [np.frombuffer(b"".join(parts[name]), kind) for name, kind in _COLUMNS.items()]
    under, offsets, counts, versions, cells = columns
    if not len(under) == len(offsets) == len(counts) == len(versions) or counts.sum(dtype=np.int64) != len(cells):
        raise JournalError("the payload has tokens whose columns do not fit each other")
    known: Any = np.array(leases, np.uint64)
    return _Rows(_places_of(under, known), offsets.astype(np.int64), counts.astype(np.int64), versions, cells)


def _places_of(under: Any, leases: Any) -> Any:
    """Return the place of each number among the leases; -1 for a number that is none of them."""
    span = int(leases[-1] - leases[0]) + 1
    if span > _MAX_SPAN:
        places = np.minimum(np.searchsorted(leases, under), len(leases) - 1)
        return np.where(leases[places] == under, places, -1)
    table = np.full(span + 1, -1, np.int64)
    table[(leases - leases[0]).view(np.int64)] = np.arange(len(leases))
    which = under - leases[0]  # what is below the first wraps to far above the last
    if len(which) and which.max() >= span:
        which = np.minimum(which, np.uint64(span))
    return table[which.view(np.int64)]


def _runs_of(rows: _Rows) -> tuple[list[_Run], memoryview]:
    """Return the run of each lease and version, leases and versions rising, and the cells of all runs.

    A row says where in its sample it belongs, so its cells are put there at once. A run with a place left empty has
    rows that overlap, or that miss some between them.
    """
    keys, versions = _keys_of(rows)
    numbers = np.arange(len(keys))
    known = keys >= 0
    if not known.all():
        cells = rows.cells[np.repeat(known, rows.counts)]
        rows = _Rows(rows.lanes[known], rows.offsets[known], rows.counts[known], rows.versions[known], cells)
        keys, numbers = keys[known], numbers[known]
    brought = _sums_by(keys, rows.counts)
    ends = np.cumsum(brought)
    begins = ends - brought
    firsts, lasts = np.zeros(len(brought), np.int64), np.zeros(len(brought), np.int64)
    firsts[keys[::-1]] = np.arange(len(keys))[::-1]  # of those that are put into one place, the last stays
    lasts[keys] = numbers
    offsets = rows.offsets[firsts] if len(keys) else firsts
    within = rows.offsets - offsets[keys]
    strays = (within < 0) | (within + rows.counts > brought[keys])
    places = within + begins[keys]
    goes_on = np.ones(len(brought), bool)
    if strays.any():
        goes_on[keys[strays]] = False
        places = np.where(goes_on[keys], places, begins[keys])
    tokens: Any = np.full(len(rows.cells), _EMPTY)
    tokens[_each_cell(places, rows.counts, len(tokens))] = rows.cells
    goes_on[np.searchsorted(ends, np.flatnonzero(tokens == _EMPTY), side="right")] = False
    present = np.flatnonzero(brought)
    firsts, lasts = numbers[firsts[present]], lasts[present]
    lanes, goes_on = present // len(versions), goes_on[present]
    again = lanes[1:][
        (lanes[1:] == lanes[:-1]) & (firsts[1:] < lasts[:-1])
    ]  # a version that came between two of another
    goes_on[np.isin(lanes, again)] = False
    columns = (
        lanes,
        versions[present % len(versions)],
        firsts,
        lasts,
        *(one[present] for one in (offsets, begins * CELL_BYTES, ends * CELL_BYTES)),
        goes_on,
    )
    return list(map(_Run, *(one.tolist() for one in columns))), memoryview(tokens).cast("B")


def _keys_of(rows: _Rows) -> tuple[Any, Any]:
    """Return a number for each row's lease and version, in their order, -1 for an unknown lease; and the versions."""
    least = int(rows.versions.min())
    if least == int(rows.versions.max()):  # nearly always
        return rows.lanes, np.array([least])
    versions, which = np.unique(rows.versions, return_inverse=True)
    return np.where(rows.lanes < 0, -1, rows.lanes * len(versions) + which), versions


def _sums_by(keys: Any, counts: Any) -> Any:
    """Return the sum of the counts of each key."""
    if _are_equal(counts):
        return np.bincount(keys) * (counts[0] if len(counts) else 0)
    return np.bincount(keys, counts).astype(np.int64)


def _are_equal(counts: Any) -> bool:
    """Say whether all rows have as many cells: engines decode in lock step."""
    return not len(counts) or counts.min() == counts.max()


def _each_cell(begins: Any, counts: Any, most: int) -> Any:
    """Return the place of each cell. Rows that overlap may claim places beyond the end."""
    if len(counts) and _are_equal(counts):
        cells = begins if counts[0] == 1 else (begins[:, None] + np.arange(counts[0])).ravel()
    else:
        cells = np.repeat(begins - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
    return np.minimum(cells, most - 1) if len(cells) and cells.max() >= most else cells


def _rows_by_lane(rows: _Rows) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for row, lane in enumerate(rows.lanes.tolist()):
        found.setdefault(lane, []).append(row)
    return found


def _add_one_by_one(lane: _Lane, rows: _Rows, numbers: Sequence[int]) -> None:
    ends = np.cumsum(rows.counts)
    for row in numbers:
        if lane.is_in_time(row):
            cells = rows.cells[ends[row] - rows.counts[row] : ends[row]].tobytes()
            append_cells(lane.tokens, int(rows.offsets[row]), int(rows.versions[row]), cells)
