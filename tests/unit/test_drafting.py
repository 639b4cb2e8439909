"""Drafts: copied from the longest match, within bounds of memory, whatever is followed and remembered."""

import random
import time
import tracemalloc

import pytest

from polyrl.engines.builtin.drafting import (
    GRAM,
    MAX_SOURCES,
    NOTHING,
    POOL_SIZE,
    SOURCE_SIZE,
    Draft,
    Drafts,
    DraftSource,
    accepted,
)
from polyrl.ids import LeaseId

PROMPT = [100, 101, 102, 103]


def following(*texts: list[int], drafts: Drafts | None = None, first: int = 1) -> Drafts:
    """Samples 1, 2, ... of one prompt with these answers, all running."""
    its = Drafts() if drafts is None else drafts
    its.follow((LeaseId(first + at), PROMPT, [*PROMPT, *text]) for at, text in enumerate(texts))
    its.check()
    return its


def test_a_draft_goes_on_as_a_sibling_did():
    drafts = following([1, 2, 3, 4, 5, 6, 7, 8], [9, 2, 3, 4])
    assert drafts.draft(LeaseId(2), 3) == Draft([5, 6, 7], 3)
    assert drafts.draft(LeaseId(2), 7) == Draft([5, 6, 7, 8], 3), "as far as the sibling goes"
    assert drafts.draft(LeaseId(1), 7) == NOTHING, "nobody was there before it"


def test_a_draft_goes_on_as_an_earlier_answer_to_the_same_prompt_did():
    drafts = Drafts()
    drafts.remember(LeaseId(7), PROMPT, [*PROMPT, 1, 2, 3, 4, 5])
    following([1, 2, 3], drafts=drafts)
    assert drafts.draft(LeaseId(1), 7) == Draft([4, 5], 6), "three tokens, and the prompt's last three"
    drafts.follow([(LeaseId(9), [55, 56, 57], [55, 56, 57, 1, 2, 3])])
    assert drafts.draft(LeaseId(9), 7) == NOTHING, "of another prompt"


def test_a_draft_goes_on_as_the_prompt_and_the_sample_itself_did():
    drafts = following([101, 102, 103, 8, 9])
    drafts.follow([(LeaseId(2), [4, 5, 6, 7, 8, 9], [4, 5, 6, 7, 8, 9, 1, 4, 5, 6])])
    assert drafts.draft(LeaseId(2), 7).tokens[:3] == [7, 8, 9]
    following([1, 2, 3, 1, 2, 3], drafts=drafts, first=3)
    assert drafts.draft(LeaseId(3), 7).tokens == [1, 2, 3, 1, 2, 3, 1], "a loop goes on with the draft itself"


def test_the_longest_match_wins_and_then_the_most_common_continuation():
    drafts = following([1, 2, 3, 4, 50], [9, 2, 3, 4, 60], [9, 2, 3, 4, 61], [8, 2, 3, 4, 61], [1, 2, 3, 4])
    assert drafts.draft(LeaseId(5), 1) == Draft([50], 7)
    drafts = following([9, 2, 3, 4, 60], [9, 2, 3, 4, 61, 5], [9, 2, 3, 4, 61, 6, 7], [9, 2, 3, 4])
    assert drafts.draft(LeaseId(4), 4).tokens[0] == 61


def test_a_later_turn_finds_the_pool_of_the_first():
    drafts = Drafts()
    drafts.remember(LeaseId(1), PROMPT, [*PROMPT, 1, 2, 3, 4, 5])
    later = [*PROMPT, 9, 9, 77]
    drafts.follow([(LeaseId(2), later, [*later, 1, 2, 3])])
    assert drafts.draft(LeaseId(2), 7).tokens == [4, 5]


def test_tokens_that_come_in_a_burst_are_drafted_from_at_once():
    drafts = following([1, 2])
    drafts.extend(LeaseId(1), [3, 4, 1, 2])
    drafts.extend(LeaseId(1), [3])
    drafts.check()
    assert drafts.draft(LeaseId(1), 2).tokens == [4, 1]
    following([1, 2, 3, 4, 1, 2, 3, 8], drafts=drafts)
    assert drafts.draft(LeaseId(1), 2) == NOTHING, "what followed was not extended again"


