"""Runs steps of the model on the CPU: from chunks of samples (batching.py) to the tokens that were drawn.

The tokens of all chunks travel as one flat row, without padding: one token of each decoding sample first, those with
the longest contexts before the others, then the prefilled chunks. Only rows whose next token is wanted go through the
output layer. Rows are made up to one of few numbers (`round_rows`), at least attention.min_rows, so that a sample alone
is computed as it is in a crowd. Plain decoders run as decoder.py writes them out, others through their own modules.

While all that run only decode, several steps follow each other without a look at what they brought: a *burst*, over
soon enough that no new job waits long for it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from threading import Event
from typing import Any, NamedTuple

import numpy as np
import torch

from polyrl.engines.builtin import sampling
from polyrl.engines.builtin.attention import (
    GRAIN,
    MIN_ROWS,
    AttentionStep,
    PagedKeysAndValues,
    PagedStep,
    Rows,
    go_on,
    min_rows,
)
from polyrl.engines.builtin.batching import Chunk
from polyrl.engines.builtin.decoder import Decoder
from polyrl.engines.builtin.models import Loaded
from polyrl.engines.builtin.steps import Drafted, Drawn, DrawRule, OnDrawn

_WASTE_TOKENS = 1024
"""Contexts that attend together are padded to the longest. Beyond so much padding, they attend apart."""

_BURST_S = 0.1

_KEPT_BYTES = 256 << 20
"""A cache of no more than this stays while the engine sleeps: making it anew at every waking took a tenth of the time
of a small model's step."""

Numbers = np.ndarray[Any, np.dtype[np.int64]]


