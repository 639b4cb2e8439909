"""Attention of long samples while training, sample by sample, with cuDNN: faster than varlen flash attention.

One operation for all samples of a pack, opaque to the compiler: their number and lengths are read from a tensor in the
host's memory, so that layers are compiled once for any of them. On the CPU, torch's own flash attention does the same
work, for the tests. Under gradient checkpointing, the results are kept: of a long sample, attention is most of what a
layer would compute again, and its result is as large as the layer's input.

Left out: short samples, of which varlen flash attention takes many at once (packed.py); sliding windows.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor

LONG_TOKENS = 4096
"""Samples of at least this length fill a GPU by themselves."""

_forward: Any = torch.ops.aten._scaled_dot_product_cudnn_attention
_backward: Any = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
_forward_on_cpu: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward_on_cpu: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _Kept(NamedTuple):
    """The results of one run of a layer, in the order of its calls, for the layer's second run."""

    results: deque[tuple[Tensor, Tensor]]
    is_second: bool


_kept: ContextVar[_Kept | None] = ContextVar("kept", default=None)


def keep_results() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a layer's two runs under gradient checkpointing (`context_fn`): the first keeps what
    attention gives, and the second takes it instead of computing it again."""
    results: deque[tuple[Tensor, Tensor]] = deque()
    return _keeping(_Kept(results, is_second=False)), _keeping(_Kept(results, is_second=True))


@contextmanager
def _keeping(kept: _Kept) -> Iterator[None]:
    token = _kept.set(kept)
    try:
        yield
    finally:
        _kept.reset(token)


def can_attend(dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether cuDNN has it: half precision on a GPU of compute capability 8.0 or newer, heads of at most 128."""
    if not torch.cuda.is_available() or not torch.backends.cudnn.is_available():
        return False
    is_new = torch.cuda.get_device_capability() >= (8, 0)
    return is_new and dtype in (torch.bfloat16, torch.float16) and head_dim <= 128 and head_dim % 8 == 0


@torch.library.custom_op("polyrl::attend_long", mutates_args=())
def attend_long(query: Tensor, key: Tensor, value: Tensor, borders: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend causally within each sample: query (rows, heads, dim), key and value (rows, kv heads, dim).

    Return the result and each row's log-sum-exp. `borders` is in the host's memory: where samples begin and end.
    """
    kept = _kept.get()
    if kept is not None and kept.is_second:
        return kept.results.popleft()
    outs: list[Tensor] = []
    sums: list[Tensor] = []
    for its_query, its_key, its_value in _samples(borders, query, key, value):
        if query.is_cuda:
            out, total, *_ = _forward(its_query, its_key, its_value, None, True, 0.0, True, False, scale=scale)
        else:
            out, total = _forward_on_cpu(its_query, its_key, its_value, 0.0, True, scale=scale)
        outs.append(out[0].transpose(0, 1))
        sums.append(total.view(total.shape[1], -1))
    result = torch.cat(outs).contiguous(), torch.cat(sums, 1)
    if kept is not None:
        kept.results.append((result[0].detach(), result[1].detach()))  # without the graph that autograd puts on them
    return result


@attend_long.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, borders: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    num, heads, _ = query.shape
    return torch.empty_like(query, memory_format=torch.contiguous_format), query.new_empty(
        (heads, num), dtype=torch.float32
    )


@torch.library.custom_op("polyrl::attend_long_backward", mutates_args=())
def _attend_long_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, borders: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grads: list[list[Tensor]] = [[], [], []]
    ends = borders.tolist()
    for number, its in enumerate(_samples(borders, grad, query, key, value, out)):
        its_grad, its_query, its_key, its_value, its_out = its
        total = sums[:, ends[number] : ends[number + 1]].contiguous().unsqueeze(0)
        if query.is_cuda:
            # No dropout, hence no seed; one sample is no list of samples.
            nothing = torch.zeros((), dtype=torch.int64, device=query.device)
            num = its_query.shape[2]
            found = _backward(
                its_grad, its_query, its_key, its_value, its_out, total.unsqueeze(-1), nothing, nothing, None, None,
                None, num, num, 0.0, True, scale=scale,
            )  # fmt: skip
        else:
            found = _backward_on_cpu(its_grad, its_query, its_key, its_value, its_out, total, 0.0, True, scale=scale)
        for one, part in zip(grads, found, strict=True):
            one.append(part[0].transpose(0, 1))
    dq, dk, dv = (torch.cat(one).contiguous() for one in grads)
    return dq, dk, dv


@_attend_long_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, borders: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (torch.empty_like(one, memory_format=torch.contiguous_format) for one in (query, key, value))
    return query, key, value


def _samples(borders: Tensor, *rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Return the part of each sample, as attention takes it: (1, heads, tokens, dim)."""
    ends = borders.tolist()
    for first, end in pairwise(ends):
        yield tuple(one[first:end].transpose(0, 1).unsqueeze(0) for one in rows)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, borders, scale = inputs
    ctx.save_for_backward(query, key, value, *output, borders)
    ctx.scale = scale


def _go_back(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, out, sums, borders = ctx.saved_tensors
    grads = _attend_long_backward(grad.contiguous(), query, key, value, out, sums, borders, ctx.scale)
    return (*grads, None, None)


attend_long.register_autograd(_go_back, setup_context=_remember)