@pytest.mark.parametrize("piece", [1, 5, 31, 32, 33, 200])
def test_a_source_indexed_in_pieces_is_indexed_as_at_once(piece):
    draw = random.Random(piece)
    tokens = [draw.randrange(1 << 20) if draw.random() < 0.2 else draw.randrange(9) for _ in range(400)]
    text = DraftSource(tokens)
    while text.index(piece):
        pass
    last = {tuple(tokens[at - GRAM : at]): at for at in range(GRAM, len(tokens))}
    assert text.num_indexed == len(last)
    for gram, at in last.items():
        assert DraftSource(gram).last_gram is not None
        assert text.find(DraftSource(gram).last_gram or 0) == at


def test_memory_stays_within_its_bounds_whatever_comes():
    draw = random.Random(5)
    drafts = Drafts(max_size=3000, max_indexed=900)
    running: dict[LeaseId, tuple[list[int], list[int]]] = {}
    for number in range(600):
        prompt = [draw.randrange(4), *range(10, 10 + draw.randrange(1, 8))]
        if draw.random() < 0.5 or not running:
            running[LeaseId(number)] = (prompt, [*prompt, 5])
        for _, tokens in running.values():
            tokens += [draw.randrange(6) for _ in range(draw.randrange(40))]
        drafts.follow((lease, its, list(tokens)) for lease, (its, tokens) in running.items())
        for lease in list(running):
            assert len(drafts.draft(lease, 7).tokens) <= 7
            drafts.extend(lease, new := [draw.randrange(6)])
            running[lease][1].extend(new)
            if draw.random() < 0.4:
                its, tokens = running.pop(lease)
                drafts.remember(lease, its, tokens)
        drafts.check()
        of_running = sum(SOURCE_SIZE + len(tokens) for _, tokens in running.values())
        assert drafts.size <= 3000 + of_running + (POOL_SIZE + SOURCE_SIZE + 8) * len(running)
    drafts.follow([])
    drafts.check()
    assert drafts.num_indexed == 0, "nothing runs"


def test_a_pool_has_a_bounded_number_of_sources():
    drafts = Drafts()
    for number in range(3 * MAX_SOURCES):
        drafts.remember(LeaseId(number), PROMPT, [*PROMPT, number, 1, 2, 3])
    drafts.check()
    assert drafts.size <= POOL_SIZE + SOURCE_SIZE + len(PROMPT) + MAX_SOURCES * (SOURCE_SIZE + GRAM + 4)


@pytest.mark.parametrize(("num_answers", "num_tokens"), [(1, 1), (4, 15), (8, 500)])
def test_the_bound_is_one_of_bytes_however_short_answers_are(num_answers: int, num_tokens: int):
    drafts = Drafts(max_size=50_000)
    tracemalloc.start()
    try:
        for number in range(1500):
            prompt = [7, *divmod(number, 50), 8]
            for sample in range(num_answers):
                lease = LeaseId(number * num_answers + sample)
                drafts.remember(lease, prompt, [*prompt, *range(sample, sample + num_tokens)])
        num_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    drafts.check()
    assert num_bytes < 1.4 * 4 * 50_000


def test_a_sample_that_is_unknown_or_has_no_room_gets_no_draft():
    drafts = following([1, 2, 3, 1, 2, 3])
    assert drafts.draft(LeaseId(1), 0) == drafts.draft(LeaseId(8), 5) == NOTHING


def test_a_draft_is_accepted_up_to_its_first_wrong_token():
    assert accepted([1, 2, 3], [1, 2, 3, 4]) == 3
    assert accepted([1, 2, 3], [1, 9, 3, 4]) == 1
    assert accepted([], [4]) == 0


def test_an_answer_is_remembered_in_the_same_time_beside_ten_prompts_and_ten_thousand():
    def cost_of_answers(num_prompts: int) -> float:
        drafts = Drafts()
        for number in range(num_prompts):
            drafts.remember(LeaseId(number), prompt := [number, 1, 2, 3], [*prompt, 4, 5])
        costs: list[float] = []
        for turn in range(20):
            began = time.thread_time()
            for number in range(64):
                prompt = [number // 8, 7 + turn, 2, 3]
                drafts.remember(LeaseId(num_prompts + 64 * turn + number), prompt, [*prompt, number, 5])
            costs.append(time.thread_time() - began)
        return min(costs)

    assert cost_of_answers(10_000) < 8 * cost_of_answers(10), "a list of all prompts for each answer: 30 times as much"
