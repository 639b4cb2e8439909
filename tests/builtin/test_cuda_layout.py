"""How prompts lie in a step on a GPU. What is computed from it: tests/gpu, by hand."""

import itertools
import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from polyrl.engines.builtin.batching import Batching, Chunk, Member
from polyrl.engines.builtin.cuda.layout import MOST_CONTEXTS, StepLayout, lay_out, shape_of
from polyrl.engines.builtin.kv_cache import KvCache
from polyrl.ids import LeaseId

ROWS, BLOCK, NOWHERE = 32, 4, 1000
PROMPTS = [list(range(100, 133)), list(range(100, 125)), list(range(500, 507)), list(range(600, 664)), [9] * 70]
"""33 tokens, one more than a chunk; 25, of which 24 can be cached; a short one; two chunks; more than two."""


def computed(numbers: list[int], num_new: int = 6) -> dict[tuple[int, int], tuple[str, int]]:
    """By prompt and position, how each of its tokens is computed when these prompts come one after the other."""
    batching = Batching(KvCache(NOWHERE, BLOCK), 8, ROWS, ROWS)
    members = {number: Member(LeaseId(number), list(PROMPTS[number]), 1000, number) for number in numbers}
    for number in numbers:
        batching.add(members[number])
    ways: dict[tuple[int, int], tuple[str, int]] = {}
    while chunks := batching.plan():
        for chunk in chunks:
            ways |= {(chunk.member.data, position): way for position, way in ways_of(chunk).items()}
        batching.computed(chunks)
        for member, _, _, samples in chunks:
            if samples:
                batching.append(member, [7])
            if len(member.tokens) == len(PROMPTS[member.data]) + num_new:
                batching.remove(member.lease)
    return ways


