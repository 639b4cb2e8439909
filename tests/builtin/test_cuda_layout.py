"""How prompts lie in a step on a GPU. What is computed from it: tests/gpu, by hand."""

import itertools
import random

from polyrl.engines.builtin.batching import Batching, Chunk, Member
from polyrl.engines.builtin.cuda_layout import lay_out
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
    its = lay_out([chunk], BLOCK, NOWHERE, ROWS)
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


def test_chunks_of_several_samples_lie_one_after_the_other_with_their_contexts():
    draw = random.Random(0)
    chunks, free = [], list(range(100))
    draw.shuffle(free)
    for lease, (start, count, samples) in enumerate([(0, 5, True), (8, 3, False), (6, 1, True)]):
        member = Member(LeaseId(lease), [draw.randrange(100) for _ in range(20)], 100)
        member.blocks = [free.pop() for _ in range(5)]
        chunks.append(Chunk(member, start, count, samples))
    its = lay_out(chunks, BLOCK, NOWHERE)
    assert its.positions.tolist() == [0, 1, 2, 3, 4, 8, 9, 10, 6]
    assert its.rows.tolist() == [4, 8]
    assert its.first_rows.tolist() == [0, 5, 8, 9] and its.longest_rows == 5
    assert its.first_contexts.tolist() == [0, 5, 16, 23] and its.longest_context == 11
    places = its.blocks * BLOCK + its.within
    for number, (member, start, count, _) in enumerate(chunks):
        row, at = its.first_rows[number], its.first_contexts[number]
        assert its.tokens[row : row + count].tolist() == member.tokens[start : start + count]
        context = [member.blocks[token // BLOCK] * BLOCK + token % BLOCK for token in range(start + count)]
        assert places[at : at + start + count].tolist() == context
        assert its.cells[row : row + count].tolist() == context[start:]
