"""Plan the next step, that is which samples and how much of each: continuous batching with chunked prefill.

    add --> waiting --admitted by plan--> running --remove--> gone
               ^                             |
               +------preempted by plan------+

A running member decodes when only its newest token is to be computed, and prefills while there are more.

Rules it keeps:
- Every decoding member is in every step. Prefills share `max_chunk_tokens` more, in order of admission.
- With `border_tokens`, a member is computed in the same pieces regardless of the other members: a chunk ends at a
  multiple of it, and waits for a step that has room for the whole chunk. Only prefilled blocks are shared: decoded
  tokens were computed by other kernels.
- Waiting members are admitted in order, when the step has prefill left and there are blocks for all their tokens and
  the next one, beside one block for each running member: so an admission preempts no member at once. Blocks for the
  whole prefill are taken at admission, so only decoding can run out of them.
- A member that leaves publishes what it has computed, up to its last token: the next turn of a conversation begins with
  it. With `border_tokens` it does not, and only equal texts share a tail.
- A waiting member is passed over while a running member prefills the next block that it needs: it will find it cached.
  So is a member with the same text as one that is being prefilled: it copies the block that the text ends in, and
  computes only the last token.
- Out of blocks, the newest member is preempted: it waits first in line and is computed again. The oldest never is, so
  that every sample that fits into the cache alone can end.

Left out: drawing tokens, and the end of a member, which runs until it is removed.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, NamedTuple

from polyrl.engines.builtin.kv_cache import ROOT, KvCache
from polyrl.ids import LeaseId


class Member:
    """A sample in the batch: a text that grows. Batching owns all but `data`; a caller reads."""

    __slots__ = (
        "blocks",
        "data",
        "keys",
        "lease",
        "max_total",
        "num_computed",
        "num_given",
        "num_kept",
        "num_published",
        "tail",
        "tokens",
    )

    def __init__(
        self, lease: LeaseId, tokens: list[int], max_total: int, data: Any = None, num_kept: int | None = None
    ) -> None:
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
        """The keys of the whole blocks that it had when it last began to wait."""
        self.tail = b""
        """The key of all tokens but the last, that it had then."""
        self.data = data
        self.num_kept = num_kept
        """Tokens whose cache is kept when it ends; None: all, as a later text may begin with them."""


class Chunk(NamedTuple):
    """Compute tokens[start : start + count]. If it samples, the last of them is the newest, and the next is drawn."""

    member: Member
    start: int
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]  nobody counts in a chunk
    samples: bool

    @property
    def decodes(self) -> bool:
        """Whether the chunk is one token that was drawn here. A prompt's last token, alone in a chunk, is prefilled."""
        return self.count == 1 and self.start >= self.member.num_given


