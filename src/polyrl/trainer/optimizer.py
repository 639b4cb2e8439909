"""AdamW on float32 weights, or an optimizer of your own, and the gradient sums that it consumes.

A float32 model is its own master copy, and torch accumulates its gradients in place. A bfloat16 model has separate
float32 masters: after each backward pass its gradients are added to float32 sums and freed, and after each update the
masters are rounded into the model. Gradients arrive as sums; one division makes them means.

If ranks share the model, all of this applies to each rank's shards: a shard is float32, and its own master. With
`offload`, moments and masters that are no shards are in host memory (offload.py); with `adamw8bit`, moments take one
byte each. Between two steps no gradient holds memory. Weight decay applies to matrices, not to norms and biases.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.utils import get_total_norm

from polyrl.config.recipe import OptimizerConfig
from polyrl.errors import UserError
from polyrl.trainer import adam8bit, own_optimizer, sharding
from polyrl.trainer.adam8bit import parts_of
from polyrl.trainer.offload import HeldParameter, HostMemory, OffloadedAdamW, Sum

Tensor = torch.Tensor

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Update(NamedTuple):
    grad_norm: float
    """The norm before clipping."""
    lr: float
    applied: bool
    """False if the gradient was not finite, or there was none: the weights did not change."""


def lr_at(step: int, config: OptimizerConfig, num_steps: int) -> float:
    """Return the learning rate: a linear warm-up, then constant, or falling to zero after the last step."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = min(1.0, (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps))
    return config.lr * (1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done)))


