"""Who is computed in the next step, and how much of each: continuous batching with chunked prefill.

    add --> waiting --admitted by plan--> running --remove--> gone
               ^                             |
               +------preempted by plan------+

A running sequence decodes when only its newest token is to be computed, and prefills while there are more.

Rules it keeps:
- All that decode are in every step. Prefills share `max_chunk_tokens` more, in order of admission.
- With `border_tokens`, a sequence is computed in the same pieces whoever else there is: a chunk ends at a multiple of
  it, and waits for a step that has room for it whole. Only what was prefilled is shared: tokens that were decoded had
  other kernels.
- Waiting sequences are admitted in order, when there is prefill left in the step and blocks for all their tokens and
  the next, beside one for each that runs already: nobody is preempted at once. Blocks for the whole prefill are taken
  at admission, so only decoding can run out of them.
- One that waits is passed over while a running sequence prefills the next block that it needs: it will find it cached.
- Out of blocks, the newest is preempted: it waits first in line and is computed again. The oldest never is, so that
  whatever fits the cache alone comes to its end.

It leaves out what tokens are drawn, and when a sequence ends: it runs until it is removed.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, NamedTuple

from polyrl.engines.builtin.kv_cache import KvCache
from polyrl.ids import LeaseId


class Sequence:
    """A text that grows. Batching owns all but `data`; a caller reads."""

    __slots__ = (
        "blocks",
        "data",
        "keys",
        "lease",
        "max_total",
        "num_computed",
        "num_given",
        "num_published",
        "tokens",
    )

    def __init__(self, lease: LeaseId, tokens: list[int], max_total: int, data: Any = None) -> None:
        self.lease = lease
        self.tokens = tokens
        self.max_total = max_total
        """It ends at this many tokens, the given ones among them."""
        self.num_computed = 0
        """Tokens whose keys and values are in the cache."""
        self.num_given = 0
        """Tokens that it had when it last began to wait. They are prefilled, and those drawn since are decoded."""
        self.blocks: list[int] = []
        """Empty when it does not run, and only then."""
        self.num_published = 0
        self.keys: list[bytes] = []
        """Those of the whole blocks that it had when it last began to wait."""
        self.data = data


class Chunk(NamedTuple):
    """Compute tokens[start : start + count]. If it samples, the last of them is the newest, and the next is drawn."""

    sequence: Sequence
    start: int
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]  nobody counts in a chunk
    samples: bool

    @property
    def decodes(self) -> bool:
        """Its one token was drawn here. The last of a prompt, alone in its chunk, is prefilled."""
        return self.count == 1 and self.start >= self.sequence.num_given


class Batching:
    """`border_tokens`: at most `max_chunk_tokens`; 0: chunks end where a step is full."""

    def __init__(self, cache: KvCache, max_running: int, max_chunk_tokens: int, border_tokens: int = 0) -> None:
        self.num_preemptions = 0
        self._cache = cache
        self._max_running = max_running
        self._max_chunk_tokens = max_chunk_tokens
        self._border_tokens = border_tokens
        self._running: dict[LeaseId, Sequence] = {}
        """In order of admission."""
        self._waiting: OrderedDict[LeaseId, Sequence] = OrderedDict()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def __contains__(self, lease: LeaseId) -> bool:
        return lease in self._running or lease in self._waiting

    def fits(self, num_tokens: int) -> bool:
        """Could a sequence of so many tokens ever run, if alone?"""
        return self._cache.num_blocks_for(num_tokens) <= self._cache.num_blocks

    def add(self, sequence: Sequence) -> None:
        """It waits from now on. It must have fewer than `max_total` tokens, and these must fit the cache alone."""
        self._cache.extend_keys(sequence.keys, sequence.tokens)
        sequence.num_given = len(sequence.tokens)
        self._waiting[sequence.lease] = sequence

    def remove(self, lease: LeaseId) -> Sequence | None:
        """It ended or is unwanted: its place and its blocks are free at once, even when it is part of a step."""
        sequence = self._waiting.pop(lease, None)
        if sequence is None:
            sequence = self._running.pop(lease, None)
        if sequence is not None:
            self._cache.release(sequence.blocks)
        return sequence

    def remove_all(self) -> list[LeaseId]:
        leases = [*self._running, *self._waiting]
        for lease in leases:
            self.remove(lease)
        return leases

    def append(self, sequence: Sequence, tokens: Iterable[int]) -> None:
        """Tokens were drawn: the last of them is computed in a later step."""
        sequence.tokens += tokens

    def reserve(self, num_tokens: int) -> bool:
        """Room for so many more tokens of every one that runs, or for none. Nobody is preempted for it."""
        cache = self._cache
        needed = [
            (one.blocks, len(one.tokens) + num_tokens - 1)
            for one in self._running.values()
            if cache.num_blocks_for(len(one.tokens) + num_tokens - 1) > len(one.blocks)
        ]
        if sum(cache.num_blocks_for(num) - len(blocks) for blocks, num in needed) > cache.num_free:
            return False
        return all(cache.extend(blocks, num) for blocks, num in needed)

    # Steps

    def plan(self) -> list[Chunk]:
        """The next step: those that decode, then those that prefill."""
        self._make_room()
        new_chunk = tuple.__new__  # a third of the time of Chunk(...)
        decoding: list[Chunk] = []
        prefilling: list[Sequence] = []
        for sequence in self._running.values():
            start = sequence.num_computed
            num_left = len(sequence.tokens) - start
            if num_left == 1:
                decoding.append(new_chunk(Chunk, (sequence, start, 1, True)))
            elif num_left:
                prefilling.append(sequence)
        if prefilling or self._waiting:
            decoding += self._prefill(prefilling)
        return decoding

    def computed(self, chunks: Iterable[Chunk]) -> None:
        """The step was run."""
        cache = self._cache
        block_tokens = cache.block_tokens
        for sequence, start, count, _ in chunks:
            if not sequence.blocks:  # removed while the step ran
                continue
            end = sequence.num_computed = start + count
            if count > 1 or not end % block_tokens:
                if self._border_tokens:
                    end = min(end, sequence.num_given)
                published = cache.publish(sequence.tokens, sequence.blocks, end, sequence.num_published)
                sequence.num_published = published

    def recompute_all(self) -> None:
        """The weights changed, and nothing computed under the old ones is to be used: all begin anew, in order."""
        for sequence in reversed(list(self._running.values())):
            self._send_back(sequence)
        self._cache.forget()

    def _make_room(self) -> None:
        """A block for each that decodes across the end of its last; the newest make way for the others."""
        block_tokens = self._cache.block_tokens
        for sequence in [one for one in self._running.values() if not one.num_computed % block_tokens]:
            while sequence.blocks and not self._cache.extend(sequence.blocks, len(sequence.tokens)):
                self.num_preemptions += 1
                self._send_back(next(reversed(self._running.values())))

    def _send_back(self, sequence: Sequence) -> None:
        """From running to the front of the queue."""
        del self._running[sequence.lease]
        self._cache.release(sequence.blocks)
        sequence.num_computed = sequence.num_published = 0
        self.add(sequence)
        self._waiting.move_to_end(sequence.lease, last=False)

    def _prefill(self, prefilling: list[Sequence]) -> list[Chunk]:
        chunks: list[Chunk] = []
        budget = self._max_chunk_tokens
        for sequence in prefilling:
            count = self._count(sequence, sequence.num_computed, budget)
            if not count:
                return chunks
            chunks.append(_chunk(sequence, count))
            budget -= count
        return chunks + self._admit(prefilling, budget)

    def _admit(self, prefilling: list[Sequence], budget: int) -> list[Chunk]:
        """Begin with those that wait, as far as places, blocks and the budget go."""
        chunks: list[Chunk] = []
        under_way = {key for sequence in prefilling for key in sequence.keys[sequence.num_published :]}
        for sequence in self._waiting.values():
            if not budget or self.num_running == self._max_running:
                break
            usable = sequence.keys[: (len(sequence.tokens) - 1) // self._cache.block_tokens]
            cached = self._cache.find(usable)
            if len(cached) < len(usable) and usable[len(cached)] in under_way:
                continue
            count = self._count(sequence, len(cached) * self._cache.block_tokens, budget)
            if not count or not self._take_blocks(sequence, cached):
                break
            self._running[sequence.lease] = sequence
            under_way.update(sequence.keys[len(cached) :])
            chunks.append(_chunk(sequence, count))
            budget -= count
        for chunk in chunks:
            del self._waiting[chunk.sequence.lease]
        return chunks

    def _count(self, sequence: Sequence, start: int, budget: int) -> int:
        """How many tokens from `start` are prefilled in this step."""
        num_left = len(sequence.tokens) - start
        if not self._border_tokens:
            return min(num_left, budget)
        whole = min(num_left, self._border_tokens - start % self._border_tokens)
        return whole if whole <= budget else 0

    def _take_blocks(self, sequence: Sequence, cached: list[int]) -> bool:
        """Take what is cached and room for the rest, if there is room for a token more, and a block for each other."""
        cache = self._cache
        num_new = cache.num_blocks_for(len(sequence.tokens) + 1) - len(cached) + cache.num_idle(cached)
        if num_new + self.num_running > cache.num_free:
            return False
        cache.hold(cached)
        sequence.blocks += cached
        sequence.num_published = len(cached)
        sequence.num_computed = len(cached) * cache.block_tokens
        return cache.extend(sequence.blocks, len(sequence.tokens))


def _chunk(sequence: Sequence, count: int) -> Chunk:
    start = sequence.num_computed
    return Chunk(sequence, start, count, start + count == len(sequence.tokens))
