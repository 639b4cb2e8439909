"""CUDA graphs: what a function does on the GPU, captured once and done again as one.

Rules kept here: only one graph runs at a time, so that all share their memory. What is captured runs before, on one
stream for all of them: each stream that multiplies keeps a workspace of its own. Other threads go on meanwhile, as one
that stages the next weights.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_NUM_WARM_UPS = 2


class Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    result: Any
    """What the function gave: written anew by each replay."""


class Graphs:
    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()
        self._warming = torch.cuda.Stream()

    def capture(self, run: Callable[[], Any], prepare: Callable[[], object] = lambda: None) -> Captured:
        """`prepare` is called before each run, and is not captured."""
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
