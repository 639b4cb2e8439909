"""Prefill on a GPU: as it comes, or from a CUDA graph where steps are small.

To launch the kernels of a step takes the host about a millisecond a layer, whatever its size; with few rows the GPU
waits for it most of the time. A graph is launched as one. There is one for each shape (layout.py) that came up
a second time. In float32 there are none: its attention asks the GPU for borders.
"""

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from polyrl.engines.builtin.cuda.graphs import Captured, Graphs
from polyrl.engines.builtin.cuda.kernels import PrefillStep
from polyrl.engines.builtin.cuda.layout import MOST_CONTEXTS, GraphShape, StepLayout

log = logging.getLogger("polyrl.engines.builtin")

Tensor = torch.Tensor

Model = Callable[[Tensor, Tensor, PrefillStep], Tensor]
"""From tokens and positions to what the last layer makes of them."""


class _Inputs(NamedTuple):
    tokens: Tensor
    positions: Tensor
    step: PrefillStep


class _Graph(NamedTuple):
    captured: Captured
    inputs: _Inputs


class Prefill:
    def __init__(self, model: Model, like: Tensor, graphs: Graphs) -> None:
        self._model, self._device, self._capturing = model, like.device, graphs
        self.has_graphs = like.dtype != torch.float32
        self._graphs: dict[GraphShape, _Graph] = {}
        self._came_up: set[GraphShape] = set()

    def forget_graphs(self) -> None:
        self._graphs.clear()

    def run(self, its: StepLayout, shape: GraphShape | None) -> Tensor:
        """Return the last layer's output for every row, valid until the next step. `its` has `shape`, if given."""
        if shape is None or not self._is_worth_a_graph(shape):
            return self._model(*self._send(its))
        found = self._graphs.get(shape)
        if found is None:
            found = self._graphs[shape] = self._capture(its, shape)
        else:
            for buffer, numbers in zip(_flat(found.inputs), _numbers(its), strict=True):
                buffer.copy_(torch.from_numpy(numbers), non_blocking=True)
        found.captured.graph.replay()
        return found.captured.result

    def _is_worth_a_graph(self, shape: GraphShape) -> bool:
        """Small enough, and not for the first time."""
        if not self.has_graphs or shape.contexts > MOST_CONTEXTS:
            return False
        came_up = shape in self._came_up
        self._came_up.add(shape)
        return came_up

    def _capture(self, its: StepLayout, shape: GraphShape) -> _Graph:
        """Capture a graph that reads these inputs, whose addresses stay."""
        began = time.monotonic()
        inputs = self._send(its)
        captured = self._capturing.capture(lambda: self._model(*inputs))
        log.info("a graph for %d rows of prompts in %.1f s", shape.rows, time.monotonic() - began)
        return _Graph(captured, inputs)

    def _send(self, its: StepLayout) -> _Inputs:
        tokens, positions, cells, blocks, within, first_rows, first_contexts = (
            torch.from_numpy(one).to(self._device, non_blocking=True) for one in _numbers(its)
        )
        borders = (first_rows, first_contexts, its.longest_rows, its.longest_context)
        return _Inputs(tokens, positions, PrefillStep(cells, blocks, within, *borders))


def _numbers(its: StepLayout) -> "list[np.ndarray[Any, Any]]":
    """Return the layout's arrays in the order of `_flat`."""
    return [its.tokens, its.positions, its.cells, its.blocks, its.within, its.first_rows, its.first_contexts]


def _flat(inputs: _Inputs) -> list[Tensor]:
    return [*inputs[:2], *inputs.step[:5]]
