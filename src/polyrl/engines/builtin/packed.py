"""A trainer's causal attention over a pack: several samples in one flat row, none of which sees another.

The modules are the engine's own, with the engine's own parameters: a forward call that passes `pack` trains, one that
passes `step` decodes. `lay_out` says once, for all layers, where the samples of a pack lie.

On a GPU in half precision that is a list of borders, for torch's varlen flash attention, or for cuDNN's where all
samples are long (long_attention.py). Elsewhere samples of about equal length are gathered into *buckets*, padded to
their longest within attention alone. Padding comes after a sample's last token, so that no real token can see it: a
bucket needs no mask.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from polyrl.engines.builtin.long_attention import LONG_TOKENS, attend_long

Tensor = torch.Tensor

_SLACK = 1.25
_SLACK_TOKENS = 8
"""Samples share a bucket when the longest is at most this much longer than the shortest."""


class Borders(NamedTuple):
    """Where samples begin and end, for flash attention."""

    first_rows: Tensor
    """(samples + 1,): int32."""
    longest: int
    on_host: Tensor | None = None
    """The same in the host's memory, if the samples are long enough for long_attention.py."""


class Bucket(NamedTuple):
    num: int
    longest: int


class Buckets(NamedTuple):
    """Samples of about equal length side by side."""

    sizes: tuple[Bucket, ...]
    there: Tensor
    """(places,): the row that each place holds; any row for padding."""
    back: Tensor
    """(rows,): the place that each row is in."""


SampleLayout = Borders | Buckets


class Across(NamedTuple):
    """Samples whose rows are divided between ranks. In attention each rank has all rows of a share of the heads."""

    whole: SampleLayout
    num_ranks: int
    to_heads: Callable[[Tensor], Tensor]
    """From (own rows, heads, dim) to (all rows, own heads, dim)."""
    to_rows: Callable[[Tensor], Tensor]
    """The opposite."""


def lay_out(lengths: Sequence[int], device: torch.device, *, flash: bool, long: bool = False) -> SampleLayout:
    """Lay samples out. `lengths` are in the order of their rows; `long`: cuDNN can take long ones."""
    ends = np.cumsum(np.asarray(lengths, np.int64))
    if flash:
        borders = np.concatenate([[0], ends]).astype(np.int32)
        are_long = min(lengths) >= LONG_TOKENS and long
        on_host = torch.from_numpy(borders.astype(np.int64)) if are_long else None
        return Borders(torch.from_numpy(borders).to(device, non_blocking=True), max(lengths), on_host)
    return lay_out_buckets(lengths, device, group_alike(lengths))


def lay_out_buckets(lengths: Sequence[int], device: torch.device, groups: Sequence[Sequence[int]]) -> Buckets:
    """Lay buckets out. `groups` are the numbers of the samples in each bucket."""
    ends = np.cumsum(np.asarray(lengths, np.int64))
    sizes: list[Bucket] = []
    there: list[np.ndarray[Any, np.dtype[np.int64]]] = []
    back = np.empty(int(ends[-1]), np.int64)
    place = 0
    for members in groups:
        longest = max(lengths[one] for one in members)
        sizes.append(Bucket(len(members), longest))
        for member in members:
            num, first = lengths[member], int(ends[member]) - lengths[member]
            rows = np.full(longest, first, np.int64)
            rows[:num] += np.arange(num)
            there.append(rows)
            back[first : first + num] = np.arange(place, place + num)
            place += longest
    return Buckets(tuple(sizes), torch.from_numpy(np.concatenate(there)).to(device), torch.from_numpy(back).to(device))


