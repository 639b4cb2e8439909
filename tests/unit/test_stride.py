"""Frames that go on from each other are taken by their columns; what comes of it is what row by row would give."""

import random

import pytest
from msgspec import structs
from tests.unit.test_payload import tokens_in

from polyrl.ids import Incarnation, LeaseId, SampleId, Version, WorkerName
from polyrl.manager.frames_in.stride import Stride
from polyrl.manager.payload import SampleTokens, append_cells
from polyrl.scheduling.core.fleet import Worker
from polyrl.wire import columns
from polyrl.wire.columns import ANY_VOCABULARY, CELL_BYTES, BadColumns
from polyrl.wire.frames import Ended, NewTokens

MAX_TOKENS = 1000


def seated(leases: list[int]) -> Worker:
    held = {LeaseId(one): SampleId(100 + one) for one in leases}
    return Worker(
        0, WorkerName("a"), Incarnation(1), len(leases), False, False, 1, 0, 0.0, version=Version(3), leases=held
    )


def frame_of(leases: list[int], offsets: list[int], counts: list[int], first_token: int = 0) -> NewTokens:
    num = sum(counts)
    return NewTokens(
        1,
        columns.pack_column("<u8", leases),
        columns.pack_column("<u4", offsets),
        columns.pack_column("<u4", counts),
        columns.pack_column("<i4", [3] * len(leases)),
        columns.pack_cells(range(first_token, first_token + num), [-0.5] * num),
    )


class Rows:
    """Samples on one worker, taken in by a stride, and row by row beside it."""

    def __init__(self, num: int) -> None:
        self.leases = list(range(1, num + 1))
        self.texts = [SampleTokens() for _ in self.leases]
        self.plain = [SampleTokens() for _ in self.leases]
        self.worker = seated(self.leases)
        first = self.frame([1] * num)
        self.append(first, self.texts)
        self.stride = Stride(first, self.texts, self.worker, MAX_TOKENS)
        self.append(first, self.plain)

    def frame(self, counts: list[int]) -> NewTokens:
        offsets = [text.num_tokens for text in self.plain]
        return frame_of(self.leases, offsets, counts, sum(offsets))

    def append(self, frame: NewTokens, texts: list[SampleTokens]) -> None:
        start = 0
        offsets, counts = (columns.unpack_column("I", one) for one in (frame.offsets, frame.counts))
        for text, offset, count in zip(texts, offsets, counts, strict=True):
            end = start + count * CELL_BYTES
            assert append_cells(text, offset, 3, frame.cells[start:end]) == count
            start = end

    def go_on(self, counts: list[int]) -> None:
        frame = self.frame(counts)
        assert self.stride.takes(frame, self.worker, ANY_VOCABULARY)
        self.append(frame, self.plain)

    def check(self) -> None:
        assert [one.num_tokens for one in self.texts] == [one.num_tokens for one in self.plain]
        assert [tokens_in(one) for one in self.texts] == [tokens_in(one) for one in self.plain]


@pytest.mark.parametrize("seed", range(10))
def test_texts_are_what_row_by_row_would_give(seed):
    rng = random.Random(seed)
    rows = Rows(rng.randint(1, 40))
    for _ in range(rng.randint(1, 90)):  # more than wait at most
        rows.go_on([rng.randint(1, 9) for _ in rows.leases])
        looked_at = rng.randrange(len(rows.leases))
        assert rows.texts[looked_at].num_tokens == rows.plain[looked_at].num_tokens
    rows.check()


def test_counting_tokens_ends_no_stride_and_looking_at_them_does():
    rows = Rows(2)
    rows.go_on([2, 3])
    assert rows.texts[1].num_tokens == 4
    rows.go_on([1, 1])
    assert tokens_in(rows.texts[0]) == tokens_in(rows.plain[0])
    assert not rows.stride.takes(rows.frame([1, 1]), rows.worker, ANY_VOCABULARY)
    rows.check()


def test_a_new_lease_of_a_sample_keeps_what_waited():
    rows = Rows(2)
    rows.go_on([4, 4])
    rows.texts[0].lease_to("b", "none", 3)
    assert tokens_in(rows.texts[0]) == tokens_in(rows.plain[0])[:3]
    assert tokens_in(rows.texts[1]) == tokens_in(rows.plain[1])


@pytest.mark.parametrize(
    "change",
    [
        {"ended": (Ended(1, 3, "stop"),)},
        {"leases": columns.pack_column("<u8", [1, 9])},
        {"leases": columns.pack_column("<u8", [1])},
        {"offsets": columns.pack_column("<u4", [1, 2])},
        {"offsets": columns.pack_column("<u4", [1])},
        {"versions": columns.pack_column("<i4", [3, 2])},
        {"counts": columns.pack_column("<u4", [4, 0])},
        {"counts": columns.pack_column("<u4", [1, 1])},
        {"counts": columns.pack_column("<u4", [4])},
        {"counts": b"1234567"},
        {"cells": bytes(CELL_BYTES * 4 - 1)},
    ],
)
def test_a_frame_that_does_not_go_on_is_not_taken(change):
    rows = Rows(2)
    assert not rows.stride.takes(structs.replace(rows.frame([2, 2]), **change), rows.worker, ANY_VOCABULARY)
    rows.check()


def test_a_sample_that_may_be_full_is_not_for_a_stride():
    rows = Rows(2)
    rows.go_on([1, MAX_TOKENS - 2])
    rows.go_on([1, 1])
    assert not rows.stride.takes(rows.frame([1, 1]), rows.worker, ANY_VOCABULARY)
    rows.check()


def test_cells_are_checked():
    rows = Rows(1)
    lie = structs.replace(rows.frame([1]), cells=columns.pack_cells([5], [float("nan")]))
    with pytest.raises(BadColumns):
        rows.stride.takes(lie, rows.worker, ANY_VOCABULARY)
    rows.check()


def test_a_worker_whose_version_or_leases_have_changed_is_looked_at_row_by_row():
    rows = Rows(2)
    leases = rows.worker.leases
    for changed in (
        structs.replace(rows.worker, version=Version(4)),
        structs.replace(rows.worker, leases={**leases, LeaseId(3): SampleId(7)}),
        structs.replace(rows.worker, leases={LeaseId(1): SampleId(101)}),
        structs.replace(rows.worker, leases={LeaseId(2): SampleId(102), LeaseId(3): SampleId(7)}),
    ):
        assert not rows.stride.takes(rows.frame([1, 1]), changed, ANY_VOCABULARY)
    rows.check()
