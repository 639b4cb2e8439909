"""AdamW whose state lies in host memory and visits the device one piece at a time.

    device   weights in the model's dtype, gradient sums, a few pieces in transit
    host     both moments, and the float32 masters of a half-precision model: 8 or 12 bytes a parameter, pinned

A piece is copied up, updated by the same kernel that would have updated it there anyway, and copied back. Two pieces
are under way at once, so that both directions of the bus are busy. The result is the same as without offloading, to the
last bit. On a CPU offloading saves nothing and changes nothing.

Of a model that ranks share, each offloads the moments of its own shards. The shards, which are the masters, stay:
layers are gathered from them.

Left out: gradients. They are sums over a step's micro-batches, and would cross the bus with each of these.
"""

import logging
import mmap
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch.optim.adamw import adamw

from polyrl.trainer import sharding
from polyrl.weights.tensors import pin, unpin

log = logging.getLogger("polyrl.trainer")

Tensor = torch.Tensor

_PIECE_ELEMENTS = 32 << 20


class Sum:
    """Holds the gradient sum of a parameter whose master is on another device."""

    grad: Tensor | None = None


class HeldParameter(NamedTuple):
    """A parameter, its float32 master, and the holder of its gradient. In a float32 model all three are the same
    tensor."""

    parameter: Tensor
    master: Tensor
    sum: Any


class _Room(mmap.mmap):
    """Memory that is unpinned before it is freed. Otherwise CUDA would take whatever is mapped there next for it."""

    pinned_at = 0

    def __del__(self) -> None:
        if self.pinned_at and not sys.is_finalizing():
            unpin(self.pinned_at)


class HostMemory:
    """One pinned block, handed out in parts. CUDA would round each of its own allocations up to a power of two."""

    def __init__(self, num_elements: int) -> None:
        self._used = 0
        room = _Room(-1, max(1, 4 * num_elements), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._flat = torch.frombuffer(room, dtype=torch.float32, count=num_elements) if num_elements else torch.zeros(0)
        if num_elements and torch.cuda.is_available():
            if pin(memoryview(room)):
                room.pinned_at = self._flat.data_ptr()
            else:
                log.warning("%d bytes of the optimizer's state cannot be pinned: copies will be slow", 4 * num_elements)

    def take(self, like: Tensor) -> Tensor:
        """Return unused memory of the same shape, filled with zeros."""
        start, self._used = self._used, self._used + like.numel()
        return self._flat[start : self._used].view(like.shape)


class OffloadedAdamW:
    """AdamW with the interface of torch's own: `param_groups`, `state` by master, `step`."""

    def __init__(
        self, held: Sequence[HeldParameter], groups: list[dict[str, Any]], memory: HostMemory, **rule: Any
    ) -> None:
        self.param_groups = groups
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self._held = {one.master: one for one in held}
        self._memory = memory
        self._rule = rule
        self._moments: dict[Tensor, dict[str, Tensor]] = {}

    def new_moments(self, master: Tensor) -> dict[str, Tensor]:
        """Return the memory of a master's moments, with its old contents."""
        if master not in self._moments:
            rows = sharding.own_part(master)
            its = {kind: self._memory.take(rows) for kind in ("exp_avg", "exp_avg_sq")}
            self._moments[master] = {kind: sharding.away_like(one, master) for kind, one in its.items()}
        return dict(self._moments[master])

    @torch.no_grad()
    def step(self) -> None:
        moving = [(self._held[one], group) for group in self.param_groups for one in group["params"]]
        moving = [(one, group) for one, group in moving if one.sum.grad is not None]
        for one, _ in moving:
            self._begin(one)
        devices = {one.parameter.device for one in self._held.values()}
        streams = [torch.cuda.Stream(one) for one in devices if one.type == "cuda" for _ in range(2)]
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        pieces = [
            (one, piece, group) for one, group in moving for piece in _pieces(sharding.own_part(one.master).numel())
        ]
        for number, work in enumerate(pieces):
            with torch.cuda.stream(streams[number % 2]) if streams else nullcontext():
                self._update(*work)
        for stream in streams:
            stream.synchronize()
        for one, _ in moving:  # only now: pieces on other streams may have had to read it
            self.state[one.master]["step"].add_(1)

    def _begin(self, one: HeldParameter) -> None:
        if one.master not in self.state:
            count = torch.zeros((), device=one.parameter.device)
            fresh = {kind: its.zero_() for kind, its in self.new_moments(one.master).items()}
            self.state[one.master] = {"step": count, **fresh}

    def _update(self, one: HeldParameter, piece: slice, group: dict[str, Any]) -> None:
        device, state = one.parameter.device, self.state[one.master]
        master = sharding.own_part(one.master.detach())
        homes = {kind: sharding.own_part(state[kind]) for kind in ("exp_avg", "exp_avg_sq")}

        def near(tensor: Tensor) -> Tensor:
            return tensor.view(-1)[piece].to(device, non_blocking=True)

        weights, moments = near(master), {kind: near(home) for kind, home in homes.items()}
        adamw(
            [weights],
            [sharding.own_part(one.sum.grad).reshape(-1)[piece]],
            [moments["exp_avg"]],
            [moments["exp_avg_sq"]],
            [],
            [state["step"].clone()],
            fused=True,
            amsgrad=False,
            maximize=False,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            **self._rule,
        )
        for kind, tensor in moments.items():
            _put_back(homes[kind], piece, tensor)
        _put_back(master, piece, weights)
        if one.parameter is not one.master:
            one.parameter.detach().view(-1)[piece].copy_(weights)


def _put_back(home: Tensor, piece: slice, tensor: Tensor) -> None:
    """Copy a piece back to its place. Does nothing if it never left."""
    place = home.view(-1)[piece]
    if place.data_ptr() != tensor.data_ptr():
        place.copy_(tensor, non_blocking=True)


def _pieces(num_elements: int) -> Iterator[slice]:
    for start in range(0, num_elements, _PIECE_ELEMENTS):
        yield slice(start, min(start + _PIECE_ELEMENTS, num_elements))
