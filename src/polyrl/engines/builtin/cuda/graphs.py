"""CUDA graphs: the GPU work of a function, captured once and replayed as a whole.

Rules kept here: only one graph runs at a time, so that all share their memory. A function runs before its capture,
on one stream for all graphs: each stream that multiplies matrices keeps a workspace of its own. Other threads, such as
the one that stages the next weights, go on meanwhile.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_NUM_WARM_UPS = 2


class Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    result: Any
    """The result of the function, overwritten by each replay."""


class Graphs:
    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()
        self._warming = torch.cuda.Stream()

    def forget(self) -> None:
        """Call it when all graphs are gone: their memory belongs to no graph then."""
        self._memory = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], Any], prepare: Callable[[], object] = lambda: None) -> Captured:
        """Capture a graph. `prepare` is called before each run, and is not captured."""
        current = torch.cuda.current_stream()
        self._warming.wait_stream(current)
        with torch.cuda.stream(self._warming):
            for _ in range(_NUM_WARM_UPS):
                prepare()
                run()
        current.wait_stream(self._warming)
        prepare()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            result = run()
        return Captured(graph, result)
