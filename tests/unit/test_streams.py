"""A worker's book of leases: what it sends, what it may forget, and what it sends again after a break."""

import struct
from collections import deque
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from polyrl.ids import LeaseId
from polyrl.wire import columns
from polyrl.wire.frames import MAX_WORKER_FRAME_BYTES, Ended, HeldLease, NewTokens, encode
from polyrl.worker.streams import LeaseBook

A, B, C = LeaseId(1), LeaseId(2), LeaseId(3)


class Run(NamedTuple):
    """What a frame says of one lease: these tokens, written by that version, after `offset` others."""

    lease: int
    offset: int
    version: int
    tokens: list[int]


def runs(frame: NewTokens | None) -> list[Run]:
    assert frame is not None
    column = columns.check(frame.leases, frame.offsets, frame.counts, frame.versions, frame.cells)
    tokens = columns.view_cells(frame.cells)["token"].tolist()
    return [
        Run(lease, offset, version, tokens[end // 8 - count : end // 8])
        for lease, offset, count, version, end in zip(*column, strict=True)
    ]


def leases(packed: bytes) -> list[LeaseId]:
    return [LeaseId(lease) for (lease,) in struct.iter_unpack("<Q", packed)]


def add(book: LeaseBook, lease: LeaseId, *tokens: int, version: int = 0) -> None:
    book.add(lease, tokens, [-0.5] * len(tokens), version)


def book_with(*tokens: int, so_far: int = 0) -> LeaseBook:
    """Lease A has made these."""
    book = LeaseBook()
    book.open(A, so_far)
    if tokens:
        add(book, A, *tokens)
    return book


# Frames


def test_a_frame_has_the_new_tokens_of_all_leases_each_after_those_before_it():
    book = book_with(10, 11)
    book.open(B, 0)
    add(book, B, 20)
    assert runs(book.take_frame()) == [Run(A, 0, 0, [10, 11]), Run(B, 0, 0, [20])]
    add(book, A, 12)
    assert runs(book.take_frame()) == [Run(A, 2, 0, [12])]


def test_offsets_count_from_the_start_of_the_sample_and_not_of_the_lease():
    book = book_with(10, so_far=500)
    assert runs(book.take_frame()) == [Run(A, 500, 0, [10])]
    book.end(A, "stop")
    frame = book.take_frame()
    assert frame is not None
    assert frame.ended == (Ended(A, 501, "stop"),)


def test_log_probabilities_travel_beside_their_tokens():
    book = LeaseBook()
    book.open(A, 0)
    book.add(A, [7, 8], [-0.25, -2.0], 0)
    frame = book.take_frame()
    assert frame is not None
    assert columns.view_cells(frame.cells)["logprob"].tolist() == [-0.25, -2.0]


def test_nothing_new_is_no_frame():
    book = book_with()
    assert book.take_frame() is None
    add(book, A, 10)
    assert book.take_frame() is not None
    assert book.take_frame() is None


def test_frames_are_numbered_from_1():
    book = book_with(10)
    first = book.take_frame()
    add(book, A, 11)
    second = book.take_frame()
    assert first is not None and second is not None
    assert (first.seq, second.seq) == (1, 2)


def test_a_version_that_changes_splits_a_leases_tokens():
    book = book_with(10, 11)
    add(book, A, 12, version=1)
    add(book, A, 13, 14, version=1)
    assert runs(book.take_frame()) == [Run(A, 0, 0, [10, 11]), Run(A, 2, 1, [12, 13, 14])]
    add(book, A, 15, version=1)
    assert runs(book.take_frame()) == [Run(A, 5, 1, [15])]


def test_a_lease_that_ends_without_a_token_is_said_to():
    book = book_with(so_far=3)
    book.end(A, "refused", "the prompt is too long")
    frame = book.take_frame()
    assert frame is not None
    assert (runs(frame), frame.ended) == ([], (Ended(A, 3, "refused", "the prompt is too long"),))


def test_what_comes_after_the_end_or_for_a_lease_that_is_none_is_not_kept():
    book = book_with(10)
    book.end(A, "handed_over")
    add(book, A, 11)
    book.end(A, "stop")
    add(book, B, 20)
    book.end(B, "stop")
    frame = book.take_frame()
    assert frame is not None
    assert runs(frame) == [Run(A, 0, 0, [10])]
    assert frame.ended == (Ended(A, 1, "handed_over"),)
    assert B not in book


def test_a_frame_stays_below_what_a_manager_takes():
    book = LeaseBook()
    num = 300_000
    for lease in map(LeaseId, range(1, 9)):
        book.open(lease, 0)
        book.add(lease, range(num), [-0.5] * num, 0)
    sizes: list[int] = []
    got: dict[int, int] = {}
    while (frame := book.take_frame()) is not None:
        sizes.append(len(encode(frame)))
        for run in runs(frame):
            assert run.offset == got.get(run.lease, 0)
            got[run.lease] = run.offset + len(run.tokens)
    assert max(sizes) < MAX_WORKER_FRAME_BYTES
    assert len(sizes) > 1
    assert got == dict.fromkeys(range(1, 9), num)


# What may be forgotten


def test_a_lease_with_more_tokens_than_fit_into_a_frame_is_sent_in_several_and_ends_with_the_last():
    book = book_with()
    num = (1 << 21) + 5
    book.add(A, [3] * num, [-0.5] * num, 0)
    add(book, A, 4, version=1)
    book.end(A, "stop")
    sent = 0
    while (frame := book.take_frame()) is not None:
        assert len(encode(frame)) < MAX_WORKER_FRAME_BYTES
        for run in runs(frame):
            assert (run.lease, run.offset) == (A, sent)
            sent += len(run.tokens)
        assert frame.ended == (() if sent < num + 1 else (Ended(A, num + 1, "stop"),))
    assert sent == num + 1


def test_many_ends_with_long_reasons_fit_into_frames():
    book = LeaseBook()
    for lease in range(1, 2001):
        book.open(LeaseId(lease), 0)
        book.end(LeaseId(lease), "engine_failed", "\u20ac" * 2000)
    ended: list[int] = []
    while (frame := book.take_frame()) is not None:
        assert len(encode(frame)) < MAX_WORKER_FRAME_BYTES
        ended += [one.lease for one in frame.ended]
    assert ended == list(range(1, 2001))


def test_a_lease_is_kept_until_the_frame_with_its_end_is_acknowledged():
    book = book_with(10)
    book.take_frame()
    book.acknowledge(1)
    assert A in book  # it still runs
    book.end(A, "stop")
    book.take_frame()
    book.acknowledge(1)
    assert A in book
    book.acknowledge(2)
    assert A not in book
    assert len(book) == 0


def test_an_end_that_was_not_sent_is_not_acknowledged():
    book = book_with(10)
    book.take_frame()
    book.end(A, "stop")
    book.acknowledge(1)
    assert A in book


def test_a_dropped_lease_is_not_sent():
    book = book_with(10)
    assert book.drop(A)
    assert not book.drop(A)
    assert book.take_frame() is None


def test_a_book_that_is_cleared_names_what_still_ran():
    book = book_with(10)
    book.open(B, 0)
    book.end(B, "stop")
    assert book.clear() == [A]
    assert len(book) == 0
    assert book.take_frame() is None


# After a break


@pytest.mark.parametrize("num_arrived", range(6))
def test_after_a_break_exactly_what_the_manager_lacks_is_sent_again(num_arrived):
    book = book_with(10, 11, 12, so_far=100)
    add(book, A, 13, 14, version=1)
    book.take_frame()
    book.welcome([HeldLease(A, 100 + num_arrived)])
    frame = book.take_frame()
    assert ([] if frame is None else runs(frame)) == [
        Run(A, 100 + max(first, num_arrived), version, tokens[max(0, num_arrived - first) :])
        for first, version, tokens in ((0, 0, [10, 11, 12]), (3, 1, [13, 14]))
        if num_arrived < first + len(tokens)
    ]
    assert book.take_frame() is None


def test_an_end_is_told_again_after_a_break_although_all_tokens_are_there():
    book = book_with(10)
    book.end(A, "length")
    book.take_frame()
    assert book.welcome([HeldLease(A, 1)]) == []
    frame = book.take_frame()
    assert frame is not None
    assert (runs(frame), frame.ended) == ([], (Ended(A, 1, "length"),))


def test_the_number_of_a_frame_that_was_lost_does_not_stand_for_the_one_that_replaces_it():
    book = book_with(10)
    book.end(A, "stop")
    book.take_frame()
    book.welcome([HeldLease(A, 0)])
    book.acknowledge(1)
    assert A in book
    frame = book.take_frame()
    assert frame is not None
    book.acknowledge(frame.seq)
    assert A not in book


def test_leases_that_are_over_for_the_manager_are_dropped_and_those_that_ran_are_named():
    book = book_with(10)
    book.open(B, 0)
    add(book, B, 20)
    book.end(B, "stop")
    book.open(C, 0)
    add(book, C, 30)
    assert book.welcome([HeldLease(C, 0)]) == [A]
    assert (A in book, B in book, C in book) == (False, False, True)
    assert runs(book.take_frame()) == [Run(C, 0, 0, [30])]


def test_a_hello_names_every_lease_that_is_kept():
    book = book_with(10)
    book.open(B, 0)
    book.end(B, "stop")
    book.take_frame()
    assert leases(book.hello()) == [A, B]


# Any order of things


class Conversation(RuleBasedStateMachine):
    """A book, a receiver that keeps what it is sent, and a connection that may break with frames and answers under way.

    Like the manager, the receiver says after a break what it has, and has done with a lease when it has heard its end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.book = LeaseBook()
        self.made: dict[LeaseId, list[tuple[int, int]]] = {}
        """By lease, (token, version) of all that the engine made."""
        self.ends: set[LeaseId] = set()
        self.got: dict[LeaseId, list[tuple[int, int]]] = {}
        self.base: dict[LeaseId, int] = {}
        self.finished: set[LeaseId] = set()
        self.aborted: set[LeaseId] = set()
        self.frames: deque[NewTokens] = deque()
        self.acks: deque[int] = deque()
        self.version = 0
        self.num_tokens = 0

    def some(self, data: st.DataObject, leases: set[LeaseId]) -> LeaseId:
        return data.draw(st.sampled_from(sorted(leases)))

    @property
    def running(self) -> set[LeaseId]:
        return set(self.made) - self.ends - self.aborted

    @rule(base=st.integers(0, 5))
    def open(self, base):
        lease = LeaseId(len(self.made) + 1)
        self.book.open(lease, base)
        self.made[lease], self.got[lease], self.base[lease] = [], [], base

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num=st.integers(1, 3))
    def make(self, data, num):
        lease = self.some(data, self.running)
        tokens = list(range(self.num_tokens, self.num_tokens + num))
        self.num_tokens += num
        self.book.add(lease, tokens, [-1.0] * num, self.version)
        self.made[lease] += [(token, self.version) for token in tokens]

    @rule()
    def install(self):
        self.version += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data):
        lease = self.some(data, self.running)
        self.book.end(lease, "stop")
        self.ends.add(lease)

    @rule()
    def send(self):
        frame = self.book.take_frame()
        if frame is not None:
            self.frames.append(frame)

    @precondition(lambda self: self.frames)
    @rule()
    def arrive(self):
        frame = self.frames.popleft()
        for run in runs(frame):
            lease = LeaseId(run.lease)
            if lease not in self.aborted:
                assert run.offset == self.base[lease] + len(self.got[lease]), "a gap, or a token twice"
                self.got[lease] += [(token, run.version) for token in run.tokens]
        for ended in frame.ended:
            lease = LeaseId(ended.lease)
            if lease not in self.aborted:
                assert lease not in self.finished, "an end twice"
                assert ended.num_tokens == self.base[lease] + len(self.got[lease])
                self.finished.add(lease)
        self.acks.append(frame.seq)

    @precondition(lambda self: self.acks)
    @rule()
    def acknowledge(self):
        self.book.acknowledge(self.acks.popleft())

    @precondition(lambda self: set(self.made) - self.finished - self.aborted)
    @rule(data=st.data(), is_told=st.booleans())
    def abort(self, data, is_told):
        """The manager has done with a lease; the worker hears of it now, or after the next break."""
        lease = self.some(data, set(self.made) - self.finished - self.aborted)
        self.aborted.add(lease)
        if is_told:
            self.book.drop(lease)

    @rule()
    def break_off(self):
        self.frames.clear()
        self.acks.clear()
        named = set(leases(self.book.hello()))
        open_ones = named - self.finished - self.aborted
        stopped = self.book.welcome([HeldLease(one, self.base[one] + len(self.got[one])) for one in sorted(open_ones)])
        assert set(stopped) == (named & self.aborted) - self.ends

    @invariant()
    def the_receiver_has_the_first_of_what_was_made(self):
        for lease, got in self.got.items():
            assert got == self.made[lease][: len(got)]

    def teardown(self):
        """Whatever happened: once everything has been sent and heard, the receiver has all of it."""
        self.break_off()
        self.send()
        while self.frames:
            self.arrive()
        while self.acks:
            self.acknowledge()
        for lease in set(self.made) - self.aborted:
            assert self.got[lease] == self.made[lease]
            assert (lease in self.finished) == (lease in self.ends)
        assert {lease for lease in self.made if lease in self.book} == self.running
        assert self.book.take_frame() is None


TestConversation = Conversation.TestCase
TestConversation.settings = settings(max_examples=150, stateful_step_count=40)
