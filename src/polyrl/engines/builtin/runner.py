"""Runs a step of the model: from chunks of samples (batching.py) to the tokens that were drawn.

The tokens of all chunks travel as one flat row, without padding: one token of each decoding sample first, then the
prefilled chunks. Only rows whose next token is wanted go through the output layer.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from polyrl.engines.builtin import sampling
from polyrl.engines.builtin.attention import ChunkContext, PagedKeysAndValues, Step
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
        self._num_blocks = num_blocks
        self._parameter = next(loaded.model.parameters())
        self._device: torch.device = self._parameter.device
        self._paged: PagedKeysAndValues | None = None
        self._any_mask = torch.zeros((1, 1, 1, 1), dtype=self._parameter.dtype, device=self._device)
        """A mask of four dimensions is passed on as it is; ours is never looked at."""
        self.wake()

    def wake(self) -> None:
        if self._paged is None:
            one = self._loaded
            self._paged = PagedKeysAndValues(
                one.num_layers, self._num_blocks * self._block_tokens, one.num_kv_heads, one.head_dim, self._parameter
            )

    def sleep(self) -> None:
        """Free the cache's memory. What was in it must be computed again."""
        self._paged = None

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk], wanted: Sequence[Wanted]) -> Drawn:
        """Run a step. `wanted` has an entry for each chunk that samples, in order."""
        flat = _lay_out(chunks, self._block_tokens)
        device = self._device
        step = Step(
            slots=torch.from_numpy(flat.slots).to(device),
            num_decoding=flat.num_decoding,
            context=torch.from_numpy(flat.context).to(device),
            lengths=torch.from_numpy(flat.lengths).to(device),
            chunks=tuple(
                ChunkContext(first, num, torch.from_numpy(slots).to(device)) for first, num, slots in flat.chunks
            ),
        )
        logits = self._loaded.model(
            input_ids=torch.from_numpy(flat.tokens).to(device).unsqueeze(0),
            position_ids=torch.from_numpy(flat.positions).to(device).unsqueeze(0),
            attention_mask=self._any_mask,
            use_cache=False,
            logits_to_keep=torch.from_numpy(flat.sampled_rows).to(device),
            step=step,
            paged=self._paged,
        ).logits[0]
        if not wanted:
            return Drawn([], [])
        draws = sampling.plan_draws(
            [one.sampling for one in wanted], [one.seed for one in wanted], [one.position for one in wanted], device
        )
        tokens, logprobs = sampling.draw(logits, draws)
        return Drawn(tokens.tolist(), logprobs.tolist())


class _Flat(NamedTuple):
    tokens: "np.ndarray[tuple[int], np.dtype[np.int64]]"
    positions: "np.ndarray[tuple[int], np.dtype[np.int64]]"
    slots: "np.ndarray[tuple[int], np.dtype[np.int64]]"
    num_decoding: int
    context: "np.ndarray[tuple[int, int], np.dtype[np.int64]]"
    lengths: "np.ndarray[tuple[int], np.dtype[np.int64]]"
    chunks: "list[tuple[int, int, np.ndarray[tuple[int], np.dtype[np.int64]]]]"
    sampled_rows: "np.ndarray[tuple[int], np.dtype[np.int64]]"


def _lay_out(chunks: Sequence[Chunk], block_tokens: int) -> _Flat:
    """Rows in the order of the chunks. Chunks of one token that samples come first: they decode."""
    num_decoding = 0
    while num_decoding < len(chunks) and chunks[num_decoding].count == 1 and chunks[num_decoding].samples:
        num_decoding += 1
    tokens: list[int] = []
    positions: list[int] = []
    sampled: list[int] = []
    slots: list[int] = []
    contexts: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
    prefilled: list[tuple[int, int, np.ndarray[tuple[int], np.dtype[np.int64]]]] = []
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
            prefilled.append((first_row, count, of_context))
    longest = max((len(one) for one in contexts), default=0)
    context = np.zeros((num_decoding, longest), np.int64)
    for row, one in enumerate(contexts):
        context[row, : len(one)] = one
    return _Flat(
        np.array(tokens, np.int64),
        np.array(positions, np.int64),
        np.array(slots, np.int64),
        num_decoding,
        context,
        np.array([len(one) for one in contexts], np.int64),
        prefilled,
        np.array(sampled, np.int64),
    )
