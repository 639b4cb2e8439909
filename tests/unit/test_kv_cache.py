"""Blocks of the KV cache: who holds them, who may share them, and which go first."""

from collections import Counter
from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from polyrl.engines.builtin.kv_cache import KvCache


def compute(cache: KvCache, tokens: Sequence[int]) -> list[int]:
    """Match, compute and publish a text, as somebody who runs alone does."""
    blocks = match(cache, tokens)
    num_matched = len(blocks)
    assert cache.extend(blocks, len(tokens))
    cache.publish(tokens, blocks, len(tokens), num_matched)
    return blocks


def match(cache: KvCache, tokens: Sequence[int]) -> list[int]:
    """Hold what is known of a text, as who begins to run does: at least one token is left to compute."""
    blocks = cache.find(keys_of(cache, tokens[:-1]))
    cache.hold(blocks)
    return blocks


def num_matched(cache: KvCache, tokens: Sequence[int]) -> int:
    blocks = match(cache, tokens)
    num = len(blocks)
    cache.release(blocks)
    return num


def keys_of(cache: KvCache, tokens: Sequence[int]) -> list[bytes]:
    keys: list[bytes] = []
    cache.extend_keys(keys, tokens)
    return keys


def text(num: int, start: int = 0) -> list[int]:
    return list(range(start, start + num))


# Room


def test_a_new_cache_is_free():
    cache = KvCache(10, 4)
    assert (cache.num_free, cache.num_used) == (10, 0)


def test_blocks_that_were_never_taken_cost_nothing():
    cache = KvCache(10**15, 4)
    blocks = compute(cache, text(8))
    cache.forget()
    cache.check()
    assert (blocks, cache.num_free) == ([0, 1], 10**15 - 2)


def test_blocks_grow_only_when_a_token_does_not_fit():
    cache = KvCache(10, 4)
    blocks: list[int] = []
    sizes = [len(blocks) for num in range(10) if cache.extend(blocks, num)]
    assert sizes == [0, 1, 1, 1, 1, 2, 2, 2, 2, 3]
    assert (cache.num_free, cache.num_used) == (7, 3)


def test_with_too_few_blocks_nothing_is_taken():
    cache = KvCache(3, 4)
    blocks: list[int] = []
    assert cache.extend(blocks, 5)
    assert not cache.extend(blocks, 13)
    assert (len(blocks), cache.num_free) == (2, 1)
    assert cache.extend(blocks, 12)


def test_what_is_released_can_be_had_again_and_the_list_is_empty():
    cache = KvCache(3, 4)
    blocks: list[int] = []
    cache.extend(blocks, 12)
    cache.release(blocks)
    assert (blocks, cache.num_free) == ([], 3)


# Sharing


def test_a_published_prefix_is_matched_in_whole_blocks():
    cache = KvCache(10, 4)
    mine = compute(cache, text(10))
    assert match(cache, [*text(8), 99, 98, 97, 96]) == mine[:2]
    assert match(cache, [*text(4), 99, 98, 97, 96, 95]) == mine[:1]
    assert match(cache, [99, *text(9)]) == []


def test_at_least_one_token_is_left_to_compute():
    cache = KvCache(10, 4)
    compute(cache, text(8))
    assert [num_matched(cache, text(num)) for num in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]


def test_a_block_is_matched_only_after_the_same_text_before_it():
    cache = KvCache(10, 2)
    compute(cache, [1, 2, 7, 8])
    compute(cache, [3, 4])
    assert num_matched(cache, [3, 4, 7, 8, 0]) == 1


