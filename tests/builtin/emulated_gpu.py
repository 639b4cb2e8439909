"""An emulated GPU, so that the CUDA runner's own logic runs where there is none. Run by test_cuda_runner.py.

Kernels run in Triton's interpreter. A graph is what CUDA's is: the operations of one run with the tensors that they
read and wrote; a replay does them again, into the same tensors. The cache loses its numbers in sleep.

Not emulated: steps of few samples that are written out (small_batch.py), memory that a graph uses again,
streams that run side by side, bfloat16's flash attention, speed.
"""

# pyright: reportPrivateUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false
import contextlib
import os
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # before anybody imports it

import torch
import torch._dynamo  # looks at torch.cuda as it was
import triton.runtime.interpreter as interpreter
from tests.builtin import quick_interpreter as _quick  # noqa: F401
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

_launch = interpreter.InterpretedFunction.run
_recorders: "list[_Recorder]" = []


class _Graph:
    def __init__(self) -> None:
        self.steps: list[Callable[[], object]] = []
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        for step in self.steps:
            step()


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: _Graph) -> None:
        super().__init__()
        self.graph = graph
        self.is_inside = False
        """An operation runs: the kernels that it launches are part of it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.is_inside = True
        try:
            out = func(*args, **(kwargs or {}))
        finally:
            self.is_inside = False
        self.graph.steps.append(partial(_do_again, func, args, kwargs or {}, out))
        return out


def _do_again(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
        if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
            old.copy_(new)


def _launch_and_record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    again = partial(_launch, self, *args, grid=grid, warmup=warmup, **kwargs)
    if not _recorders or _recorders[-1].is_inside:
        return again()
    with _disable_current_modes():
        again()
    _recorders[-1].graph.steps.append(again)
    return None


@contextlib.contextmanager
def _capture(graph: _Graph, pool: Any, capture_error_mode: str) -> Iterator[None]:
    with _Recorder(graph) as recorder:
        _recorders.append(recorder)
        try:
            yield
        finally:
            _recorders.pop()


class _Stream:
    def wait_stream(self, other: Any) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class _Memory:
    def __init__(self, num_bytes: int) -> None:
        self._tensors: list[torch.Tensor] = []

    def tensors(self, num: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
        self._tensors = [torch.full(shape, torch.nan, dtype=dtype) for _ in range(num)]
        return self._tensors

    def take(self) -> None: ...

    def give_back(self) -> None:
        for one in self._tensors:
            one.fill_(torch.nan)

    def close(self) -> None: ...


def install() -> None:
    """From now on the builtin engine runs on the emulated GPU."""
    interpreter.InterpretedFunction.run = _launch_and_record
    bindings: Any = types.ModuleType("cuda.bindings")
    bindings.driver = None
    sys.modules |= {"cuda": types.ModuleType("cuda"), "cuda.bindings": bindings}
    from polyrl.engines.builtin import engine, runners
    from polyrl.engines.builtin.config import fit
    from polyrl.engines.builtin.cuda import kernels
    from polyrl.engines.builtin.cuda import layout as cuda_layout
    from polyrl.engines.builtin.cuda import memory as cuda_memory
    from polyrl.engines.builtin.cuda.small_batch import SmallBatch

    gpu: Any = torch.cuda
    gpu.set_device = gpu.synchronize = gpu.empty_cache = lambda *_: None
    gpu.get_device_capability = lambda *_: (9, 0)
    gpu.graph_pool_handle = lambda: None
    gpu.Stream = gpu.Event = _Stream
    gpu.current_stream = lambda *_: _Stream()
    gpu.stream = contextlib.nullcontext
    gpu.CUDAGraph, gpu.graph = _Graph, _capture
    kernels.num_processors = lambda: 2
    cuda_layout._ROWS = (8, 16, 32, 64)  # interpreted, a row takes milliseconds
    cuda_memory.Memory = _Memory
    SmallBatch.find = lambda *_: None  # interpreted, a product takes a second; test_small_batch.py compares it

    def make(loaded: Any, *its: Any) -> Any:
        for one in loaded.model.parameters():
            one.data = one.data.clone()  # out of the file that they are mapped from
        runner: Any = runners._on_gpu(loaded, *its)
        runner._prefilling.has_graphs = True  # our graphs may ask for borders
        return runner

    runners.make = make
    engine.fit = lambda config, _: fit(config, "cuda")._replace(dtype="float32")
