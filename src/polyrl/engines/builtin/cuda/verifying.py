"""Verifies drafts on a GPU: a CUDA graph for each number of samples and of rows of each, made when it is first needed.

A graph holds the model over all rows and a draw for each; the host sends it what the rows are, in one copy, and reads
what they drew. Samples are made up to one of a few numbers, and drafts to the round's number of rows, with rows that
write into a block that is never read.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from polyrl.engines.builtin.cuda import kernels
from polyrl.engines.builtin.cuda.graphs import Captured, Graphs
from polyrl.engines.builtin.cuda.verify_kernel import VerifyStep
from polyrl.engines.builtin.gate import MAX_SAMPLES, ROWS
from polyrl.engines.builtin.models import Loaded
from polyrl.engines.builtin.steps import Drafted, Drawn

log = logging.getLogger("polyrl.engines.builtin")

_SIZES = (2, 4, 8, 16, MAX_SAMPLES)
"""Of samples; layers are compiled for any number but one."""

Tensor = torch.Tensor


class Verifying:
    def __init__(
        self,
        loaded: Loaded,
        hidden: Callable[[Tensor, Tensor, Any], Tensor],
        uniforms: Callable[[Tensor, Tensor], Tensor],
        graphs: Graphs,
        *,
        num_blocks: int,
        block_tokens: int,
        width: int,
        device: torch.device,
    ) -> None:
        """`hidden`: from tokens, positions and a step to what the last layer makes of them; `width`: of a table."""
        self._loaded, self._hidden, self._uniforms, self._capturing = loaded, hidden, uniforms, graphs
        self._nowhere, self._block_tokens = num_blocks, block_tokens
        self._num_processors = kernels.num_processors()
        self._graphs: dict[tuple[int, int], Captured] = {}
        self._tables = torch.full((MAX_SAMPLES + 1, width), num_blocks, dtype=torch.int32, device=device)
        self._numbers = torch.zeros((6, MAX_SAMPLES * ROWS[-1] + 1), dtype=torch.int64, device=device)
        """By row: token, position, cell, position in the answer, seed, and the bits of the temperature."""
        self._in_tables: list[Sequence[int]] = []

    def forget_graphs(self) -> None:
        self._graphs.clear()

    def prepare(self, num_samples: int, rows: int) -> float:
        """Capture the graph, if needed. Returns the seconds that it took."""
        shape = (_size(num_samples), rows)
        if shape in self._graphs:
            return 0.0
        began = time.perf_counter()
        self._set([], shape)
        self._graphs[shape] = self._capturing.capture(lambda: self._verify(*shape))
        took = time.perf_counter() - began
        log.info("a graph for %d samples with %d rows each in %.1f s", *shape, took)
        return took

    def run(self, samples: Sequence[Drafted], rows: int) -> list[Drawn]:
        shape = (_size(len(samples)), rows)
        self.prepare(len(samples), rows)
        self._set(samples, shape)
        captured = self._graphs[shape]
        captured.graph.replay()
        tokens, logprobs = captured.result.tolist()
        drawn: list[Drawn] = []
        for number, one in enumerate(samples):
            its = slice(number * rows, number * rows + len(one.tokens))
            drawn.append(Drawn(list(map(int, tokens[its])), logprobs[its]))
        return drawn

    def _set(self, samples: Sequence[Drafted], shape: tuple[int, int]) -> None:
        """Send the rows of a round."""
        size, rows = shape
        whole = np.zeros((6, size, rows), np.int64)
        whole[2] = self._nowhere * self._block_tokens
        temperatures = whole[5].view(np.float64)
        temperatures[:] = 1.0
        for number, (tokens, start, blocks, rule) in enumerate(samples):
            num = len(tokens)
            at = range(start, start + num)
            whole[0, number, :num] = tokens
            whole[1, number, :num] = at
            whole[2, number, :num] = [self._cell(blocks, one) for one in at]
            whole[3, number, :num] = range(rule.position, rule.position + num)
            whole[4, number] = rule.seed
            temperatures[number] = rule.sampling.temperature
        self._numbers[:, : size * rows].copy_(torch.from_numpy(whole.reshape(6, -1)))
        self._set_tables([one.blocks for one in samples], size)

    def _cell(self, blocks: Sequence[int], position: int) -> int:
        return blocks[position // self._block_tokens] * self._block_tokens + position % self._block_tokens

    def _set_tables(self, tables: list[Sequence[int]], size: int) -> None:
        """Send them if they differ from the last ones: in a burst they stay."""
        tables += [()] * (size - len(tables))
        if tables == self._in_tables[:size]:
            return
        self._in_tables = tables
        width = max(1, *map(len, tables))
        its = np.full((size, width), self._nowhere, np.int32)
        for row, blocks in enumerate(tables):
            its[row, : len(blocks)] = blocks
        self._tables[:size, :width].copy_(torch.from_numpy(its))

    def _verify(self, size: int, rows: int) -> Tensor:
        """Return (2, rows of all samples): tokens and log-probabilities."""
        num = size * rows
        tokens, positions, cells, answers, seeds = (self._numbers[at, :num] for at in range(5))
        temperatures = self._numbers[5, :num].view(torch.float64).float()
        splits = kernels.num_splits(size, self._loaded.num_kv_heads, self._num_processors)
        step = VerifyStep(self._tables[:size], positions, cells, rows, splits)
        logits = self._loaded.logits(self._hidden(tokens, positions, step)[0])
        drawn, logprobs = kernels.draw(logits, temperatures, self._uniforms(seeds, answers))
        return torch.stack([drawn.double(), logprobs.double()])


def _size(num_samples: int) -> int:
    return next(one for one in _SIZES if one >= num_samples)
