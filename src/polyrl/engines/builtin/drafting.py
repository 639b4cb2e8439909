"""Drafts of the next tokens, copied from sources with the same recent tokens: the sample's own answer, the others of
its group, and earlier ones to its prompt, or the prompt itself.

Every source is indexed by its *grams*: each run of GRAM tokens points to the place after its last occurrence. A draft
is what followed the longest match in any of the sources; where several match equally well, the most common
continuation.

Rules kept here:
- A draft is only a hint. It never decides a token (steps.py), so sources of older versions and other samples will do.
- Sources with one prompt share a *pool*. The prompt of a later turn begins with that of the first, and finds its pool.
- Memory is bounded: `MAX_SIZE` for all pools and sources, `MAX_INDEXED` tokens indexed, `MAX_SOURCES` a pool. The pool
  that was longest unused goes first. Only pools with running samples have indexes, built a part at a time
  (`BUILD_TOKENS`).

Pure: no clock, no I/O. Left out: whether a draft is worth its verification (gate.py).
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from polyrl.ids import LeaseId

GRAM = 3
MAX_MATCH = 16
"""Matches are compared up to this length."""
MAX_SIZE = 1 << 22
"""In tokens of four bytes: 16 MiB."""
SOURCE_SIZE = 72
"""The overhead of a source, in tokens of four bytes. Short answers are mostly this."""
POOL_SIZE = 128
"""The overhead of a pool beside its sources."""
MAX_INDEXED = 1 << 19
"""About 50 MB."""
MAX_SOURCES = 32
BUILD_TOKENS = 8192
"""Tokens that one `follow` indexes at most, about a millisecond."""
_BITS = 21
_MASK = (1 << _BITS * GRAM) - 1
_MANY = 32
"""From so many tokens on, numpy indexes faster than a loop."""


class Draft(NamedTuple):
    tokens: list[int]
    match: int
    """How many tokens before it were found in the source that it was copied from; 0: there is no draft."""


NOTHING = Draft([], 0)


class DraftSource:
    """Tokens that drafts are copied from, and their index. `num_before`: tokens of the sample that are left out."""

    __slots__ = ("_after", "_next", "num_before", "tokens")

    def __init__(self, tokens: Sequence[int], num_before: int = 0) -> None:
        self.tokens = array("i", tokens)
        self.num_before = num_before
        self._after: dict[int, int] = {}
        """By gram, the place of the token after its last occurrence."""
        self._next = GRAM

    @property
    def size(self) -> int:
        return SOURCE_SIZE + len(self.tokens)

    @property
    def num_indexed(self) -> int:
        return len(self._after)

    def index(self, most: int) -> int:
        """Index up to `most` more tokens, and return how many they were. The newest is indexed when one follows it."""
        start = self._next
        end = min(len(self.tokens), start + most)
        if end <= start:
            return 0
        recent = self.tokens[start - GRAM : end - 1]
        if end - start >= _MANY:
            numbers = np.array(recent, np.int64)
            num = end - start
            grams = numbers[:num].copy()
            for behind in range(1, GRAM):
                grams = (grams << _BITS) | numbers[behind : behind + num]
            self._after.update(zip(grams.tolist(), range(start, end), strict=True))
        else:
            gram = 0
            for number, token in enumerate(recent, start - GRAM + 1):
                gram = ((gram << _BITS) | token) & _MASK
                if number >= start:
                    self._after[gram] = number
        self._next = end
        return end - start

    def forget_index(self) -> None:
        self._after = {}
        self._next = GRAM

    def find(self, gram: int) -> int | None:
        return self._after.get(gram)

    @property
    def last_gram(self) -> int | None:
        if len(self.tokens) < GRAM:
            return None
        gram = 0
        for token in self.tokens[-GRAM:]:
            gram = (gram << _BITS) | token
        return gram


class _Pool:
    """The sources of one prompt."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.prompt = DraftSource(prompt)
        self.running: dict[LeaseId, DraftSource] = {}
        self.earlier: OrderedDict[int, DraftSource] = OrderedDict()
        """Answers that ended, the newest last."""
        self.num_ended = 0

    @property
    def size(self) -> int:
        return POOL_SIZE + sum(source.size for source in self.all_sources)

    @property
    def all_sources(self) -> list[DraftSource]:
        return [self.prompt, *self.running.values(), *self.earlier.values()]

    @property
    def sources(self) -> list[DraftSource]:
        """The sources of drafts, the likeliest to be needed first."""
        its = [*self.running.values(), *reversed(self.earlier.values())][: MAX_SOURCES - 1]
        return [*its, self.prompt]


