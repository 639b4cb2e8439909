"""The book-keeping of KV cache blocks: their holders, the blocks that can be shared, and the order of eviction.

A block has room for the keys and values of `block_tokens` tokens. It is in one of three states:

    empty --extend--> held --release--> idle (was published, it or a tail in it)  --hold---> held
                                   \\--> empty (was not)                          --evicted by extend--> held by another

Rules it keeps:
- A block's key is a 128-bit hash of its tokens and of its parent's key, so that it stands for the whole text up to the
  block's end. Two texts never share a block, short of a collision of BLAKE2b.
- Only whole, computed blocks get a key, each once. If two blocks are equal, the first is matched; once it is evicted,
  the second, as soon as that is idle.
- Blocks held when the weights change get no key any more, nor do the blocks computed after them: they mix two versions.
- Idle blocks are evicted longest unused first, and those of one text from its end.
- A *tail* is the end of a text within a block: a sample whose text begins with that one copies the block, and goes on
  from there. It is found while its block is held or idle; the rest of the block may change. A block has few: a prompt's
  end, and that of the answer after it.

Left out: the memory itself, and the samples that wait for it (batching.py).
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

ROOT = b""
"""The key before the first block. No block has it: theirs are 16 bytes long."""
_KEY_BYTES = 16
_TOKEN_BYTES = 8


class _Tail(NamedTuple):
    parent: bytes
    """The key of the text before its block."""
    text: bytes
    """Its tokens, packed."""


class KvCache:
    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._num_holders: list[int] = []
        """By block, of those that were ever taken: nothing is kept of the others, however many there are."""
        self._keys: list[bytes | None] = []
        self._known: dict[bytes, int] = {}
        """By key, the block to match."""
        self._empty: list[int] = []
        """Taken once, and given back."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Blocks that are known and not held, the longest unused first."""
        self._stale: set[int] = set()
        """Held since before the weights changed."""
        self._tails: dict[_Tail, dict[int, None]] = {}
        """The blocks that begin with a tail."""
        self._tails_of: dict[int, list[_Tail]] = {}
        """By block."""
        self._tail_lengths: dict[bytes, dict[int, int]] = {}
        """By the key of the text before the block: how many tails there are of which length."""

    @property
    def num_free(self) -> int:
        """Blocks that could be had now."""
        return self.num_blocks - len(self._keys) + len(self._empty) + len(self._idle)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    # Sharing

    def extend_keys(self, keys: list[bytes], tokens: Sequence[int]) -> None:
        """Grow `keys`, those of the first whole blocks of `tokens`, in place to those of all of them."""
        start, stop = len(keys) * self.block_tokens, len(tokens) - len(tokens) % self.block_tokens
        if start < stop:
            keys += _chain(keys[-1] if keys else ROOT, tokens[start:stop], self.block_tokens)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest known prefix, without holding them."""
        blocks: list[int] = []
        known = self._known
        for key in keys:
            block = known.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_idle(self, blocks: Sequence[int]) -> int:
        """Return how many of these known blocks are idle."""
        return sum(not self._num_holders[block] for block in blocks)

    def hold(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if not self._num_holders[block]:
                del self._idle[block]
            self._num_holders[block] += 1

    def publish(self, tokens: Sequence[int], blocks: list[int], num_computed: int, num_published: int) -> int:
        """Let others match the whole blocks of the first `num_computed` tokens. Returns how many blocks these are."""
        num_whole = num_computed // self.block_tokens
        if num_whole <= num_published:
            return num_published
        parent = self._key_before(blocks, num_published)
        new = blocks[num_published:num_whole]
        if parent is None or not self._stale.isdisjoint(new):
            return num_whole
        text = tokens[num_published * self.block_tokens : num_whole * self.block_tokens]
        for block, key in zip(new, _chain(parent, text, self.block_tokens), strict=True):
            self._keys[block] = key
            self._known.setdefault(key, block)
        return num_whole

    def tail_key(self, keys: Sequence[bytes], tokens: Sequence[int]) -> bytes:
        """Return the tail's key for all tokens but the last, which is always computed; empty if they have no tail.

        `keys` are those of their whole blocks, or more.
        """
        num_whole = (len(tokens) - 1) // self.block_tokens
        tail = tokens[num_whole * self.block_tokens : -1]
        return _hash(keys[num_whole - 1] if num_whole else ROOT, array("q", tail).tobytes()) if tail else b""

    def find_tail(self, parent: bytes, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Return a block to copy, and the length of its tail: the longest that these tokens after `parent` begin with.

        The block may be reused at once: copy it before anything is written.
        """
        lengths = self._tail_lengths.get(parent)
        if not lengths:
            return None
        raw = array("q", tokens).tobytes()
        for length in sorted(lengths, reverse=True):
            blocks = self._tails.get(_Tail(parent, raw[: _TOKEN_BYTES * length])) if length <= len(tokens) else None
            if blocks:
                return next(iter(blocks)), length
        return None

    def publish_tail(self, tokens: Sequence[int], blocks: Sequence[int], num_tokens: int) -> None:
        """Publish the end of the first `num_tokens` tokens, which are computed; their whole blocks were published."""
        number, length = divmod(num_tokens, self.block_tokens)
        if not length:
            return
        block = blocks[number]
        parent = self._key_before(blocks, number)
        if parent is None or block in self._stale:
            return
        tail = _Tail(parent, array("q", tokens[number * self.block_tokens : num_tokens]).tobytes())
        tails = self._tails_of.setdefault(block, [])
        if tail not in tails:
            tails.append(tail)
            self._tails.setdefault(tail, {})[block] = None
            lengths = self._tail_lengths.setdefault(parent, {})
            lengths[length] = lengths.get(length, 0) + 1

    def _key_before(self, blocks: Sequence[int], number: int) -> bytes | None:
        """Return the key of the text before a block; None if that was not published."""
        return self._keys[blocks[number - 1]] if number else ROOT

    def _forget_tails(self, block: int) -> None:
        for tail in self._tails_of.pop(block, ()):
            its, length = self._tails[tail], len(tail.text) // _TOKEN_BYTES
            del its[block]
            if not its:
                del self._tails[tail]
            lengths = self._tail_lengths[tail.parent]
            lengths[length] -= 1
            if not lengths[length]:
                del lengths[length]
            if not lengths:
                del self._tail_lengths[tail.parent]

    def forget(self) -> None:
        """Match no block computed so far again, since the weights changed. Held blocks stay held."""
        self._stale = {block for block, num in enumerate(self._num_holders) if num}
        self._keys = [None] * len(self._keys)
        self._known.clear()
        self._tails.clear()
        self._tails_of.clear()
        self._tail_lengths.clear()
        self._empty += self._idle
        self._idle.clear()

    def forget_rest(self, blocks: Sequence[int], num_tokens: int) -> None:
        """Match no block after the one with the last of `num_tokens` tokens again, unless another text holds it too."""
        for block in blocks[self.num_blocks_for(num_tokens) :]:
            if self._num_holders[block] > 1:
                continue
            key = self._keys[block]
            if key is not None and self._known.get(key) == block:
                del self._known[key]
            self._keys[block] = None
            self._forget_tails(block)

    # Room

    def extend(self, blocks: list[int], num_tokens: int) -> bool:
        """Grow `blocks` in place until they hold `num_tokens`. With too few left, return False and take none."""
        num_missing = self.num_blocks_for(num_tokens) - len(blocks)
        if num_missing > self.num_free:
            return False
        for _ in range(num_missing):
            block = self._find_room()
            self._num_holders[block] = 1
            blocks.append(block)
        return True

    def _find_room(self) -> int:
        """Return an empty block, the last used first; if there is none, an idle one."""
        if self._empty:
            return self._empty.pop()
        if len(self._keys) == self.num_blocks:
            return self._evict()
        self._num_holders.append(0)
        self._keys.append(None)
        return len(self._keys) - 1

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        key = self._keys[block]
        if key is not None:
            del self._known[key]
            self._keys[block] = None
        self._forget_tails(block)
        return block

    def release(self, blocks: list[int]) -> None:
        """Hold these no longer; clears the list."""
        for block in reversed(blocks):
            self._num_holders[block] -= 1
            if self._num_holders[block]:
                continue
            key = self._keys[block]
            is_known = key is not None and self._known.setdefault(key, block) == block
            if is_known or (key is None and block in self._tails_of):
                self._idle[block] = None
            else:
                self._keys[block] = None
                self._forget_tails(block)
                self._stale.discard(block)
                self._empty.append(block)
        blocks.clear()

    def check(self) -> None:
        """Derive every index again. Raises AssertionError; for tests."""
        held = [block for block, num in enumerate(self._num_holders) if num]
        assert min(self._num_holders, default=0) >= 0
        assert sorted([*held, *self._empty, *self._idle]) == list(range(len(self._keys))), "a block is in one state"
        assert len(self._num_holders) == len(self._keys) <= self.num_blocks
        assert self.num_used == len(held)
        assert all(self._keys[block] == key for key, block in self._known.items())
        found = {*self._known.values(), *(block for block in self._tails_of if self._keys[block] is None)}
        assert set(self._idle) == found - set(held), "idle can be found, and is not held"
        assert all(self._keys[block] is None for block in [*self._empty, *self._stale])
        assert self._stale <= set(held)
        tails = [(block, tail) for block, its in self._tails_of.items() for tail in its]
        assert {tail: set(its) for tail, its in self._tails.items()} == {
            tail: {block for block, other in tails if other == tail} for tail in {tail for _, tail in tails}
        }
        lengths = Counter((tail.parent, len(tail.text) // _TOKEN_BYTES) for _, tail in tails)
        assert lengths == {(one, length): num for one, its in self._tail_lengths.items() for length, num in its.items()}
        assert all(self._tail_lengths.values())
        assert self._tails_of.keys() <= {*held, *self._idle} - self._stale


def _chain(parent: bytes, tokens: Sequence[int], block_tokens: int) -> list[bytes]:
    """Return the keys of whole blocks that follow `parent`."""
    raw = array("q", tokens).tobytes()
    num_bytes = _TOKEN_BYTES * block_tokens
    keys: list[bytes] = []
    for start in range(0, len(raw), num_bytes):
        parent = _hash(parent, raw[start : start + num_bytes])
        keys.append(parent)
    return keys


def _hash(parent: bytes, raw: bytes) -> bytes:
    return blake2b(parent + raw, digest_size=_KEY_BYTES).digest()
