"""Ranks that train on the same samples, each with a run of their tokens: for samples too long for one device.

    part(context, num_rows)            the rows of a pack that this rank has
    layout(context, of_pack)           attention among all rows of a pack, for `packed.attend`
    whole(context, numbers, counts)    numbers of all rows, each rank having those of its own

Everything but attention works token by token, so a rank needs only its own run of rows. In attention, an all-to-all
gives each rank all rows of a share of the heads, and another one gives it its own rows back (Ulysses, arXiv
2309.14509): the sums are those of one rank. Every rank then has all log-probabilities and computes the same loss;
backwards it goes on with the gradient of its own ones, so the sum of gradients over ranks counts each token once.

For all other code a context is one rank: `InContexts` is the view of that.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from polyrl.engines.builtin.packed import Across, SampleLayout
from polyrl.errors import UserError
from polyrl.trainer.ranks import Context, Peers, RankGroup

Tensor = torch.Tensor


class InContexts:
    """Ranks of which so many in a row work as one."""

    def __init__(self, peers: Peers, num_ranks: int) -> None:
        self._peers, self._num_ranks = peers, num_ranks
        self.rank, self.size = peers.rank // num_ranks, peers.size // num_ranks

    def exchange(self, data: bytes) -> list[bytes]:
        return self._peers.exchange(data)[:: self._num_ranks]


def in_contexts(ranks: RankGroup) -> Peers:
    return ranks if ranks.context is None else InContexts(ranks, ranks.context.size)


def check(name: str, rows: str, num_heads: int, num_ranks: int) -> None:
    """Raise UserError for a model whose attention cannot be divided."""
    if rows != "packed":
        raise UserError(f"train.context_ranks: {name} is trained {rows}, with its own attention; expected 1")
    if num_heads % num_ranks:
        raise UserError(
            f"train.context_ranks: {num_ranks}, and {name} has {num_heads} attention heads; expected a divisor of that"
        )


def part(context: Context, num_rows: int) -> range:
    """Return this rank's rows. `num_rows` is a multiple of the number of ranks."""
    per = num_rows // context.size
    return range(context.rank * per, (context.rank + 1) * per)


def layout(context: Context, of_pack: SampleLayout) -> Across:
    return Across(
        of_pack,
        context.size,
        lambda rows: _ToHeads.apply(rows, context),
        lambda heads: _ToRows.apply(heads, context),
    )


def whole(context: Context, numbers: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the numbers of all ranks, (sum of counts,), in the order of ranks. Each rank gives `counts[rank]`."""
    return _Whole.apply(numbers, context, tuple(counts))


def _swap(parts: Tensor, context: Context) -> Tensor:
    """Give part r to rank r, and return what all ranks give this one, in the order of ranks."""
    parts = parts.contiguous()
    found = torch.empty_like(parts)
    dist.all_to_all_single(found, parts, group=context.group)
    return found


def _to_heads(rows: Tensor, context: Context) -> Tensor:
    """Exchange this rank's rows, (rows, heads, dim), for all rows of its heads."""
    num, heads, dim = rows.shape
    parts = rows.view(num, context.size, heads // context.size, dim).transpose(0, 1)
    return _swap(parts, context).reshape(num * context.size, heads // context.size, dim)


def _to_rows(heads: Tensor, context: Context) -> Tensor:
    num, some, dim = heads.shape
    parts = _swap(heads.reshape(context.size, num // context.size, some, dim), context)
    return parts.transpose(0, 1).reshape(num // context.size, context.size * some, dim)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, context: Context) -> Tensor:
        ctx.context = context
        return _to_heads(rows.contiguous(), context)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _to_rows(grads[0], ctx.context), None


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, context: Context) -> Tensor:
        ctx.context = context
        return _to_rows(heads, context)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _to_heads(grads[0].contiguous(), ctx.context), None


class _Whole(torch.autograd.Function):
    """Backwards, a rank keeps the gradient of its own numbers: all have computed the same one."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, context: Context, counts: tuple[int, ...]) -> Tensor:
        ctx.rank, ctx.counts = context.rank, counts
        padded = numbers.new_zeros(max(counts))
        padded[: len(numbers)] = numbers
        found = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(found, padded, group=context.group)
        return torch.cat([one[:num] for one, num in zip(found, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].split(ctx.counts)[ctx.rank], None, None