class Drafts:
    """The pools of an engine."""

    def __init__(self, max_size: int = MAX_SIZE, max_indexed: int = MAX_INDEXED) -> None:
        self._max_size, self._max_indexed = max_size, max_indexed
        self._pools: OrderedDict[bytes, _Pool] = OrderedDict()
        """By prompt, the longest unused first."""
        self._lengths: Counter[int] = Counter()
        """How many prompts there are of which length."""
        self._last: tuple[Sequence[int], bytes] = [], b""
        """The prompt that was looked for last, and its pool: answers of a group follow each other."""
        self._pool_of: dict[LeaseId, _Pool] = {}
        self._sources: dict[LeaseId, list[DraftSource]] = {}
        """The sources beside its own that a running sample is drafted from."""
        self.size = 0
        self.num_indexed = 0

    def follow(self, samples: Iterable[tuple[LeaseId, Sequence[int], Sequence[int]]]) -> None:
        """Take in the samples that run now: lease, prompt, and prompt with answer so far. Others run no longer."""
        running: set[LeaseId] = set()
        for lease, prompt, tokens in samples:
            running.add(lease)
            self._follow_one(lease, prompt, tokens)
        for lease in [one for one in self._pool_of if one not in running]:
            self._retire(lease)
        budget = BUILD_TOKENS
        self._sources = {}
        for lease, pool in self._pool_of.items():
            sources = pool.sources
            own = pool.running[lease]
            self._sources[lease] = [one for one in sources if one is not own]
            budget -= self._index(own, budget)
            for source in sources:
                budget -= self._index(source, budget)
        self._make_room()

    def extend(self, lease: LeaseId, tokens: Sequence[int]) -> None:
        """Add tokens to a running sample that is followed."""
        own = self._pool_of[lease].running[lease]
        own.tokens.extend(tokens)
        self.size += len(tokens)
        self._index(own, len(tokens))

    def remember(self, lease: LeaseId, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """Remember a sample that ended. `tokens` are its prompt and its answer."""
        if lease in self._pool_of:
            self._follow_one(lease, prompt, tokens)
            self._retire(lease)
        else:
            pool = self._find_or_open(prompt)
            self._keep(pool, self._new_source(pool, tokens))
        self._make_room()

    def draft(self, lease: LeaseId, most: int) -> Draft:
        """Draft up to `most` tokens for a sample that is followed."""
        pool = self._pool_of.get(lease)
        if pool is None or most < 1:
            return NOTHING
        own = pool.running[lease]
        gram = own.last_gram
        if gram is None:
            return NOTHING
        best, found = 0, []
        for source in (own, *self._sources[lease]):
            at = source.find(gram)
            if at is None:
                continue
            match = _match(own.tokens, source.tokens, at)
            if match > best:
                best, found = match, []
            if match == best:
                found.append((source, at))
        return Draft(_continue(found, own, most), best) if found else NOTHING

    # Pools

    def _follow_one(self, lease: LeaseId, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        pool = self._pool_of.get(lease)
        if pool is None:
            pool = self._pool_of[lease] = self._find_or_open(prompt)
            pool.running[lease] = self._new_source(pool, tokens)
            return
        own = pool.running[lease]
        new = tokens[own.num_before + len(own.tokens) :]
        own.tokens.extend(new)
        self.size += len(new)

    def _new_source(self, pool: _Pool, tokens: Sequence[int]) -> DraftSource:
        num_before = max(0, len(pool.prompt.tokens) - GRAM)
        source = DraftSource(tokens[num_before:], num_before)
        self.size += source.size
        return source

    def _find_or_open(self, prompt: Sequence[int]) -> _Pool:
        """Return the pool whose prompt is the longest that this one begins with; else a new one."""
        last, its = self._last
        if its in self._pools and last == prompt:  # a pool that was opened since cannot be a longer beginning
            self._pools.move_to_end(its)
            return self._pools[its]
        raw = array("i", prompt).tobytes()
        hashed, done, found = blake2b(digest_size=16), 0, None
        for length in sorted(one for one in self._lengths if one <= len(prompt)):
            hashed.update(raw[4 * done : 4 * length])
            done = length
            key = hashed.digest()
            if key in self._pools:
                found = key
        if found is None:
            hashed.update(raw[4 * done :])
            found = hashed.digest()
            self._pools[found] = pool = _Pool(prompt)
            self._lengths[len(prompt)] += 1
            self.size += pool.size
        self._pools.move_to_end(found)
        self._last = list(prompt), found
        return self._pools[found]

    def _retire(self, lease: LeaseId) -> None:
        pool = self._pool_of.pop(lease)
        self._sources.pop(lease, None)
        self._keep(pool, pool.running.pop(lease))
        if not pool.running:
            for source in pool.all_sources:
                self._forget_index(source)

    def _keep(self, pool: _Pool, source: DraftSource) -> None:
        pool.earlier[pool.num_ended] = source
        pool.num_ended += 1
        if len(pool.earlier) > MAX_SOURCES:
            _, oldest = pool.earlier.popitem(last=False)
            self._forget(oldest)

    # Bounds

    def _index(self, source: DraftSource, most: int) -> int:
        before = source.num_indexed
        num = source.index(min(most, self._max_indexed - self.num_indexed))
        self.num_indexed += source.num_indexed - before
        return num

    def _forget_index(self, source: DraftSource) -> None:
        self.num_indexed -= source.num_indexed
        source.forget_index()

    def _forget(self, source: DraftSource) -> None:
        self._forget_index(source)
        self.size -= source.size

    def _make_room(self) -> None:
        """Drop earlier answers of the pools that were longest unused, and pools that nothing runs in."""
        for _ in range(len(self._pools)):
            if self.size <= self._max_size:
                return
            key, pool = next(iter(self._pools.items()))
            while pool.earlier and self.size > self._max_size:
                self._forget(pool.earlier.popitem(last=False)[1])
            if pool.running:
                self._pools.move_to_end(key)
            elif not pool.earlier:
                self._drop(key, pool)

    def _drop(self, key: bytes, pool: _Pool) -> None:
        self._forget(pool.prompt)
        self.size -= POOL_SIZE
        del self._pools[key]
        length = len(pool.prompt.tokens)
        self._lengths[length] -= 1
        if not self._lengths[length]:
            del self._lengths[length]

    def check(self) -> None:
        """Derive every count again. Raises AssertionError; for tests."""
        sources = [source for pool in self._pools.values() for source in pool.all_sources]
        assert self.size == sum(pool.size for pool in self._pools.values())
        assert self.num_indexed == sum(one.num_indexed for one in sources) <= self._max_indexed
        assert self._lengths == Counter(len(pool.prompt.tokens) for pool in self._pools.values())
        assert {lease for pool in self._pools.values() for lease in pool.running} == self._pool_of.keys()


def _match(own: "array[int]", other: "array[int]", at: int) -> int:
    """Return how many tokens before `at` are the last of `own`: those of the last gram at least."""
    most = min(MAX_MATCH, len(own), at)
    num = GRAM
    while num < most and own[-1 - num] == other[at - 1 - num]:
        num += 1
    return num


def _continue(found: list[tuple[DraftSource, int]], own: DraftSource, most: int) -> list[int]:
    """Go on as most of these places do, token by token. The sample's own source goes on with the draft itself."""
    draft: list[int] = []
    while len(draft) < most:
        here = [(token, source, at) for source, at in found if (token := _at(source, at, own, draft)) is not None]
        if not here:
            break
        token = here[0][0] if len(here) == 1 else Counter(one[0] for one in here).most_common(1)[0][0]
        draft.append(token)
        found = [(source, at + 1) for its, source, at in here if its == token]
    return draft


def _at(source: DraftSource, at: int, own: DraftSource, draft: list[int]) -> int | None:
    num = len(source.tokens)
    if at < num:
        return source.tokens[at]
    return draft[at - num] if source is own and at - num < len(draft) else None


def accepted(draft: Sequence[int], drawn: Sequence[int]) -> int:
    """Return how many tokens of the draft the model drew itself. It drew one more, which stands too."""
    num = 0
    while num < len(draft) and draft[num] == drawn[num]:
        num += 1
    return num
