"""Log-probabilities and entropies of given tokens from hidden states, without ever holding all logits.

Logits are computed one chunk of rows at a time, reduced to two numbers per row, and freed; the backward pass computes
them again. Gradients, for p = softmax(z / T) and entropy H:

    d log p_y / dz_v = (1[v = y] - p_v) / T          dH / dz_v = -p_v (log p_v + H) / T

As in the engine, logits are in the model's precision, then divided by the temperature in float32.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear

Tensor = torch.Tensor

GREEDY = 1e-5
_CHUNK_BYTES = {"cuda": 1 << 30, "cpu": 1 << 26}
"""The size of a chunk's logits: large enough for matrix products at full speed, small compared with everything else."""
_LEAST_ROWS = 128


class HeadSettings(NamedTuple):
    temperature: float = 1.0
    softcap: float | None = None
    """The soft cap on the logits that some models have."""
    chunk_rows: int | None = None
    """None: chosen by memory."""
    compiled: bool = False


def of_tokens(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    settings: HeadSettings,
    *,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return log p(target) and entropy, (rows,) float32 each, for hidden (rows, width) and weight (vocabulary, width).

    The entropy has a gradient only with `entropy_grad`.
    """
    logprobs, entropy = _Head.apply(hidden, weight, targets, settings)
    return logprobs, entropy if entropy_grad else entropy.detach()


def _rows_of_chunk(hidden: Tensor, weight: Tensor, settings: HeadSettings) -> int:
    if settings.chunk_rows is not None:
        return settings.chunk_rows
    a_row = weight.shape[0] * hidden.element_size()
    return max(_LEAST_ROWS, _CHUNK_BYTES.get(hidden.device.type, 1 << 26) // a_row)


def _scaled(logits: Tensor, temperature: float, softcap: float | None) -> Tensor:
    scaled = logits if logits.dtype == torch.float64 else logits.float()
    if softcap is not None:
        scaled = torch.tanh(scaled / softcap) * softcap
    return scaled if temperature == 1.0 else scaled / temperature


def _reduce(logits: Tensor, targets: Tensor, temperature: float, softcap: float | None) -> tuple[Tensor, ...]:
    """Return the log-probability of the target, the entropy, and the log-sum-exp of the logits: (rows,) each."""
    scaled = _scaled(logits, temperature, softcap)
    total = torch.logsumexp(scaled, -1)
    logprobs = scaled - total.unsqueeze(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, targets.unsqueeze(1)).squeeze(1), entropy, total


def _gradient(
    logits: Tensor,
    targets: Tensor,
    total: Tensor,
    entropy: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    temperature: float,
    softcap: float | None,
) -> Tensor:
    """Return the gradient of the logits, in their dtype."""
    scaled = _scaled(logits, temperature, softcap)
    logprobs = scaled - total.unsqueeze(-1)
    by = grad_logprob.unsqueeze(-1)
    if grad_entropy is not None:
        by = by + grad_entropy.unsqueeze(-1) * (logprobs + entropy.unsqueeze(-1))
    grads = -torch.exp(logprobs) * by
    at = torch.arange(logits.shape[1], device=logits.device)
    grads = torch.where(at == targets.unsqueeze(-1), grads + grad_logprob.unsqueeze(-1), grads) / temperature
    if softcap is not None:
        grads = grads * (1 - (scaled * (temperature / softcap)).square())
    return grads.to(logits.dtype)


def _gradient_in_place(
    logits: Tensor,
    targets: Tensor,
    total: Tensor,
    entropy: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor | None,
    temperature: float,
    softcap: float | None,
) -> Tensor:
    """Do the same as `_gradient` with fewer passes over memory, where nothing fuses them. May overwrite the logits."""
    if grad_entropy is not None or softcap is not None or logits.dtype != torch.float32:
        return _gradient(logits, targets, total, entropy, grad_logprob, grad_entropy, temperature, softcap)
    if temperature != 1.0:
        logits.div_(temperature)
    logits.sub_(total.unsqueeze(-1)).exp_().mul_((-grad_logprob / temperature).unsqueeze(-1))
    return logits.scatter_add_(1, targets.unsqueeze(1), (grad_logprob / temperature).unsqueeze(1))


_COMPILED: dict[str, Callable[..., Any]] = {}


def _functions(*, compiled: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    if not compiled:
        return _reduce, _gradient_in_place
    if not _COMPILED:
        _COMPILED.update(reduce=torch.compile(_reduce, dynamic=True), gradient=torch.compile(_gradient, dynamic=True))
    return _COMPILED["reduce"], _COMPILED["gradient"]


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, settings: HeadSettings
    ) -> tuple[Tensor, Tensor]:
        temperature = 1.0 if settings.temperature < GREEDY else settings.temperature
        reduce, _ = _functions(compiled=settings.compiled)
        rows = _rows_of_chunk(hidden, weight, settings)
        parts: list[tuple[Tensor, ...]] = []
        for start in range(0, hidden.shape[0], rows):
            logits = linear(hidden[start : start + rows], weight)
            parts.append(reduce(logits, targets[start : start + rows], temperature, settings.softcap))
        logprobs, entropy, total = (torch.cat(one) for one in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, targets, total, entropy)
        ctx.rows, ctx.settings, ctx.temperature = rows, settings, temperature
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        hidden, weight, targets, total, entropy = ctx.saved_tensors
        by_logprob, by_entropy = grads
        if by_logprob is None:
            by_logprob = torch.zeros_like(total)
        _, gradient = _functions(compiled=ctx.settings.compiled)
        of_hidden = torch.empty_like(hidden)
        of_weight: Tensor | None = None
        for start in range(0, hidden.shape[0], ctx.rows):
            part = slice(start, start + ctx.rows)
            logits = linear(hidden[part], weight)
            its_entropy = None if by_entropy is None else by_entropy[part]
            of_logits = gradient(
                logits, targets[part], total[part], entropy[part], by_logprob[part], its_entropy,
                ctx.temperature, ctx.settings.softcap,
            )  # fmt: skip
            torch.mm(of_logits, weight, out=of_hidden[part])
            if ctx.needs_input_grad[1]:  # a frozen head does not need the gradient of the largest matrix of all
                of_weight = _add_product(of_weight, of_logits, hidden[part])
        return of_hidden, None if of_weight is None else of_weight.to(weight.dtype), None, None


def _add_product(total: Tensor | None, of_logits: Tensor, hidden: Tensor) -> Tensor:
    """Add a chunk's gradient of the head to the total, in float32 from the second chunk on."""
    if total is None:
        return of_logits.t() @ hidden
    if hidden.dtype in (torch.float32, torch.float64):
        return total.addmm_(of_logits.t(), hidden)
    return total.float().add_(of_logits.t() @ hidden)
