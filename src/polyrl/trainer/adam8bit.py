"""AdamW with one-byte moments, from torchao: blocks of 256 numbers, with one scale each.

torchao keeps float32 moments for matrices of fewer than 4096 numbers, or of a size that blocks do not divide. It
compiles its update on a GPU; on a CPU the update runs uncompiled, so that no compiler is needed.
"""

import importlib.util
from typing import Any

import torch

from polyrl.errors import UserError
from polyrl.trainer import sharding

Tensor = torch.Tensor

_PARTS = ("codes", "scale")


def make(groups: list[dict[str, Any]], **rule: Any) -> Any:
    """Return an optimizer like torch's own, except that `lr` is a tensor to be filled. Raises UserError without
    torchao."""
    if importlib.util.find_spec("torchao") is None:
        raise UserError("optimizer.kind: \"adamw8bit\" needs torchao: pip install 'polyrl[adam8bit]'")
    from torchao.optim import AdamW8bit  # pyright: ignore[reportMissingImports]  an extra

    class Adam8bit(AdamW8bit):  # type: ignore[misc]
        def step(self, closure: Any = None) -> Any:
            on_gpu = any(one.is_cuda for group in self.param_groups for one in group["params"])
            with torch.compiler.set_stance("default" if on_gpu else "force_eager"):
                return super().step(closure)

        def new_moments(self, master: Tensor) -> dict[str, Tensor]:
            return {"exp_avg": self._new_buffer(master, True), "exp_avg_sq": self._new_buffer(master, False)}

    return Adam8bit(groups, **rule)


def parts_of(moment: Tensor) -> dict[str, Tensor]:
    """Return the plain tensors that make up a moment, by the suffix that they add to its name."""
    if type(moment) is Tensor or sharding.is_part(moment):
        return {"": moment}
    return {f".{name}": getattr(moment, name) for name in _PARTS}