def group_alike(lengths: Sequence[int]) -> list[list[int]]:
    """Numbers of samples, shortest first, cut where lengths have grown too much."""
    groups: list[list[int]] = []
    for member in sorted(range(len(lengths)), key=lambda one: lengths[one]):
        if not groups or lengths[member] > lengths[groups[-1][0]] * _SLACK + _SLACK_TOKENS:
            groups.append([])
        groups[-1].append(member)
    return groups


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: SampleLayout | Across,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Query (1, heads, rows, dim), key and value (1, kv heads, rows, dim); gives (1, rows, heads, dim)."""
    if isinstance(layout, Across):
        if key.shape[1] % layout.num_ranks:
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        moved = [layout.to_heads(one[0].transpose(0, 1)).transpose(0, 1)[None] for one in (query, key, value)]
        out = attend(moved[0], moved[1], moved[2], layout.whole, scaling, window, softcap)
        return layout.to_rows(out[0]).unsqueeze(0)
    query, key, value = (one[0].transpose(0, 1) for one in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(layout, Borders):
        if layout.on_host is not None and window is None:
            return attend_long(query, key, value, layout.on_host, scale)[0].unsqueeze(0)
        return flash(query, key, value, layout, layout, scale, window).unsqueeze(0)
    gathered = [_Move.apply(one, layout.there, layout.back) for one in (query, key, value)]
    outs: list[Tensor] = []
    place = 0
    for num, longest in layout.sizes:
        its = [
            one[place : place + num * longest].view(num, longest, *one.shape[1:]).transpose(1, 2) for one in gathered
        ]
        out = _causal(its[0], its[1], its[2], scale, window, softcap)
        outs.append(out.transpose(1, 2).reshape(num * longest, *query.shape[1:]))
        place += num * longest
    together = outs[0] if len(outs) == 1 else torch.cat(outs)
    return _Back.apply(together, layout.back).unsqueeze(0)


def _causal(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None, softcap: float | None
) -> Tensor:
    """Attend causally; (num, heads, longest, dim) each, with fewer heads in key and value."""
    groups, longest = query.shape[1] // key.shape[1], query.shape[2]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if softcap is None and (window is None or longest <= window):
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    at = torch.arange(longest, device=query.device)
    behind = at.unsqueeze(1) - at
    mask = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    if softcap is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    scores = torch.tanh(query @ key.transpose(-1, -2) * (scale / softcap)) * softcap
    return torch.softmax(scores.masked_fill(~mask, float("-inf")).float(), -1).to(query.dtype) @ value


class _Move(torch.autograd.Function):
    """Rows into places. Nothing ever comes back from padding, so that the gradient is a gather too."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows.index_select(0, there)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (back,) = ctx.saved_tensors
        return grads[0].index_select(0, back), None, None


class _Back(torch.autograd.Function):
    """Places into rows."""

    @staticmethod
    def forward(ctx: Any, places: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        ctx.num_places = places.shape[0]
        return places.index_select(0, back)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (back,) = ctx.saved_tensors
        places = grads[0].new_zeros((ctx.num_places, *grads[0].shape[1:]))
        places[back] = grads[0]
        return places, None


_VARLEN: Any = None
_TAKES: frozenset[str] = frozenset()


def find_flash() -> bool:
    """Return whether torch has varlen attention, looked up before anything is compiled."""
    global _VARLEN, _TAKES  # noqa: PLW0603
    if _VARLEN is None:
        try:
            from torch.nn.attention import varlen
        except ImportError:
            return False
        _VARLEN = varlen.varlen_attn
        _TAKES = frozenset(inspect.signature(_VARLEN).parameters)
    return True


def has_windows() -> bool:
    """Return whether torch's varlen attention can leave out what is too far back."""
    return find_flash() and "window_size" in _TAKES


def flash(
    query: Tensor, key: Tensor, value: Tensor, rows: Borders, contexts: Borders, scale: float, window: int | None
) -> Tensor:
    """Query (rows, heads, dim), key and value (context tokens, kv heads, dim). After `find_flash`.

    A sample's rows are the last tokens of its context.
    """
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    more: dict[str, Any] = {}
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and "enable_gqa" in _TAKES:
        more["enable_gqa"] = True
    elif groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if "window_size" in _TAKES:
        more["window_size"] = (-1 if window is None else window - 1, 0)
        more["scale"] = scale
    elif window is not None:
        raise RuntimeError("sliding windows need a newer torch on a GPU")
    else:  # an older torch has its own scale
        more["is_causal"] = True
        query = query * (scale * query.shape[-1] ** 0.5)
    return _VARLEN(query, key, value, rows.first_rows, contexts.first_rows, rows.longest, contexts.longest, **more)