class Optimizer:
    """Updates the model's parameters, given by name. `num_steps` is the length of the run, for the schedule."""

    def __init__(self, parameters: Mapping[str, Tensor], config: OptimizerConfig, num_steps: int) -> None:
        self._config, self._num_steps = config, num_steps
        self._parameters = {name: one for name, one in parameters.items() if one.requires_grad}
        memory = HostMemory(_num_host_elements(self._parameters)) if config.offload else None
        self._masters: dict[str, Tensor] = {}
        self._sums: dict[str, Any] = {}
        """The holder of each master's gradient: the master itself, unless it is on another device."""
        for name, one in self._parameters.items():
            if one.dtype == torch.float32:
                self._masters[name] = self._sums[name] = one
                continue
            master = self._masters[name] = _master_of(one, memory)
            self._sums[name] = master if memory is None else Sum()
            one.register_post_accumulate_grad_hook(_adder(self._sums[name]))  # type: ignore[attr-defined]
        self._adamw = self._make(memory)

    def _make(self, memory: HostMemory | None) -> Any:
        config = self._config
        if config.kind != "adamw" and self._is_shared():
            raise UserError('optimizer.kind: other than "adamw" is for one rank; ranks divide its state already')
        groups: list[dict[str, Any]] = [
            {"params": [one for one in self._masters.values() if one.dim() > 1], "weight_decay": config.weight_decay},
            {"params": [one for one in self._masters.values() if one.dim() <= 1], "weight_decay": 0.0},
        ]
        if memory is not None:
            held = [HeldParameter(one, self._masters[name], self._sums[name]) for name, one in self._parameters.items()]
            rule = {"beta1": config.betas[0], "beta2": config.betas[1], "eps": config.eps}
            return OffloadedAdamW(held, groups, memory, **rule)
        if config.is_own:
            return own_optimizer.make([group for group in groups if group["params"]], config)
        rule = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
        if config.kind == "adamw8bit":
            return adam8bit.make([group for group in groups if group["params"]], **rule)
        return torch.optim.AdamW(groups, fused=True, **rule)

    def _is_shared(self) -> bool:
        return any(map(sharding.is_part, self._masters.values()))

    def gradients(self) -> dict[str, Tensor]:
        """Return the float32 sums so far. Parameters without a gradient are missing."""
        return {name: one.grad for name, one in self._sums.items() if one.grad is not None}

    def fill_in(self, names: Iterable[str]) -> None:
        """Give these parameters a gradient of zero if they have none."""
        for name in names:
            if self._sums[name].grad is None:
                self._sums[name].grad = torch.zeros_like(self._parameters[name], dtype=torch.float32)

    def discard(self) -> None:
        for one in self._sums.values():
            one.grad = None
        for one in self._parameters.values():
            one.grad = None

    def how_to_take_less(self) -> str:
        """Return the settings that leave more of the device's memory free."""
        if self._is_shared():
            ranks = "share the model between more ranks (train.ranks)"
            return ranks if self._config.offload else f"{ranks}, or set optimizer.offload=true"
        if self._config.offload:
            return "train low-rank changes (lora.rank), or less at once (train.micro_batch_tokens)"
        smaller = "" if self._config.kind == "adamw8bit" else " or optimizer.kind=adamw8bit"
        return f"set optimizer.offload=true{smaller}, or train low-rank changes (lora.rank)"

    @torch.no_grad()
    def update(self, step: int, denominator: float, num_steps: int | None = None, *, lr_factor: float = 1.0) -> Update:
        """Divide, clip, move the weights, and forget the gradients. `num_steps` overrides the length of the run."""
        lr = lr_factor * lr_at(step, self._config, self._num_steps if num_steps is None else num_steps)
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
            _set_lr(group, lr)
        self._adamw.step()
        if not self._config.offload:  # offloading rounds each piece on its way back
            self._round_into_model()
        self.discard()
        return Update(norm, lr, applied=True)

    def _round_into_model(self) -> None:
        for name, one in self._parameters.items():
            if one is not self._masters[name]:
                one.copy_(self._masters[name])

    # Checkpoints

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state, not copied. Keys are `master/NAME`, `exp_avg/NAME`, `exp_avg_sq/NAME` and `updates/NAME`.

        Moments made of several tensors have a key for each: `exp_avg.PART/NAME`. An optimizer of your own has other
        keys instead of moments (own_optimizer.py).
        """
        if self._config.is_own:
            masters = {f"master/{name}": one.detach() for name, one in self._masters.items()}
            return masters | own_optimizer.state_of(self._adamw, self._masters)
        state: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            state[f"master/{name}"] = master.detach()
            moments: dict[str, Any] = self._adamw.state.get(master, {})
            if moments:
                state[f"updates/{name}"] = moments["step"]
                state |= _flat(moments, name)
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy a state into the optimizer and the model. Raises UserError if names or shapes do not fit the model;
        nothing is changed then. Only the state of an optimizer of your own is checked after the masters are copied."""
        own = [key for key in state if self._config.is_own and not key.startswith("master/")]
        moments = {
            name: self._new_moments(master) for name, master in self._masters.items() if f"updates/{name}" in state
        }
        wanted = {f"master/{name}": one.detach() for name, one in self._masters.items()}
        for name, one in moments.items():
            wanted |= _flat(one, name)
        found = {key for key in state if not key.startswith("updates/")}.difference(own)
        for key in sorted(found ^ wanted.keys()):
            what = "is not in the model" if key in found else "is missing"
            raise UserError(f"the optimizer's state does not fit the model: {key} {what}")
        for key, one in wanted.items():
            if (shape := sharding.shape_of(state, key)) != tuple(one.shape):
                raise UserError(f"the optimizer's state does not fit the model: {key} is {list(shape)}")
        for key, one in wanted.items():
            one.copy_(sharding.part_of(state, key, one))
        if self._config.is_own:
            own_optimizer.restore(self._adamw, self._masters, {key: state[key] for key in own})
        else:
            self._restore(moments, state)
        self._round_into_model()
        self.discard()

    def _restore(self, moments: Mapping[str, dict[str, Tensor]], state: Mapping[str, Tensor]) -> None:
        for name, master in self._masters.items():
            self._adamw.state.pop(master, None)
            if name in moments:
                device = "cpu" if self._config.kind == "adamw8bit" else self._parameters[name].device
                count = state[f"updates/{name}"].to(device=device, dtype=torch.float32, copy=True)
                self._adamw.state[master] = {"step": count, **moments[name]}

    def _new_moments(self, master: Tensor) -> dict[str, Tensor]:
        if isinstance(self._adamw, torch.optim.AdamW):
            return {kind: torch.zeros_like(master) for kind in _MOMENTS}
        return self._adamw.new_moments(master)


def _flat(moments: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    return {f"{kind}{part}/{name}": one for kind in _MOMENTS for part, one in parts_of(moments[kind]).items()}


def _num_host_elements(parameters: Mapping[str, Tensor]) -> int:
    """Return how many numbers the host holds: moments, and masters that are not the parameters themselves."""
    return sum((2 if one.dtype == torch.float32 else 3) * sharding.own_part(one).numel() for one in parameters.values())


def _master_of(parameter: Tensor, memory: HostMemory | None) -> Tensor:
    if memory is None:
        return parameter.detach().float().requires_grad_()
    return memory.take(parameter).copy_(parameter.detach())


def _set_lr(group: dict[str, Any], lr: float) -> None:
    if isinstance(group.get("lr"), Tensor):  # torchao keeps a tensor there
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr


def _adder(total: Any) -> Any:
    """Return a hook that adds a parameter's new gradient to the sum so far, and frees it."""

    def add(parameter: Tensor) -> None:
        new = parameter.grad
        assert new is not None
        parameter.grad = None
        if total.grad is None:
            total.grad = new.float()
        else:
            total.grad.add_(new)

    return add