class Batching:
    """`border_tokens`: at most `max_chunk_tokens`; 0: chunks end where a step is full."""

    def __init__(self, cache: KvCache, max_running: int, max_chunk_tokens: int, border_tokens: int = 0) -> None:
        self.num_preemptions = 0
        self.num_prefilled = 0
        """Tokens that members began to run with, and that were not in the cache; those of the preempted count again."""
        self.num_reused = 0
        """Such tokens that were in the cache."""
        self.copies: list[tuple[int, int]] = []
        """From block to block, before the step that was planned last; all are read before one is written."""
        self._cache = cache
        self._max_running = max_running
        self._max_chunk_tokens = max_chunk_tokens
        self._border_tokens = border_tokens
        self._running: dict[LeaseId, Member] = {}
        """In order of admission."""
        self._waiting: OrderedDict[LeaseId, Member] = OrderedDict()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waits_for_blocks(self) -> bool:
        """Whether members wait although there are places for them."""
        return bool(self._waiting) and len(self._running) < self._max_running

    def __contains__(self, lease: LeaseId) -> bool:
        return lease in self._running or lease in self._waiting

    def fits(self, num_tokens: int) -> bool:
        """Return whether a member of `num_tokens` tokens could ever run, if alone."""
        return self._cache.num_blocks_for(num_tokens) <= self._cache.num_blocks

    def add(self, member: Member) -> None:
        """Queue a member. It must have fewer than `max_total` tokens, and these must fit into an empty cache."""
        self._cache.extend_keys(member.keys, member.tokens)
        member.tail = self._cache.tail_key(member.keys, member.tokens)
        member.num_given = len(member.tokens)
        self._waiting[member.lease] = member

    def remove(self, lease: LeaseId) -> Member | None:
        """Remove a member that ended or is unwanted. Its slot and blocks are free at once, even during a step."""
        member = self._waiting.pop(lease, None)
        if member is None:
            member = self._running.pop(lease, None)
            if member is not None and member.num_kept is not None:
                self._cache.forget_rest(member.blocks, member.num_kept)
            elif member is not None and not self._border_tokens:
                self._cache.publish_tail(member.tokens, member.blocks, member.num_computed)
        if member is not None:
            self._cache.release(member.blocks)
        return member

    def remove_all(self) -> list[LeaseId]:
        leases = [*self._running, *self._waiting]
        for lease in leases:
            self.remove(lease)
        return leases

    def append(self, member: Member, tokens: Iterable[int]) -> None:
        """Add drawn tokens: the last of them is computed in a later step."""
        member.tokens += tokens

    def reserve(self, num_tokens: int) -> bool:
        """Reserve blocks for `num_tokens` more tokens of every running member, or for none, without preemption."""
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
        """Return the chunks of the next step: decoding members first, then prefilling ones."""
        self.copies = []
        self._make_room()
        new_chunk = tuple.__new__  # a third of the time of Chunk(...)
        decoding: list[Chunk] = []
        prefilling: list[Member] = []
        for member in self._running.values():
            start = member.num_computed
            num_left = len(member.tokens) - start
            if num_left == 1:
                decoding.append(new_chunk(Chunk, (member, start, 1, True)))
            elif num_left:
                prefilling.append(member)
        if prefilling or self._waiting:
            decoding += self._prefill(prefilling)
        return decoding

    def computed(self, chunks: Iterable[Chunk]) -> None:
        """Note that the step was run."""
        cache = self._cache
        block_tokens = cache.block_tokens
        for member, start, count, _ in chunks:
            if not member.blocks:  # removed while the step ran
                continue
            end = member.num_computed = start + count
            if count > 1 or not end % block_tokens:
                last = min(end, member.num_given) if self._border_tokens else end
                published = cache.publish(member.tokens, member.blocks, last, member.num_published)
                member.num_published = published
            if end == member.num_given:
                cache.publish_tail(member.tokens, member.blocks, end - 1)

    def recompute_all(self) -> None:
        """Begin all samples anew, in order: nothing that was computed under the former weights is to be used."""
        for member in reversed(list(self._running.values())):
            self._send_back(member)
        self._cache.forget()

    def _make_room(self) -> None:
        """Give a block to each sample that decodes across the end of its last; the newest make way for the others."""
        block_tokens = self._cache.block_tokens
        for member in [one for one in self._running.values() if not one.num_computed % block_tokens]:
            while member.blocks and not self._cache.extend(member.blocks, len(member.tokens)):
                self.num_preemptions += 1
                self._send_back(next(reversed(self._running.values())))

    def _send_back(self, member: Member) -> None:
        """Move a running member to the front of the queue."""
        del self._running[member.lease]
        self._cache.release(member.blocks)
        member.num_computed = member.num_published = 0
        self.add(member)
        self._waiting.move_to_end(member.lease, last=False)

    def _prefill(self, prefilling: list[Member]) -> list[Chunk]:
        chunks: list[Chunk] = []
        budget = self._max_chunk_tokens
        for member in prefilling:
            count = self._count(member, member.num_computed, budget)
            if not count:
                return chunks
            chunks.append(_chunk(member, count))
            budget -= count
        return chunks + self._admit(prefilling, budget)

    def _admit(self, prefilling: list[Member], budget: int) -> list[Chunk]:
        """Begin with those that wait, as far as places, blocks and the budget go."""
        chunks: list[Chunk] = []
        under_way = {key for member in prefilling for key in _keys_to_come(member, member.num_published)}
        for member in self._waiting.values():
            if not budget or self.num_running == self._max_running:
                break
            cached, copied, missing = self._find(member)
            if missing in under_way:
                continue
            start = len(cached) * self._cache.block_tokens + (0 if copied is None else copied[1])
            count = self._count(member, start, budget)
            if not count or not self._take_blocks(member, cached):
                break
            if copied is not None:
                self.copies.append((copied[0], member.blocks[len(cached)]))
                member.num_computed = start
            self._running[member.lease] = member
            self.num_reused += member.num_computed
            self.num_prefilled += len(member.tokens) - member.num_computed
            under_way.update(_keys_to_come(member, len(cached)))
            chunks.append(_chunk(member, count))
            budget -= count
        for chunk in chunks:
            del self._waiting[chunk.member.lease]
        return chunks

    def _find(self, member: Member) -> tuple[list[int], tuple[int, int] | None, bytes | None]:
        """Return the cached blocks that a member can share, one that it can copy with how many of its tokens, and the
        key of the next it lacks."""
        block_tokens, num_before_last = self._cache.block_tokens, len(member.tokens) - 1
        usable = member.keys[: num_before_last // block_tokens]
        cached = self._cache.find(usable)
        start = len(cached) * block_tokens
        rest = member.tokens[start : min(start + block_tokens, num_before_last)]
        copied = self._cache.find_tail(member.keys[len(cached) - 1] if cached else ROOT, rest) if rest else None
        if len(cached) < len(usable):
            return cached, None if self._border_tokens else copied, usable[len(cached)]
        is_whole = copied is not None and copied[1] == len(rest)
        if self._border_tokens and not is_whole:
            copied = None
        return cached, copied, member.tail if member.tail and not is_whole else None

    def _count(self, member: Member, start: int, budget: int) -> int:
        """Return how many tokens from `start` are prefilled in this step."""
        num_left = len(member.tokens) - start
        if not self._border_tokens:
            return min(num_left, budget)
        whole = min(num_left, self._border_tokens - start % self._border_tokens)
        return whole if whole <= budget else 0

    def _take_blocks(self, member: Member, cached: list[int]) -> bool:
        """Take what is cached and room for the rest, if there is room for a token more, and a block for each other."""
        cache = self._cache
        num_new = cache.num_blocks_for(len(member.tokens) + 1) - len(cached) + cache.num_idle(cached)
        if num_new + self.num_running > cache.num_free:
            return False
        cache.hold(cached)
        member.blocks += cached
        member.num_published = len(cached)
        member.num_computed = len(cached) * cache.block_tokens
        return cache.extend(member.blocks, len(member.tokens))


def _keys_to_come(member: Member, num_known: int) -> list[bytes]:
    """Return the keys of what a member computes and others may wait for.

    Its tail is one of them only if it draws more than one token: what a member leaves behind may be evicted at once.
    """
    keys = member.keys[num_known:]
    return [*keys, member.tail] if member.max_total > len(member.tokens) + 1 else keys


def _chunk(member: Member, count: int) -> Chunk:
    start = member.num_computed
    return Chunk(member, start, count, start + count == len(member.tokens))
