"""Matrix products that share their input, done as one: q, k and v of an attention; gate and up of an MLP.

The weights stay the parameters they were, with their names: they become views of one matrix, so that training or
loading them in place changes the merged one too, and none is kept twice. With gradients, each product is done by
itself, as before.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class _Shared:
    """One matrix, and its product with the last input."""

    def __init__(self, parts: list[nn.Linear]) -> None:
        with torch.no_grad():
            self.weight = torch.cat([one.weight for one in parts])
            self.bias = None if parts[0].bias is None else torch.cat([one.bias for one in parts])
        self.sizes = [one.out_features for one in parts]
        self.results: tuple[torch.Tensor, ...] = ()


class _Part(nn.Module):
    """In place of a Linear. The first part multiplies for all; the others, called after it in order, take what is
    theirs, and the last leaves nothing behind: kept, the products of all layers are several times a pass's memory.
    """

    def __init__(self, linear_: nn.Linear, shared: _Shared, number: int) -> None:
        super().__init__()
        self.weight = linear_.weight
        self.bias = linear_.bias
        start = sum(shared.sizes[:number])
        self.weight.data = shared.weight[start : start + shared.sizes[number]]
        if self.bias is not None and shared.bias is not None:
            self.bias.data = shared.bias[start : start + shared.sizes[number]]
        self.in_features, self.out_features = linear_.in_features, linear_.out_features
        self._shared, self._number = shared, number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            return linear(x, self.weight, self.bias)
        shared = self._shared
        if self._number == 0:
            shared.results = linear(x, shared.weight, shared.bias).split(shared.sizes, -1)
        mine = shared.results[self._number]
        if self._number == len(shared.sizes) - 1:
            shared.results = ()
        return mine


def merged(first: Any) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Return the matrix and the bias that a module is the first part of; None where it was not merged."""
    if not isinstance(first, _Part):
        return None
    return first._shared.weight, first._shared.bias


def merge_projections(model: Any) -> None:
    """Merge what can be merged. Does nothing the second time."""
    for module in list(model.modules()):
        for names in _TOGETHER:
            parts = [getattr(module, name, None) for name in names]
            plain = [one for one in parts if isinstance(one, nn.Linear)]
            if len(plain) < len(names) or len({one.bias is None for one in plain}) > 1:
                continue
            shared = _Shared(plain)
            for number, name in enumerate(names):
                setattr(module, name, _Part(plain[number], shared, number))
