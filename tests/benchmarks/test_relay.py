"""The load of `make bench NAME=relay`: fake workers do what engines would, no more."""

import numpy as np
from benchmarks.relay.fleet_load import FakeWorker

from polyrl.wire import columns, frames


def worker_with(num_orders: int, *, slots: int, length: int) -> FakeWorker:
    worker = FakeWorker("w0", slots, length, {})
    orders = (
        frames.Order(one, 100 + one, b"", columns.pack_tokens([1] * one), length, 0, frames.Sampling())
        for one in range(num_orders)
    )
    worker.order(tuple(orders))
    return worker


def rows(frame: frames.NewTokens) -> list[tuple[int, int, int]]:
    """Lease, offset and count of each."""
    column = columns.check(frame.leases, frame.offsets, frame.counts, frame.versions, frame.cells)
    return list(zip(column.leases, column.offsets, column.counts, strict=True))


def test_what_is_given_ahead_waits_for_a_slot():
    worker = worker_with(5, slots=3, length=10)
    assert (worker.num_running, worker.num_waiting) == (3, 2)
    assert rows(worker.frame(4)) == [(0, 0, 4), (1, 1, 4), (2, 2, 4)]
    assert worker.num_sent == 12
    ending = worker.frame(4)
    assert rows(ending) == [(0, 4, 4), (1, 5, 4), (2, 6, 4)]
    assert ending.ended == (frames.Ended(2, 10, "length"),)
    assert rows(worker.frame(1)) == [(0, 8, 1), (1, 9, 1), (3, 3, 1)]
    assert (worker.num_running, worker.num_waiting) == (3, 0)


def test_a_sample_that_is_taken_back_frees_its_slot():
    worker = worker_with(3, slots=2, length=10)
    worker.drop((0,))
    assert rows(worker.frame(1)) == [(1, 1, 1), (2, 2, 1)]


def test_as_many_tokens_a_second_are_sent_as_slots_would_make():
    worker = worker_with(19, slots=16, length=1024)
    for _ in range(10):
        worker.frame(5)
    assert worker.num_sent == 10 * 16 * 5
    assert np.array_equal(worker.offsets[16:], [16, 17, 18])