class Runner:
    shows_bursts = False

    def __init__(self, loaded: Loaded, num_blocks: int, block_tokens: int) -> None:
        self._loaded = loaded
        self._block_tokens = block_tokens
        self._scratch = num_blocks
        """The block of rows that make up the number, and of what pads a context."""
        self._parameter = next(loaded.model.parameters())
        self._device: torch.device = self._parameter.device
        self._paged: PagedKeysAndValues | None = None
        self._is_awake = False
        self._any_mask = torch.zeros((1, 1, 1, 1), dtype=self._parameter.dtype, device=self._device)
        """A mask of four dimensions is passed on as it is; ours is never looked at."""
        self._decoder = Decoder.find(loaded.model)
        """None: the model runs through its own modules."""
        longest_sum = max(one.shape[-1] for one in loaded.model.parameters())
        self._min_rows = min_rows(longest_sum) if self._decoder is None else MIN_ROWS
        self.wake()

    def wake(self) -> None:
        if self._is_awake:
            return
        if self._paged is None:
            one = self._loaded
            self._paged = PagedKeysAndValues(
                one.num_layers, self._scratch + 1, self._block_tokens, one.num_kv_heads, one.head_dim, self._parameter
            )
        if self._decoder is not None:
            self._decoder.pack()
        self._is_awake = True

    def sleep(self) -> None:
        """Free the memory of a large cache and of packed weights. The cache must be computed again."""
        paged, self._is_awake = self._paged, False
        if paged is not None and (paged.num_bytes > _KEPT_BYTES or not paged.has_numbers):
            self._paged = None
        if self._decoder is not None:
            self._decoder.drop()

    @property
    def holds_cache(self) -> bool:
        return self._paged is not None

    def close(self) -> None:
        self.sleep()
        self._paged = None

    def change_weights(self, write: Callable[[], None] | None) -> None:
        if write is not None:
            write()
        if self._decoder is not None and self._is_awake:
            self._decoder.pack()

    @torch.inference_mode()
    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        assert self._paged is not None and self._is_awake, "it is asleep"
        self._paged.copy(*torch.tensor(copies).unbind(1))

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk], wanted: Sequence[DrawRule]) -> Drawn:
        """Run a step. `wanted` has an entry for each chunk that samples, in order."""
        num_decoding = _num_decoding(chunks)
        decoding = self._lay_out_decoding(chunks[:num_decoding], 1)
        tokens = [decoding.tokens]
        positions = [decoding.positions]
        cells = [decoding.cells[0]]
        parts = decoding.parts
        sampled = decoding.row_of_chunk.tolist()
        num_rows = num_decoding
        for alike in _runs_of_equal_count(chunks[num_decoding:]):
            parts.append(self._prefilling([(one.start, one.member.blocks) for one in alike], alike[0].count, num_rows))
            for member, start, count, samples in alike:
                tokens.append(np.array(member.tokens[start : start + count], np.int64))
                positions.append(np.arange(start, start + count))
                cells.append(self._cells(member.blocks, start, count))
                num_rows += count
                if samples:
                    sampled.append(num_rows - 1)
        at = np.concatenate(positions)
        self._reach(int(at.max()) + 1)
        rows = np.array(sampled, np.int64)
        logits = self._logits(
            self._made_up(np.concatenate(tokens)),
            self._made_up(at),
            self._made_up(np.concatenate(cells), self._scratch * self._block_tokens),
            tuple(parts),
            self._made_up(rows) if sampled else torch.from_numpy(rows),
        )[: len(sampled)]
        if not sampled:
            return Drawn([], [])
        draws = self._plan(wanted, 1)
        tokens, logprobs = sampling.draw(logits, draws._replace(uniforms=draws.uniforms[0]))
        return Drawn(tokens.tolist(), logprobs.tolist())

    @torch.inference_mode()
    def run_burst(
        self,
        chunks: Sequence[Chunk],
        wanted: Sequence[DrawRule],
        num_steps: int,
        interrupted: Event | None = None,
        look: OnDrawn | None = None,
    ) -> list[Drawn]:
        """Decode `num_steps` tokens of each sample, or as many as there is time for. All chunks decode, and have
        blocks."""
        until = time.perf_counter() + _BURST_S
        decoding = self._lay_out_decoding(chunks, num_steps)
        draws = self._plan([wanted[number] for number in decoding.chunk_of_row], num_steps)
        tokens = self._made_up(decoding.tokens)
        positions = self._made_up(decoding.positions + np.arange(num_steps)[:, None])
        cells = self._made_up(decoding.cells, self._scratch * self._block_tokens)
        parts = tuple(decoding.parts)
        self._reach(int(positions.max()) + 1)
        drawn: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number in range(num_steps):
            if number:
                tokens[: len(chunks)] = drawn[-1][0]
                for part in parts:
                    go_on(part)
            logits = self._logits(tokens, positions[number], cells[number], parts)[: len(chunks)]
            drawn.append(sampling.draw(logits, draws._replace(uniforms=draws.uniforms[number])))
            if time.perf_counter() > until or (interrupted is not None and interrupted.is_set()):
                break
        its_tokens, its_logprobs = (
            torch.stack(one).numpy()[:, decoding.row_of_chunk].tolist() for one in zip(*drawn, strict=True)
        )
        return list(map(Drawn, its_tokens, its_logprobs))

    def prepare_rows(self, num_samples: int, rows: int) -> float:
        return 0.0

    @torch.inference_mode()
    def verify(self, samples: Sequence[Drafted], rows: int) -> list[Drawn]:
        """Verify drafts. A draft's rows attend as a chunk's do, so each has the bits that it would have alone."""
        order = sorted(range(len(samples)), key=lambda number: len(samples[number].tokens))
        lined_up = [samples[number] for number in order]
        parts: list[Rows] = []
        num_rows = 0
        for num, alike in groupby(lined_up, key=lambda one: len(one.tokens)):
            its = [(one.start, one.blocks) for one in alike]
            parts.append(self._prefilling(its, num, num_rows))
            num_rows += num * len(its)
        positions = np.concatenate([np.arange(one.start, one.start + len(one.tokens)) for one in lined_up])
        cells = np.concatenate([self._cells(one.blocks, one.start, len(one.tokens)) for one in lined_up])
        self._reach(int(positions.max()) + 1)
        logits = self._logits(
            self._made_up(np.array([token for one in lined_up for token in one.tokens], np.int64)),
            self._made_up(positions),
            self._made_up(cells, self._scratch * self._block_tokens),
            tuple(parts),
        )[:num_rows]
        draws = self._plan([rule for one in lined_up for rule in one.rules], 1)
        tokens, logprobs = (one.tolist() for one in sampling.draw(logits, draws._replace(uniforms=draws.uniforms[0])))
        drawn: dict[int, Drawn] = {}
        first = 0
        for number, one in zip(order, lined_up, strict=True):
            end = first + len(one.tokens)
            drawn[number] = Drawn(tokens[first:end], logprobs[first:end])
            first = end
        return [drawn[number] for number in range(len(samples))]

    def _plan(self, wanted: Sequence[DrawRule], num_steps: int) -> sampling.Draws:
        seeds = np.array([one.seed for one in wanted], np.int64)
        positions = np.array([one.position for one in wanted], np.int64) + np.arange(num_steps)[:, None]
        return sampling.plan_draws([one.sampling for one in wanted], seeds, positions, self._device)

    def _reach(self, num_positions: int) -> None:
        if self._decoder is not None:
            self._decoder.reach(num_positions)

    def _made_up(self, numbers: Numbers, value: int = 0) -> torch.Tensor:
        """Pad the last dimension to a number of rows that `round_rows` allows."""
        missing = round_rows(numbers.shape[-1], self._min_rows) - numbers.shape[-1]
        if missing > 0:
            numbers = np.pad(numbers, [*[(0, 0)] * (numbers.ndim - 1), (0, missing)], constant_values=value)
        return torch.from_numpy(numbers)

    def _logits(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        cells: torch.Tensor,
        parts: tuple[Rows, ...],
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the logits of `rows`; None: of all rows."""
        assert self._paged is not None and self._is_awake, "it is asleep"
        step = AttentionStep(cells, parts)
        if self._decoder is not None:
            return self._decoder.logits(tokens, positions, rows, step, self._paged)
        return self._loaded.model(
            input_ids=tokens.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            attention_mask=self._any_mask,
            use_cache=False,
            logits_to_keep=0 if rows is None else rows,
            paged=PagedStep(step, self._paged),
        ).logits[0]

    # Laying out

    def _cells(self, blocks: Sequence[int], start: int, count: int) -> Numbers:
        at = np.arange(start, start + count)
        return np.array(blocks, np.int64)[at // self._block_tokens] * self._block_tokens + at % self._block_tokens

    def _prefilling(self, its: Sequence[tuple[int, Sequence[int]]], count: int, first: int) -> Rows:
        """Rows of `count` tokens each, from a position on and with the blocks of a context, attend together."""
        longest = max(start for start, _ in its) + count
        padded = longest + -longest % GRAIN
        width = -(-padded // self._block_tokens)
        table = self._table([blocks for _, blocks in its], width)
        last = np.concatenate([np.arange(start, start + count) for start, _ in its])
        gather = self._gather(table[:, :width])
        return Rows(first, len(last), len(its), padded, gather, torch.from_numpy(last).unsqueeze(1), {})

    def _lay_out_decoding(self, chunks: Sequence[Chunk], num_steps: int) -> "_Decoding":
        """Lay the longest contexts out first: they are told apart by their lengths at the burst's end."""
        starts = np.array([start for _, start, _, _ in chunks], np.int64)
        grains = -(-(starts + num_steps) // GRAIN)
        chunk_of_row = np.argsort(-grains, kind="stable")
        blocks = [chunks[number].member.blocks for number in chunk_of_row]
        most = int(grains.max(initial=0)) * GRAIN
        table = self._table(blocks, -(-most // self._block_tokens))
        tokens = np.array([member.tokens[start] for member, start, _, _ in chunks], np.int64)
        positions = starts[chunk_of_row]
        last = torch.tensor(positions).unsqueeze(1)
        parts: list[Rows] = []
        for first, end in _together(grains[chunk_of_row].tolist()):
            padded = int(grains[chunk_of_row[first]]) * GRAIN
            gather = self._gather(table[first:end, : -(-padded // self._block_tokens)])
            parts.append(Rows(first, end - first, end - first, padded, gather, last[first:end], {}))
        at = positions + np.arange(num_steps)[:, None]
        cells = table[np.arange(len(chunks)), at // self._block_tokens] * self._block_tokens + at % self._block_tokens
        return _Decoding(tokens[chunk_of_row], positions, cells, parts, chunk_of_row, np.argsort(chunk_of_row))

    def _table(self, blocks: Sequence[Sequence[int]], width: int) -> Numbers:
        """Return the table of blocks, (rows, blocks), at least so wide."""
        table = np.full((len(blocks), max([width, *map(len, blocks)])), self._scratch, np.int64)
        for row, one in enumerate(blocks):
            table[row, : len(one)] = one
        return table

    def _gather(self, table: Numbers) -> torch.Tensor:
        num_blocks = self._scratch + 1
        heads = np.arange(2 * self._loaded.num_kv_heads)[:, None, None] * num_blocks
        return torch.from_numpy((heads + table).reshape(-1))


def round_rows(num: int, at_least: int) -> int:
    """Up, by an eighth at most: oneDNN compiles and keeps each product for every number of rows that it has seen, which
    was half a gigabyte after a few hundred rounds of a model of 90,000 parameters.
    """
    grain = 1 << max(0, num.bit_length() - 4)
    return max(at_least, -(-num // grain) * grain)


class _Decoding(NamedTuple):
    """The rows of samples that decode, for one step or a burst."""

    tokens: Numbers
    positions: Numbers
    """At the first step."""
    cells: Numbers
    """(steps, rows): where keys and values go."""
    parts: list[Rows]
    """At the first step."""
    chunk_of_row: Numbers
    row_of_chunk: Numbers


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