def test_blocks_are_published_as_they_are_computed():
    cache = KvCache(10, 4)
    blocks: list[int] = []
    cache.extend(blocks, 12)
    num = 0
    known = []
    for num_computed in range(13):
        num = cache.publish(text(12), blocks, num_computed, num)
        known.append(num_matched(cache, text(13)))
    assert known == [computed // 4 for computed in range(13)]


def test_a_shared_block_is_free_only_when_nobody_holds_it():
    cache = KvCache(10, 4)
    first = compute(cache, text(8))
    second = match(cache, text(9))
    cache.release(first)
    assert cache.num_used == 2
    cache.release(second)
    assert cache.num_used == 0


def test_a_released_block_is_matched_until_it_is_evicted():
    cache = KvCache(3, 4)
    compute_and_release(cache, text(12))
    assert num_matched(cache, text(13)) == 3
    compute_and_release(cache, text(4, start=50))
    assert num_matched(cache, text(13)) == 2


def compute_and_release(cache: KvCache, tokens: Sequence[int]) -> None:
    cache.release(compute(cache, tokens))


def test_blocks_that_nobody_can_match_go_first_then_the_longest_unused():
    cache = KvCache(4, 2)
    for start in (10, 20, 30):
        compute_and_release(cache, text(2, start))
    cache.release(match(cache, [10, 11, 0]))
    blocks: list[int] = []
    known = []
    for num in (2, 4, 6, 8):
        assert cache.extend(blocks, num)
        known.append([start for start in (10, 20, 30) if cache.find(keys_of(cache, text(2, start)))])
    assert known == [[10, 20, 30], [10, 30], [10], []]


def test_of_two_equal_blocks_the_first_is_shared_and_the_second_takes_its_place():
    cache = KvCache(4, 4)
    first: list[int] = []
    second: list[int] = []
    cache.extend(first, 4)
    cache.extend(second, 4)
    cache.publish(text(4), first, 4, 0)
    assert cache.publish(text(4), second, 4, 0) == 1
    assert cache.find(keys_of(cache, text(4))) == first
    cache.release(first)
    rest: list[int] = []
    assert cache.extend(rest, 12) and num_matched(cache, text(5)) == 0
    kept = list(second)
    cache.release(second)
    assert cache.find(keys_of(cache, text(4))) == kept
    cache.check()


def test_keys_that_grow_with_the_text_are_those_of_the_whole_text():
    cache = KvCache(4, 4)
    keys: list[bytes] = []
    for num in (0, 3, 9, 9, 30):
        cache.extend_keys(keys, text(num))
    assert keys == keys_of(cache, text(30))
    assert len(set(keys)) == len(keys) == 7


# Other weights


def test_after_other_weights_nothing_is_matched_and_everything_is_still_held():
    cache = KvCache(10, 4)
    held = compute(cache, text(8))
    compute_and_release(cache, text(8, start=50))
    cache.forget()
    assert num_matched(cache, text(9)) == num_matched(cache, text(9, start=50)) == 0
    assert cache.num_used == len(held) == 2


def test_what_goes_on_over_a_change_of_weights_is_never_shared():
    cache = KvCache(10, 4)
    blocks: list[int] = []
    cache.extend(blocks, 6)
    num = cache.publish(text(20), blocks, 6, 0)
    cache.forget()
    for num_computed in (7, 8, 12, 20):
        cache.extend(blocks, num_computed)
        num = cache.publish(text(20), blocks, num_computed, num)
        assert num == num_computed // 4
        assert num_matched(cache, text(21)) == 0
    cache.release(blocks)
    assert num_matched(cache, text(21)) == 0


def test_a_block_that_was_begun_before_the_weights_changed_is_not_shared():
    cache = KvCache(10, 4)
    blocks: list[int] = []
    cache.extend(blocks, 3)
    cache.forget()
    assert cache.publish(text(4), blocks, 4, 0) == 1
    assert num_matched(cache, text(5)) == 0


def test_what_is_computed_anew_after_a_change_of_weights_is_shared():
    cache = KvCache(2, 4)
    old = compute(cache, text(8))
    cache.forget()
    cache.release(old)
    compute_and_release(cache, text(8))
    assert num_matched(cache, text(9)) == 2


# Laws

SOME_TEXT = st.lists(st.integers(0, 1), min_size=1, max_size=9)


class Holders(RuleBasedStateMachine):
    """Some hold blocks of a small cache; the model knows for which text and weights each block was computed."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = KvCache(6, 2)
        self.held: list[list[int]] = []
        self.written: dict[int, tuple[int, list[int]]] = {}
        """By block: the weights, and the text up to its end."""
        self.weights = 0

    @rule(tokens=SOME_TEXT, share=st.floats(0, 1))
    def compute(self, tokens: list[int], share: float) -> None:
        blocks = match(self.cache, tokens)
        num_matched = len(blocks)
        assert num_matched * 2 < len(tokens)
        for index, block in enumerate(blocks):
            assert self.written[block] == (self.weights, tokens[: index * 2 + 2])
        free = self.cache.num_free
        if not self.cache.extend(blocks, len(tokens)):
            assert len(blocks) == num_matched and self.cache.num_free == free
            self.cache.release(blocks)
            return
        others = {block for one in self.held for block in one}
        assert others.isdisjoint(blocks[num_matched:])
        num_computed = max(num_matched * 2, int(share * len(tokens)))
        num = self.cache.publish(tokens, blocks, num_computed, num_matched)
        assert num == num_computed // 2
        for index in range(num_matched, num):
            self.written[blocks[index]] = (self.weights, tokens[: index * 2 + 2])
        self.held.append(blocks)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.held:
            self.cache.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule()
    def weights_change(self) -> None:
        self.cache.forget()
        self.weights += 1

    @invariant()
    def the_books_are_right(self) -> None:
        self.cache.check()
        holders = Counter(block for one in self.held for block in one)
        assert self.cache.num_used == len(holders)
        assert self.cache.num_used + self.cache.num_free == self.cache.num_blocks

    def teardown(self) -> None:
        for one in self.held:
            self.cache.release(one)
        self.cache.check()
        assert self.cache.num_free == self.cache.num_blocks


TestHolders = Holders.TestCase
TestHolders.settings = settings(max_examples=100, stateful_step_count=40)
