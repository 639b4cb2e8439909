"""Continuous batching: who is in a step, who shares what was computed, who makes way, and that all come to an end.

`FakeModel` remembers for every cell of the cache which text was written there, and reads it as attention would.
"""

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from polyrl.engines.builtin.batching import Batching, Chunk, Member
from polyrl.engines.builtin.kv_cache import KvCache
from polyrl.ids import LeaseId


class FakeModel:
    """Keys and values that say what they are of: the text up to the token, and the oldest weights that took part."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.weights = 0
        self.cells: dict[tuple[int, int], tuple[list[int], int]] = {}
        self.began: dict[LeaseId, int] = {}
        """Under which weights each running member was admitted."""

    def plan(self, batching: Batching, alive: Iterable[Member]) -> list[Chunk]:
        stood = {one.lease: one.num_computed for one in alive if one.blocks}
        chunks = batching.plan()
        found = {to: [self.cells.get((block, at)) for at in range(self.block_tokens)] for block, to in batching.copies}
        assert len(found) == len(batching.copies), "two copies into one block"
        for to, texts in found.items():
            self.cells.update({(to, at): one for at, one in enumerate(texts) if one is not None})
        went_on = {one.lease for one in alive if one.blocks and stood.get(one.lease) == one.num_computed}
        self.began = {lease: weights for lease, weights in self.began.items() if lease in went_on}
        return chunks

    def run(self, chunks: list[Chunk]) -> None:
        """Everybody reads what was there before the step, and what it writes itself; nobody else's of this step."""
        written = [self._compute(chunk) for chunk in chunks]
        cells = [cell for one in written for cell in one]
        assert len(cells) == len(set(cells)), "two write to one cell"
        for one in written:
            self.cells.update(one)

    def _compute(self, chunk: Chunk) -> dict[tuple[int, int], tuple[list[int], int]]:
        member, start, count, samples = chunk
        assert count > 0 and start == member.num_computed
        assert samples == (start + count == len(member.tokens))
        began = self.began.setdefault(member.lease, self.weights)
        oldest = self.weights
        for position in range(start):
            text, weights = self.cells[self._cell(member, position)]
            assert text == member.tokens[: position + 1], "it reads the keys and values of another text"
            assert weights >= began, "it shares what was computed under other weights"
            oldest = min(oldest, weights)
        return {
            self._cell(member, position): (member.tokens[: position + 1], oldest)
            for position in range(start, start + count)
        }

    def _cell(self, member: Member, position: int) -> tuple[int, int]:
        return member.blocks[position // self.block_tokens], position % self.block_tokens


class Bench:
    """A batching with a fake model that draws the same token for ever."""

    def __init__(
        self, num_blocks: int = 100, block_tokens: int = 4, max_running: int = 100, max_chunk_tokens: int = 1000
    ) -> None:
        self.cache = KvCache(num_blocks, block_tokens)
        self.batching = Batching(self.cache, max_running, max_chunk_tokens)
        self.model = FakeModel(block_tokens)
        self.members: list[Member] = []

    def add(self, tokens: list[int], num_new: int = 1000, num_kept: int | None = None) -> Member:
        member = Member(LeaseId(len(self.members) + 1), tokens, len(tokens) + num_new, num_kept=num_kept)
        self.members.append(member)
        self.batching.add(member)
        return member

    def step(self) -> list[Chunk]:
        chunks = self.model.plan(self.batching, self.members)
        self.model.run(chunks)
        self.batching.computed(chunks)
        for member, _, _, samples in chunks:
            if samples:
                self.batching.append(member, [7])
                if len(member.tokens) >= member.max_total:
                    self.batching.remove(member.lease)
        self.cache.check()
        return chunks

    def run_to_the_end(self, most_steps: int) -> int:
        """How many steps it took."""
        for num in range(most_steps):
            if not self.step():
                assert self.batching.num_running == self.batching.num_waiting == 0
                assert self.cache.num_free == self.cache.num_blocks
                return num
        raise AssertionError(f"not at the end after {most_steps} steps")


def shape(chunks: list[Chunk]) -> list[tuple[int, int, int, bool]]:
    return [(member.lease, start, count, samples) for member, start, count, samples in chunks]


def text(num: int, start: int = 0) -> list[int]:
    return list(range(start, start + num))


# A step


def test_with_nobody_there_is_nothing_to_do():
    assert Bench().step() == []


def test_a_prompt_is_prefilled_and_then_decodes_a_token_a_step():
    bench = Bench()
    member = bench.add(text(6))
    assert [shape(bench.step()) for _ in range(3)] == [[(1, 0, 6, True)], [(1, 6, 1, True)], [(1, 7, 1, True)]]
    assert member.tokens == [*text(6), 7, 7, 7]


def test_a_long_prompt_is_prefilled_in_chunks_and_samples_only_at_its_end():
    bench = Bench(max_chunk_tokens=5)
    bench.add(text(12))
    assert [shape(bench.step()) for _ in range(3)] == [[(1, 0, 5, False)], [(1, 5, 5, False)], [(1, 10, 2, True)]]


def test_those_that_decode_come_first_and_take_nothing_of_the_prefill():
    bench = Bench(max_chunk_tokens=6)
    bench.add(text(6))
    bench.step()
    bench.add(text(8, start=100))
    bench.add(text(5, start=200))
    assert shape(bench.step()) == [(1, 6, 1, True), (2, 0, 6, False)]
    assert shape(bench.step()) == [(1, 7, 1, True), (2, 6, 2, True), (3, 0, 4, False)]
    assert shape(bench.step()) == [(1, 8, 1, True), (2, 8, 1, True), (3, 4, 1, True)]


def test_a_member_whose_token_is_not_drawn_yet_sits_a_step_out():
    bench = Bench()
    member = bench.add(text(4))
    bench.batching.computed(bench.batching.plan())
    assert bench.batching.plan() == []
    bench.batching.append(member, [7])
    assert shape(bench.batching.plan()) == [(1, 4, 1, True)]


def test_no_more_run_than_there_are_places():
    bench = Bench(max_running=2)
    for start in (0, 100, 200):
        bench.add(text(4, start), num_new=2)
    assert len(bench.step()) == 2
    assert (bench.batching.num_running, bench.batching.num_waiting) == (2, 1)
    bench.step()
    assert shape(bench.step()) == [(3, 0, 4, True)]


# Admission


def test_admission_leaves_a_block_for_each_that_runs():
    bench = Bench(num_blocks=6)
    bench.add(text(6))
    bench.add(text(9, start=100))
    assert len(bench.step()) == 2 and bench.cache.num_free == 1
    bench.add([200])
    assert len(bench.step()) == 2
    assert (bench.batching.num_running, bench.batching.num_waiting) == (2, 1)


def test_a_newcomer_has_room_for_its_first_token():
    bench = Bench(num_blocks=6)
    bench.add(text(8))
    bench.add(text(12, start=100))
    assert [len(bench.step()) for _ in range(3)] == [1, 1, 1]
    assert bench.batching.num_preemptions == 0


def test_nobody_overtakes_one_that_waits_for_blocks():
    bench = Bench(num_blocks=6)
    bench.add(text(12), num_new=3)
    bench.add(text(12, start=100))
    bench.add(text(1, start=200))
    assert [lease for lease, *_ in shape(bench.step())] == [1]
    bench.step()
    assert [lease for lease, *_ in shape(bench.step())] == [1]
    assert [lease for lease, *_ in shape(bench.step())] == [2, 3]


def test_a_member_that_fills_the_cache_runs_alone():
    bench = Bench(num_blocks=3)
    assert bench.batching.fits(12) and not bench.batching.fits(13)
    bench.add(text(11), num_new=1)
    bench.add(text(3, start=100), num_new=9)
    assert bench.run_to_the_end(20) == 10
    assert bench.batching.num_preemptions == 0


# Room ahead, for several steps at once


def test_room_is_reserved_for_every_one_that_runs_and_no_more():
    bench = Bench(num_blocks=10)
    bench.add(text(3))
    bench.add(text(4, start=100))
    bench.step()
    held = [len(one.blocks) for one in bench.members]
    assert held == [1, 1]
    bench.batching.plan()
    assert bench.batching.reserve(4), "3 + 1 tokens and 4 + 1, and 3 more of each after the next"
    assert [len(one.blocks) for one in bench.members] == [2, 2]
    assert bench.batching.reserve(4), "what is there already is not taken again"
    assert [len(one.blocks) for one in bench.members] == [2, 2]
    assert bench.cache.num_used == 4
    bench.cache.check()


def test_without_room_for_all_nothing_is_reserved_and_nobody_makes_way():
    bench = Bench(num_blocks=5)
    bench.add(text(6))
    bench.add(text(6, start=100))
    bench.step()
    before = [list(one.blocks) for one in bench.members]
    assert not bench.batching.reserve(4), "a block each, and one is free"
    assert [one.blocks for one in bench.members] == before
    assert bench.batching.num_preemptions == 0
    assert bench.batching.reserve(2)
    bench.cache.check()


def test_those_that_wait_get_nothing_of_what_is_reserved():
    bench = Bench(max_running=1)
    bench.add(text(6))
    waiting = bench.add(text(6, start=100))
    bench.step()
    assert bench.batching.reserve(40)
    assert waiting.blocks == []


def test_several_tokens_at_once_into_reserved_room_are_as_one_by_one():
    bench = Bench(num_blocks=12)
    one = bench.add(text(6))
    bench.step()
    (chunk,) = bench.batching.plan()
    assert bench.batching.reserve(5)
    bench.batching.computed([chunk])
    one.tokens += [7] * 5
    bench.batching.computed([Chunk(one, chunk.start + 1, 4, True)])
    assert shape(bench.batching.plan()) == [(1, 11, 1, True)]
    bench.cache.check()
    bench.batching.remove(one.lease)
    keys: list[bytes] = []
    bench.cache.extend_keys(keys, [*text(6), *[7] * 5])
    assert len(bench.cache.find(keys)) == 2, "its whole blocks can be shared"


# Sharing


@pytest.mark.parametrize("block_tokens", [16, 32])
@pytest.mark.parametrize("chunk_tokens", [512, 100_000])
@pytest.mark.parametrize("num_tokens", [1, 2, 20, 32, 33, 200, 2047, 2048, 2049])
def test_a_group_prefills_its_prompt_once_and_each_its_last_token(
    num_tokens: int, chunk_tokens: int, block_tokens: int
):
    batching = Batching(KvCache(1000, block_tokens), 64, chunk_tokens)
    for lease in range(8):
        batching.add(Member(LeaseId(lease), text(num_tokens), 4096))
    num_prefilled, num_steps = 0, 0
    while batching.num_waiting:
        chunks = batching.plan()
        batching.computed(chunks)
        num_steps += 1
        for member, _, count, samples in chunks:
            if samples:
                batching.append(member, [7])
            if len(member.tokens) - samples == num_tokens:
                num_prefilled += count
    assert num_prefilled == num_tokens + 7
    assert num_steps <= -(-num_tokens // chunk_tokens) + 1, "the others begin together, right after the first"


def test_one_that_waits_for_a_block_under_way_is_passed_over():
    bench = Bench(max_chunk_tokens=20)
    bench.add(text(12))
    bench.add(text(12))
    bench.add(text(7, start=100))
    assert shape(bench.step()) == [(1, 0, 12, True), (3, 0, 7, True)]
    assert shape(bench.step()) == [(1, 12, 1, True), (3, 7, 1, True), (2, 11, 1, True)]


def test_nobody_waits_for_the_tail_of_a_text_that_is_gone_after_its_first_token():
    bench = Bench()
    for _ in range(50):
        bench.add(text(3), num_new=1)
    assert len(bench.step()) == 50
    assert bench.batching.num_running == bench.batching.num_waiting == 0


def test_a_text_that_another_goes_on_from_is_copied_up_to_its_end():
    bench = Bench()
    first = bench.add(text(6))
    for _ in range(4):
        bench.step()
    assert len(first.blocks) == 3, "the block that its text ended in is full of its answer"
    bench.add(text(6))
    bench.add(text(7))
    assert shape(bench.step()) == [(1, 9, 1, True), (2, 5, 1, True), (3, 5, 2, True)]
    assert bench.batching.copies == [(first.blocks[1], bench.members[number].blocks[1]) for number in (1, 2)]


def test_the_next_turn_of_a_conversation_computes_only_what_nobody_has_computed():
    bench = Bench()
    said, num_computed, num_reused = text(6), 0, 0
    for turn in range(5):
        member = bench.add(list(said), num_new=3 + turn)
        assert shape(bench.step()) == [(member.lease, num_computed, len(said) - num_computed, True)]
        bench.run_to_the_end(20)
        num_reused += num_computed
        num_computed = len(member.tokens) - 1  # the last one drawn was never computed
        said = [*member.tokens, 90 + turn, 91]
    assert bench.batching.num_prefilled == 6 + 4 * 3
    assert bench.batching.num_reused == num_reused


def test_an_answer_that_was_decoded_is_not_shared_where_pieces_have_borders():
    batching = Batching(KvCache(100, 4), 8, 1000, border_tokens=8)
    member = Member(LeaseId(1), text(6), 100)
    batching.add(member)
    for _ in range(4):
        batching.computed(batching.plan())
        batching.append(member, [7])
    batching.remove(member.lease)
    batching.add(Member(LeaseId(2), [*member.tokens, 8, 9], 100))
    assert batching.plan()[0].start == 4


def test_a_tail_is_found_as_long_as_somebody_has_it():
    bench = Bench()
    first, second = bench.add(text(6)), bench.add(text(6))
    bench.step()
    bench.step()
    bench.batching.remove(first.lease)
    bench.add(text(6))
    assert shape(bench.step()) == [(2, 6, 1, True), (3, 5, 1, True)], "the second has it too"
    bench.batching.remove(bench.members[2].lease)
    bench.add(text(6))
    assert shape(bench.step()) == [(2, 7, 1, True), (4, 5, 1, True)], "and has it still"
    for member in bench.members[1:]:
        bench.batching.remove(member.lease)
    bench.add(text(6))
    assert shape(bench.step()) == [(5, 5, 1, True)], "nobody does, but the second's answer has filled the block"
    assert second.blocks == []
    bench.batching.remove(bench.members[4].lease)
    bench.cache.forget()
    bench.add(text(6))
    assert shape(bench.step()) == [(6, 0, 6, True)]
    bench.batching.remove(bench.members[5].lease)
    bench.add(text(6))
    assert shape(bench.step()) == [(7, 5, 1, True)], "the block was not full, and is kept until it is needed"


def test_a_tail_that_nobody_has_makes_way_for_those_that_need_its_block():
    bench = Bench(num_blocks=3)
    bench.add(text(6), num_new=1)
    bench.run_to_the_end(10)
    bench.add(text(9, start=100), num_new=1)
    bench.run_to_the_end(10)
    bench.add(text(6), num_new=1)
    assert shape(bench.step()) == [(3, 0, 6, True)]


def test_one_that_shares_only_what_is_cached_already_need_not_wait():
    bench = Bench(max_chunk_tokens=8)
    bench.add(text(20))
    bench.step()
    bench.add([*text(8), *text(2, start=100)])
    bench.add(text(17))
    assert shape(bench.step()) == [(1, 8, 8, False)]
    assert shape(bench.step()) == [(1, 16, 4, True), (2, 8, 2, True), (3, 16, 1, True)]


def test_a_conversation_that_comes_back_finds_its_answer_cached():
    bench = Bench()
    first = bench.add(text(6), num_new=7)
    bench.run_to_the_end(10)
    assert len(first.tokens) == 13
    bench.add([*first.tokens, 99])
    assert shape(bench.step()) == [(2, 12, 2, True)]


# Making way


def test_out_of_blocks_the_newest_makes_way_and_is_first_in_line():
    bench = Bench(num_blocks=5)
    old, new = bench.add(text(6), num_new=9), bench.add(text(6, start=100), num_new=6)
    late = bench.add(text(8, start=200), num_new=4)
    while not bench.batching.num_preemptions:
        bench.step()
    assert old.blocks and not new.blocks and new.num_computed == 0
    assert (bench.batching.num_running, bench.batching.num_waiting) == (1, 2)
    order: list[int] = []
    while bench.batching.num_waiting:
        order += [chunk.member.lease for chunk in bench.step()]
    assert list(dict.fromkeys(order)) == [old.lease, new.lease, late.lease]
    bench.run_to_the_end(50)
    assert new.tokens == [*text(6, start=100), *[7] * 6]


def test_preempted_members_of_many_all_come_to_their_end():
    bench = Bench(num_blocks=10)
    many = [bench.add(text(3, start=10 * one), num_new=30) for one in range(12)]
    num_steps = bench.run_to_the_end(12 * 31)
    assert all(len(one.tokens) == 33 for one in many)
    assert bench.batching.num_preemptions > 0
    assert num_steps < 12 * 31 * 0.8, "they ran beside each other"


# Leaving


def test_a_removed_member_frees_its_place_and_blocks_at_once_wherever_it_stands():
    bench = Bench(max_running=1)
    running, waiting = bench.add(text(6)), bench.add(text(6))
    bench.step()
    assert bench.batching.remove(waiting.lease) is waiting
    assert bench.batching.remove(running.lease) is running
    assert bench.batching.remove(running.lease) is None
    assert bench.cache.num_free == bench.cache.num_blocks
    assert bench.step() == []


def test_one_removed_while_its_step_runs_publishes_nothing():
    bench = Bench()
    member = bench.add(text(9))
    chunks = bench.batching.plan()
    bench.batching.remove(member.lease)
    bench.batching.computed(chunks)
    bench.cache.check()
    bench.add(text(9))
    assert shape(bench.step()) == [(2, 0, 9, True)]


# Other weights


def test_to_recompute_all_begin_anew_in_their_order():
    bench = Bench(max_running=2)
    for start in (0, 100, 200):
        bench.add(text(4, start))
    bench.step()
    bench.batching.recompute_all()
    assert bench.cache.num_free == bench.cache.num_blocks
    assert shape(bench.step()) == [(1, 0, 5, True), (2, 0, 5, True)]
    assert bench.batching.num_preemptions == 0


def test_those_that_go_on_over_other_weights_do_not_share_with_those_that_come_after():
    bench = Bench()
    bench.add(text(8))
    bench.step()
    bench.cache.forget()
    bench.model.weights += 1
    bench.add(text(8))
    assert shape(bench.step()) == [(1, 8, 1, True), (2, 0, 8, True)]
    bench.add(text(8))
    assert shape(bench.step()) == [(1, 9, 1, True), (2, 8, 1, True), (3, 7, 1, True)]


# Whether a text may go on


def test_a_conversation_is_found_again_however_many_single_answers_were_written_meanwhile():
    """The cache has room for the conversation and one answer. Kept, the answers would push the conversation out."""

    def num_prefilled(*, goes_on: bool) -> int:
        bench = Bench(num_blocks=14)
        talk = bench.add(text(20), num_new=9)
        while talk.lease in bench.batching:
            bench.step()
        for start in (100, 200, 300):
            single = bench.add(text(3, start), num_new=18, num_kept=None if goes_on else 3)
            while single.lease in bench.batching:
                bench.step()
        before = bench.batching.num_prefilled
        bench.add([*talk.tokens, 1, 2], num_new=2)
        bench.step()
        return bench.batching.num_prefilled - before

    assert num_prefilled(goes_on=False) == 3  # the last drawn token, and what is new
    assert num_prefilled(goes_on=True) > 20


def test_siblings_find_the_prompt_of_an_answer_that_ended():
    bench = Bench()
    first = bench.add(text(10), num_new=8, num_kept=10)
    while first.lease in bench.batching:
        bench.step()
    bench.add(text(10), num_new=8, num_kept=10)
    bench.step()
    assert (bench.batching.num_prefilled, bench.batching.num_reused) == (10 + 1, 9)


# Laws


class Fleet(RuleBasedStateMachine):
    """Short texts over two tokens, many of them equal, in a cache where few fit; anything may happen between steps."""

    @initialize(
        num_blocks=st.integers(6, 12),
        block_tokens=st.integers(1, 3),
        max_running=st.integers(1, 6),
        max_chunk_tokens=st.integers(1, 12),
    )
    def begin(self, num_blocks: int, block_tokens: int, max_running: int, max_chunk_tokens: int) -> None:
        self.cache = KvCache(num_blocks, block_tokens)
        self.batching = Batching(self.cache, max_running, max_chunk_tokens)
        self.model = FakeModel(block_tokens)
        self.max_running, self.max_chunk_tokens = max_running, max_chunk_tokens
        self.alive: dict[LeaseId, Member] = {}
        self.num_added = 0

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        num_new=st.integers(1, 12),
        num_samples=st.integers(1, 4),
        goes_on=st.booleans(),
    )
    def add(self, tokens: list[int], num_new: int, num_samples: int, goes_on: bool) -> None:
        capacity = self.cache.num_blocks * self.cache.block_tokens
        for _ in range(num_samples):
            max_total = min(len(tokens) + num_new, capacity)
            if not self.batching.fits(len(tokens) + 1):
                continue
            self.num_added += 1
            num_kept = None if goes_on else 1 + len(tokens) // 2
            member = Member(LeaseId(self.num_added), list(tokens), max_total, num_kept=num_kept)
            self.alive[member.lease] = member
            self.batching.add(member)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.alive:
            lease = data.draw(st.sampled_from(list(self.alive)))
            assert self.batching.remove(lease) is self.alive.pop(lease)

    @rule()
    def weights_change_and_all_go_on(self) -> None:
        self.cache.forget()
        self.model.weights += 1

    @rule()
    def weights_change_and_all_begin_anew(self) -> None:
        self.batching.recompute_all()
        self.model.weights += 1

    @rule(data=st.data(), num=st.integers(1, 6))
    def some_steps(self, data: st.DataObject, num: int) -> None:
        for _ in range(num):
            chunks = self.start_step()
            self.end_step(chunks, data.draw(st.integers(0, 255)))

    @rule(data=st.data(), draws=st.integers(0, 255), anew=st.booleans())
    def a_step_in_which_somebody_leaves(self, data: st.DataObject, draws: int, anew: bool) -> None:
        chunks = self.start_step()
        self.abort(data)
        if anew:
            self.weights_change_and_all_begin_anew()
        self.end_step(chunks, draws)

    def start_step(self) -> list[Chunk]:
        chunks = self.model.plan(self.batching, self.alive.values())
        self.model.run(chunks)
        self.check_shape(chunks)
        return chunks

    def check_shape(self, chunks: list[Chunk]) -> None:
        assert bool(chunks) == bool(self.alive), "no step is empty while somebody waits"
        leases = [chunk.member.lease for chunk in chunks]
        assert len(set(leases)) == len(leases) <= self.max_running
        assert sum(chunk.count for chunk in chunks if chunk.count > 1) <= self.max_chunk_tokens
        holders = Counter(block for one in self.alive.values() for block in one.blocks)
        for member, start, count, _ in chunks:
            written = member.blocks[start // self.cache.block_tokens :]
            assert all(holders[block] == 1 for block in written), "it writes to a block that another holds"
            assert len(member.blocks) * self.cache.block_tokens >= start + count

    def end_step(self, chunks: list[Chunk], draws: int) -> None:
        self.batching.computed(chunks)
        for member, _, _, samples in chunks:
            if not samples or not member.blocks:
                continue
            self.batching.append(member, [(draws >> member.lease % 8) & 1])
            if len(member.tokens) >= member.max_total:
                assert self.batching.remove(member.lease) is self.alive.pop(member.lease)

    @invariant()
    def the_books_are_right(self) -> None:
        self.cache.check()
        held = {block for one in self.alive.values() for block in one.blocks}
        assert self.cache.num_used == len(held)
        num_running = sum(bool(one.blocks) for one in self.alive.values())
        assert (self.batching.num_running, self.batching.num_waiting) == (num_running, len(self.alive) - num_running)
        for one in self.alive.values():
            assert one.num_computed <= len(one.tokens) <= one.max_total
            assert one.blocks or not one.num_computed

    def teardown(self) -> None:
        if not hasattr(self, "alive"):
            return
        # The oldest is never preempted and computes at least a token a step: a bound that no livelock keeps.
        for _ in range(sum(one.max_total for one in self.alive.values())):
            self.end_step(self.start_step(), 0b10101010)
            self.the_books_are_right()
        assert not self.alive
        assert self.cache.num_free == self.cache.num_blocks


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=250, stateful_step_count=30)
