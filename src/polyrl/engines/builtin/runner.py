"""Runs a step of the model: from chunks of samples (batching.py) to the tokens that were drawn.

The tokens of all chunks travel as one flat row, without padding: one token of each decoding sample first, then the
prefilled chunks. Only rows whose next token is wanted go through the output layer. Fewer rows than attention.MIN_ROWS
are made up to that number, so that a sample alone is computed as it is in a crowd.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from polyrl.engines.builtin import sampling
from polyrl.engines.builtin.attention import MIN_ROWS, PIECE, PagedKeysAndValues, Rows, Step
from polyrl.engines.builtin.batching import Chunk
from polyrl.engines.builtin.models import Loaded
from polyrl.wire.frames import Sampling


class Wanted(NamedTuple):
    """How a sample's next token is drawn."""

    sampling: Sampling
    seed: int
    position: int
    """Of the token in the sample's answer."""


class Drawn(NamedTuple):
    tokens: list[int]
    logprobs: list[float]


class Runner:
    def __init__(self, loaded: Loaded, num_blocks: int, block_tokens: int) -> None:
        self._loaded = loaded
        self._block_tokens = block_tokens
        self._scratch = num_blocks * block_tokens
        """The slot of rows that make up the number."""
        self._parameter = next(loaded.model.parameters())
        self._device: torch.device = self._parameter.device
        self._paged: PagedKeysAndValues | None = None
        self._any_mask = torch.zeros((1, 1, 1, 1), dtype=self._parameter.dtype, device=self._device)
        """A mask of four dimensions is passed on as it is; ours is never looked at."""
        self.wake()

    def wake(self) -> None:
        if self._paged is None:
            one = self._loaded
            num_slots = self._scratch + 1
            self._paged = PagedKeysAndValues(one.num_layers, num_slots, one.num_kv_heads, one.head_dim, self._parameter)

    def sleep(self) -> None:
        """Free the cache's memory. What was in it must be computed again."""
        self._paged = None

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk], wanted: Sequence[Wanted]) -> Drawn:
        """Run a step. `wanted` has an entry for each chunk that samples, in order."""
        flat = _lay_out(chunks, self._block_tokens, self._scratch)
        logits = self._loaded.model(
            input_ids=torch.from_numpy(flat.tokens).unsqueeze(0),
            position_ids=torch.from_numpy(flat.positions).unsqueeze(0),
            attention_mask=self._any_mask,
            use_cache=False,
            logits_to_keep=torch.from_numpy(flat.sampled_rows),
            step=Step(
                torch.from_numpy(flat.slots), tuple(_rows(part, self._loaded.num_kv_heads) for part in flat.parts)
            ),
            paged=self._paged,
        ).logits[0, : len(wanted)]
        if not wanted:
            return Drawn([], [])
        draws = sampling.plan_draws(
            [one.sampling for one in wanted],
            [one.seed for one in wanted],
            [one.position for one in wanted],
            self._device,
        )
        tokens, logprobs = sampling.draw(logits, draws)
        return Drawn(tokens.tolist(), logprobs.tolist())


Numbers = np.ndarray[Any, np.dtype[np.int64]]


class _Part(NamedTuple):
    """As attention.Rows, in slots."""

    first: int
    contexts: Numbers
    """(contexts, padded length)"""
    last: Numbers
    """(rows,)"""


class _Flat(NamedTuple):
    tokens: Numbers
    positions: Numbers
    slots: Numbers
    parts: list[_Part]
    sampled_rows: Numbers


def _lay_out(chunks: Sequence[Chunk], block_tokens: int, scratch: int) -> _Flat:
    """Rows in the order of the chunks. Chunks of one token that samples come first: they decode."""
    num_decoding = 0
    while num_decoding < len(chunks) and chunks[num_decoding].count == 1 and chunks[num_decoding].samples:
        num_decoding += 1
    tokens: list[int] = []
    positions: list[int] = []
    sampled: list[int] = []
    slots: list[int] = []
    contexts: list[Numbers] = []
    parts: list[_Part] = []
    within = np.arange(block_tokens)
    for number, (sequence, start, count, samples) in enumerate(chunks):
        stop = start + count
        blocks = np.array(sequence.blocks, np.int64)
        of_context = (blocks[:, None] * block_tokens + within).reshape(-1)[:stop]
        first_row = len(tokens)
        tokens += sequence.tokens[start:stop]
        positions += range(start, stop)
        slots += of_context[start:stop].tolist()
        if samples:
            sampled.append(len(tokens) - 1)
        if number < num_decoding:
            contexts.append(of_context)
        else:
            parts.append(_Part(first_row, _padded([of_context]), np.arange(start, stop)))
    if contexts:
        parts.insert(0, _Part(0, _padded(contexts), np.array([len(one) - 1 for one in contexts], np.int64)))
    num_missing = max(0, MIN_ROWS - len(tokens))
    return _Flat(
        np.array(tokens + [0] * num_missing, np.int64),
        np.array(positions + [0] * num_missing, np.int64),
        np.array(slots + [scratch] * num_missing, np.int64),
        parts,
        np.array(sampled + [0] * max(0, MIN_ROWS - len(sampled)), np.int64),
    )


def _padded(contexts: list[Numbers]) -> Numbers:
    longest = max(len(one) for one in contexts)
    padded = np.zeros((len(contexts), longest + -longest % PIECE), np.int64)
    for row, one in enumerate(contexts):
        padded[row, : len(one)] = one
    return padded


def _rows(part: _Part, num_kv: int) -> Rows:
    num, padded = part.contexts.shape
    gather = part.contexts[:, None, :] * num_kv + np.arange(num_kv)[None, :, None]
    last = torch.from_numpy(part.last).unsqueeze(1)
    return Rows(part.first, len(part.last), num, padded, torch.from_numpy(gather.reshape(-1)), last, {})
