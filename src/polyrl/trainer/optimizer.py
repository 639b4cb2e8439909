"""AdamW on float32 weights, and the gradients that wait for it.

A float32 model is its own master copy, and torch adds its gradients up in place. A bfloat16 model has float32 masters
beside it: after each backward pass its gradients are added to float32 sums and let go, and after each update the
masters are rounded into the model. Gradients arrive as sums; one division makes them means.

Where ranks share the model, all of this is of the parts of it: a part is float32, and its own master.

Between two steps no gradient holds memory. Weight decay is for matrices: not for norms and biases.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.utils import get_total_norm

from polyrl.config.recipe import OptimizerConfig
from polyrl.errors import UserError
from polyrl.trainer import sharding

Tensor = torch.Tensor

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Update(NamedTuple):
    grad_norm: float
    """Before clipping."""
    lr: float
    applied: bool
    """False where the gradient was not finite: the weights are as they were."""


def lr_at(step: int, config: OptimizerConfig, num_steps: int) -> float:
    """Up in a straight line over the warm-up; then as it is, or down to zero after the last step."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = min(1.0, (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps))
    return config.lr * (1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done)))


class Optimizer:
    """`parameters` of the model by name; `num_steps` of the whole run, for the schedule."""

    def __init__(self, parameters: Mapping[str, Tensor], config: OptimizerConfig, num_steps: int) -> None:
        self._config, self._num_steps = config, num_steps
        self._parameters = {name: one for name, one in parameters.items() if one.requires_grad}
        self._masters: dict[str, Tensor] = {}
        for name, one in self._parameters.items():
            if one.dtype == torch.float32:
                self._masters[name] = one
                continue
            master = self._masters[name] = one.detach().float().requires_grad_()
            one.register_post_accumulate_grad_hook(_adder(master))  # type: ignore[attr-defined]
        matrices = [one for one in self._masters.values() if one.dim() > 1]
        others = [one for one in self._masters.values() if one.dim() <= 1]
        self._adamw = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )

    def gradients(self) -> dict[str, Tensor]:
        """The sums so far, float32. Parameters that nothing reached are missing."""
        return {name: one.grad for name, one in self._masters.items() if one.grad is not None}

    def discard(self) -> None:
        for one in self._masters.values():
            one.grad = None
        for one in self._parameters.values():
            one.grad = None

    @torch.no_grad()
    def update(self, step: int, denominator: float) -> Update:
        """Divide, clip, move the weights, and forget the gradients."""
        lr = lr_at(step, self._config, self._num_steps)
        sums = list(self.gradients().values())
        if not sums:
            return Update(0.0, lr, applied=False)
        norm = float(sharding.total(get_total_norm(sums))) / denominator
        if not math.isfinite(norm):
            self.discard()
            return Update(norm, lr, applied=False)
        limit = self._config.grad_clip
        factor = limit / norm if 0 < limit < norm else 1.0
        for one in sums:
            one.mul_(factor / denominator)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self._round_into_model()
        self.discard()
        return Update(norm, lr, applied=True)

    def _round_into_model(self) -> None:
        for name, one in self._parameters.items():
            if one is not self._masters[name]:
                one.copy_(self._masters[name])

    # Checkpoints

    def state_dict(self) -> dict[str, Tensor]:
        """Not copies. Keys are `master/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME` and `updates/NAME`."""
        state: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            state[f"master/{name}"] = master.detach()
            moments: dict[str, Any] = self._adamw.state.get(master, {})
            if moments:
                state[f"updates/{name}"] = moments["step"]
                state |= {f"{kind}/{name}": moments[kind] for kind in _MOMENTS}
        return state

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copies. Raises UserError where names or shapes are not those of this model; then nothing is changed."""
        wanted = {f"master/{name}": one for name, one in self._masters.items()}
        found = {key for key in state if key.startswith("master/")}
        for key in sorted(found ^ wanted.keys()):
            what = "is not in the model" if key in found else "is missing"
            raise UserError(f"the optimizer's state does not fit the model: {key} {what}")
        for key, value in state.items():
            kind, _, name = key.partition("/")
            shape = self._masters[name].shape if name in self._masters else None
            if kind != "updates" and value.shape != shape:
                raise UserError(f"the optimizer's state does not fit the model: {key} is {list(value.shape)}")
        for name, master in self._masters.items():
            master.copy_(sharding.like(state[f"master/{name}"], master))
            self._adamw.state.pop(master, None)
            if f"updates/{name}" in state:
                moments = {kind: sharding.like(state[f"{kind}/{name}"], master) for kind in _MOMENTS}
                step = state[f"updates/{name}"].to(device=master.device, dtype=torch.float32, copy=True)
                self._adamw.state[master] = {"step": step, **moments}
        self._round_into_model()
        self.discard()


def _adder(master: Tensor) -> Any:
    """Adds a parameter's new gradient to its master's, and lets it go."""

    def add(parameter: Tensor) -> None:
        new = parameter.grad
        assert new is not None
        parameter.grad = None
        if master.grad is None:
            master.grad = new.float()
        else:
            master.grad.add_(new)

    return add
