"""Runs steps of the model on the CPU: from chunks of samples (batching.py) to the tokens that were drawn.

The tokens of all chunks travel as one flat row, without padding: one token of each decoding sample first, those with
the longest contexts before the others, then the prefilled chunks. Only rows whose next token is wanted go through the
output layer. Fewer rows than attention.MIN_ROWS are made up to that number, so that a sample alone is computed as it is
in a crowd. Plain decoders run as decoder.py writes them out, others through their own modules.

While all that run only decode, several steps follow each other without a look at what they brought: a *burst*, over
soon enough that nobody waits for it.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch

from polyrl.engines.builtin import sampling
from polyrl.engines.builtin.attention import GRAIN, MIN_ROWS, PagedKeysAndValues, Rows, Step
from polyrl.engines.builtin.batching import Chunk
from polyrl.engines.builtin.decoder import Decoder
from polyrl.engines.builtin.models import Loaded
from polyrl.wire.frames import Sampling

_WASTE_TOKENS = 1024
"""Contexts that attend together are padded to the longest. Beyond so much padding, they attend apart."""

_BURST_S = 0.05

Numbers = np.ndarray[Any, np.dtype[np.int64]]


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
        self._scratch = num_blocks
        """The block of rows that make up the number, and of what pads a context."""
        self._parameter = next(loaded.model.parameters())
        self._device: torch.device = self._parameter.device
        self._paged: PagedKeysAndValues | None = None
        self._interrupted = threading.Event()
        self._any_mask = torch.zeros((1, 1, 1, 1), dtype=self._parameter.dtype, device=self._device)
        """A mask of four dimensions is passed on as it is; ours is never looked at."""
        self._decoder = Decoder.find(loaded.model)
        """None: the model runs through its own modules."""
        self.wake()

    def wake(self) -> None:
        if self._paged is None:
            one = self._loaded
            self._paged = PagedKeysAndValues(
                one.num_layers, self._scratch + 1, self._block_tokens, one.num_kv_heads, one.head_dim, self._parameter
            )
            self.weights_changed()

    def sleep(self) -> None:
        """Free the memory of the cache and of packed weights. What was in the cache must be computed again."""
        self._paged = None
        if self._decoder is not None:
            self._decoder.drop()

    def close(self) -> None:
        self.sleep()

    def weights_changed(self) -> None:
        if self._decoder is not None and self._paged is not None:
            self._decoder.pack()

    def interrupt(self) -> None:
        """End the burst that runs, if one does, with its step. From any thread, like `uninterrupt`."""
        self._interrupted.set()

    def uninterrupt(self) -> None:
        self._interrupted.clear()

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk], wanted: Sequence[Wanted]) -> Drawn:
        """Run a step. `wanted` has an entry for each chunk that samples, in order."""
        num_decoding = _num_decoding(chunks)
        decoding = self._lay_out_decoding(chunks[:num_decoding], 1)
        tokens = [decoding.tokens]
        positions = [decoding.positions]
        slots = [decoding.slots(0)]
        parts = decoding.parts_at(0)
        sampled = decoding.row_of_chunk.tolist()
        num_rows = num_decoding
        for alike in _runs_of_equal_count(chunks[num_decoding:]):
            parts.append(self._prefilling(alike, num_rows))
            for sequence, start, count, samples in alike:
                at = np.arange(start, start + count)
                tokens.append(np.array(sequence.tokens[start : start + count], np.int64))
                positions.append(at)
                blocks = np.array(sequence.blocks, np.int64)
                slots.append(blocks[at // self._block_tokens] * self._block_tokens + at % self._block_tokens)
                num_rows += count
                if samples:
                    sampled.append(num_rows - 1)
        logits = self._logits(
            np.concatenate(tokens),
            np.concatenate(positions),
            np.concatenate(slots),
            tuple(parts),
            np.array(sampled, np.int64),
        )
        return self._draw(logits, self._plan(wanted, 1), 0)

    @torch.inference_mode()
    def run_burst(self, chunks: Sequence[Chunk], wanted: Sequence[Wanted], num_steps: int) -> list[Drawn]:
        """`num_steps` tokens of each sample, or as many as there is time for. All chunks decode, and have blocks."""
        until = time.perf_counter() + _BURST_S
        decoding = self._lay_out_decoding(chunks, num_steps)
        draws = self._plan(wanted, num_steps)
        tokens, rows = decoding.tokens, decoding.row_of_chunk
        drawn: list[Drawn] = []
        for number in range(num_steps):
            logits = self._logits(
                tokens, decoding.positions + number, decoding.slots(number), tuple(decoding.parts_at(number)), rows
            )
            drawn.append(self._draw(logits, draws, number))
            if time.perf_counter() > until or self._interrupted.is_set():
                break
            tokens = np.array(drawn[-1].tokens, np.int64)[decoding.chunk_of_row]
        return drawn

    def _plan(self, wanted: Sequence[Wanted], num_steps: int) -> sampling.Draws:
        seeds = np.array([one.seed for one in wanted], np.int64)
        positions = np.array([one.position for one in wanted], np.int64) + np.arange(num_steps)[:, None]
        return sampling.plan_draws([one.sampling for one in wanted], seeds, positions, self._device)

    def _draw(self, logits: torch.Tensor, draws: sampling.Draws, number: int) -> Drawn:
        """Of the burst's step with that number."""
        if not len(logits):
            return Drawn([], [])
        tokens, logprobs = sampling.draw(logits, draws._replace(uniforms=draws.uniforms[number]))
        return Drawn(tokens.tolist(), logprobs.tolist())

    def _logits(
        self, tokens: Numbers, positions: Numbers, slots: Numbers, parts: tuple[Rows, ...], rows: Numbers
    ) -> torch.Tensor:
        """Of the wanted rows."""
        num_missing, num_sampled = max(0, MIN_ROWS - len(tokens)), len(rows)
        if num_missing:
            tokens, positions = np.pad(tokens, (0, num_missing)), np.pad(positions, (0, num_missing))
            slots = np.pad(slots, (0, num_missing), constant_values=self._scratch * self._block_tokens)
        if num_sampled < MIN_ROWS:
            rows = np.pad(rows, (0, MIN_ROWS - num_sampled))
        assert self._paged is not None, "it is asleep"
        step = Step(torch.from_numpy(slots), parts)
        its_tokens, its_positions, its_rows = (torch.from_numpy(one) for one in (tokens, positions, rows))
        if self._decoder is not None:
            return self._decoder.logits(its_tokens, its_positions, its_rows, step, self._paged)[:num_sampled]
        return self._loaded.model(
            input_ids=its_tokens.unsqueeze(0),
            position_ids=its_positions.unsqueeze(0),
            attention_mask=self._any_mask,
            use_cache=False,
            logits_to_keep=its_rows,
            step=step,
            paged=self._paged,
        ).logits[0, :num_sampled]

    # Laying out

    def _prefilling(self, chunks: Sequence[Chunk], first: int) -> Rows:
        """Chunks of as many tokens each attend together."""
        longest = max(start + count for _, start, count, _ in chunks)
        padded = longest + -longest % GRAIN
        width = -(-padded // self._block_tokens)
        table = self._table([sequence.blocks for sequence, _, _, _ in chunks], width)
        last = np.concatenate([np.arange(start, start + count) for _, start, count, _ in chunks])
        gather = self._gather(table[:, :width])
        return Rows(first, len(last), len(chunks), padded, gather, torch.from_numpy(last).unsqueeze(1), {})

    def _lay_out_decoding(self, chunks: Sequence[Chunk], num_steps: int) -> "_Decoding":
        """The longest contexts first: they are told apart by their lengths at the burst's end."""
        starts = np.array([start for _, start, _, _ in chunks], np.int64)
        grains = -(-(starts + num_steps) // GRAIN)
        chunk_of_row = np.argsort(-grains, kind="stable")
        blocks = [chunks[number].sequence.blocks for number in chunk_of_row]
        most = int(grains.max(initial=0)) * GRAIN
        table = self._table(blocks, -(-most // self._block_tokens))
        tokens = np.array([sequence.tokens[start] for sequence, start, _, _ in chunks], np.int64)
        parts: list[_Part] = []
        for first, last in _together(grains[chunk_of_row].tolist()):
            padded = int(grains[chunk_of_row[first]]) * GRAIN
            its_blocks = table[first:last, : -(-padded // self._block_tokens)]
            parts.append(_Part(first, last - first, padded, self._gather(its_blocks)))
        positions = starts[chunk_of_row]
        row_of_chunk = np.argsort(chunk_of_row)
        return _Decoding(tokens[chunk_of_row], positions, table, self._block_tokens, parts, chunk_of_row, row_of_chunk)

    def _table(self, blocks: list[list[int]], width: int) -> Numbers:
        """(rows, blocks): at least so wide."""
        table = np.full((len(blocks), max([width, *map(len, blocks)])), self._scratch, np.int64)
        for row, one in enumerate(blocks):
            table[row, : len(one)] = one
        return table

    def _gather(self, table: Numbers) -> torch.Tensor:
        num_blocks = self._scratch + 1
        heads = np.arange(2 * self._loaded.num_kv_heads)[:, None, None] * num_blocks
        return torch.from_numpy((heads + table).reshape(-1))


class _Part(NamedTuple):
    """As attention.Rows, of samples that decode, whatever their lengths are."""

    first: int
    num: int
    padded: int
    gather: torch.Tensor


class _Decoding(NamedTuple):
    """The rows of samples that decode, for one step or a burst."""

    tokens: Numbers
    positions: Numbers
    table: Numbers
    """(rows, blocks)"""
    block_tokens: int
    parts: list[_Part]
    chunk_of_row: Numbers
    row_of_chunk: Numbers

    def slots(self, number: int) -> Numbers:
        """Where keys and values of the burst's step with that number go."""
        at = self.positions + number
        blocks = self.table[np.arange(len(at)), at // self.block_tokens]
        return blocks * self.block_tokens + at % self.block_tokens

    def parts_at(self, number: int) -> list[Rows]:
        last = torch.from_numpy(self.positions + number).unsqueeze(1)
        return [
            Rows(first, num, num, padded, gather, last[first : first + num], {})
            for first, num, padded, gather in self.parts
        ]


def _num_decoding(chunks: Sequence[Chunk]) -> int:
    """Chunks of one token that samples come first: they decode."""
    num = 0
    while num < len(chunks) and chunks[num].count == 1 and chunks[num].samples:
        num += 1
    return num


def _runs_of_equal_count(chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
    for _, alike in groupby(chunks, key=lambda chunk: chunk.count):
        yield list(alike)


def _together(grains: list[int]) -> list[tuple[int, int]]:
    """Ranges of rows that attend together, of contexts with so many grains, the longest first."""
    ranges: list[tuple[int, int]] = []
    first = 0
    for row, num in enumerate(grains):
        if (grains[first] - num) * GRAIN * (len(grains) - row) > _WASTE_TOKENS:
            ranges.append((first, row))
            first = row
    if grains:
        ranges.append((first, len(grains)))
    return ranges