def ways_of(chunk: Chunk) -> dict[int, tuple[str, int]]:
    if chunk.decodes:
        return {chunk.start: ("decoded", 0)}
    shape = shape_of([chunk], 64, ROWS)
    its = lay_out([chunk], BLOCK, NOWHERE, shape, in_place=True)
    assert len(its.tokens) == len(its.positions) == len(its.cells) == its.first_rows[-1] == ROWS
    row = next(at for at, cell in enumerate(its.cells) if cell // BLOCK != NOWHERE)
    assert its.tokens[row : row + chunk.count].tolist() == chunk.member.tokens[chunk.start :][: chunk.count]
    assert its.rows.tolist() == ([row + chunk.count - 1] if chunk.samples else [])
    return {chunk.start + at: ("prefilled", row + at) for at in range(chunk.count)}


def test_a_token_is_computed_in_one_way_whoever_comes_with_it_and_whatever_is_cached():
    alone = {key: way for number in range(len(PROMPTS)) for key, way in computed([number]).items()}
    assert alone[0, 32] == ("prefilled", 0), "the last token of a prompt is prefilled, though it is alone in its chunk"
    assert alone[0, 33] == ("decoded", 0)
    for numbers in itertools.permutations(range(len(PROMPTS))):
        together = computed(list(numbers))
        assert together == {key: alone[key] for key in together}
        assert len(together) < len(alone), "25 tokens share 24 with 33"


def test_what_was_decoded_is_not_shared_where_it_would_be_computed_otherwise():
    batching = Batching(KvCache(NOWHERE, BLOCK), 8, ROWS, ROWS)
    first = Member(LeaseId(1), [5] * 6, 1000)
    batching.add(first)
    for _ in range(20):
        batching.computed(batching.plan())
        batching.append(first, [7])
    batching.add(Member(LeaseId(2), list(first.tokens), 1000))
    chunk = batching.plan()[-1]
    assert (chunk.member.lease, chunk.start) == (2, BLOCK)


def some_chunks() -> list[Chunk]:
    draw = random.Random(0)
    chunks, free = [], list(range(100))
    draw.shuffle(free)
    for lease, (start, count, samples) in enumerate([(0, 5, True), (8, 3, False), (6, 1, True)]):
        member = Member(LeaseId(lease), [draw.randrange(100) for _ in range(20)], 100)
        member.blocks = [free.pop() for _ in range(5)]
        chunks.append(Chunk(member, start, count, samples))
    return chunks


def check_chunks(its: StepLayout, chunks: list[Chunk]) -> None:
    assert its.positions.tolist()[:9] == [0, 1, 2, 3, 4, 8, 9, 10, 6]
    assert its.rows.tolist() == [4, 8]
    assert its.first_rows.tolist()[:4] == [0, 5, 8, 9]
    assert its.first_contexts.tolist()[:4] == [0, 5, 16, 23]
    places = its.blocks * BLOCK + its.within
    for number, (member, start, count, _) in enumerate(chunks):
        row, at = its.first_rows[number], its.first_contexts[number]
        assert its.tokens[row : row + count].tolist() == member.tokens[start : start + count]
        context = [member.blocks[token // BLOCK] * BLOCK + token % BLOCK for token in range(start + count)]
        assert places[at : at + start + count].tolist() == context
        assert its.cells[row : row + count].tolist() == context[start:]


def test_chunks_of_several_samples_lie_one_after_the_other_with_their_contexts():
    chunks = some_chunks()
    its = lay_out(chunks, BLOCK, NOWHERE)
    check_chunks(its, chunks)
    assert len(its.tokens) == 9 and len(its.first_rows) == len(its.first_contexts) == 4
    assert its.longest_rows == 5 and its.longest_context == 11
    assert (its.blocks[23:] == NOWHERE).all()


def test_a_step_is_made_up_to_a_shape_with_what_nobody_reads():
    chunks = some_chunks()
    shape = shape_of(chunks, 64)
    assert shape is not None and shape.rows == 128
    its = lay_out(chunks, BLOCK, NOWHERE, shape)
    check_chunks(its, chunks)
    assert len(its.tokens) == len(its.positions) == len(its.cells) == its.first_rows[-1] == shape.rows
    assert len(its.blocks) == len(its.within) == shape.contexts == its.longest_context
    assert its.longest_rows == shape.rows
    assert (its.cells[9:] // BLOCK == NOWHERE).all(), "rows that are too many are written where nobody reads"
    assert (its.blocks[23:] == NOWHERE).all()
    rows, contexts = np.diff(its.first_rows), np.diff(its.first_contexts)
    assert rows[3] == contexts[3] == shape.rows - 9 and not rows[4:].any() and not contexts[4:].any()


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 900)), min_size=1, max_size=70), st.integers(64, 4096))
def test_a_shape_holds_the_chunks_and_has_no_two_equal_sizes(sizes, width):
    """Sizes that are equal are compiled as one."""
    chunks = [Chunk(Member(LeaseId(1), [], 1), start, count, False) for start, count in sizes]
    num_rows = sum(count for _, count in sizes)
    shape = shape_of(chunks, width)
    if shape is None:
        num_contexts = sum(start + count for start, count in sizes)
        assert num_rows > 2048 or len(sizes) > 62 or num_contexts > MOST_CONTEXTS // 4 - 2176
        return
    made_up = shape.rows - num_rows
    assert made_up >= 0 and shape.rows in (128, 256, 512, 1024, 2048, width + 128)
    assert len({shape.rows, shape.contexts, width}) == 3 or width % 16
    num_contexts = sum(start + count for start, count in sizes) + made_up
    assert num_contexts < shape.contexts <= max(2 * shape.rows, 4 * num_contexts) + 8
    assert shape.contexts <= MOST_CONTEXTS


def test_there_are_at_most_five_sizes_of_rows_and_of_contexts_for_each():
    member = Member(LeaseId(1), [], 1)
    shapes = {
        shape_of([Chunk(member, start, count, False)], 2048)
        for start in range(0, 200_000, 111)
        for count in (1, 128, 129, 500, 1000, 2000, 2049)
    }
    of_rows: dict[int, set[int]] = {}
    for shape in shapes:
        if shape is not None:
            of_rows.setdefault(shape.rows, set()).add(shape.contexts)
    assert sorted(of_rows) == [128, 256, 512, 1024, 2176]
    assert all(len(contexts) <= 5 for contexts in of_rows.values())


def test_siblings_of_a_long_cached_prompt_are_computed_as_they_come():
    """A graph would hold a context of each for good."""
    chunks = [Chunk(Member(LeaseId(one), [], 1), 30_000, 20, True) for one in range(8)]
    assert shape_of(chunks, 2048) is None


def test_in_place_a_shape_does_not_depend_on_what_is_cached():
    member = Member(LeaseId(1), [], 1)
    shapes = {shape_of([Chunk(member, start, 900 - start, True)], 64, 512) for start in range(512, 900, 4)}
    assert len(shapes) == 1
