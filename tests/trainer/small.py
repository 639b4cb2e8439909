"""A very small policy, samples for it, and a step's gradient written once more with transformers alone."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.builtin.tiny_models import save_tiny
from tests.trainer.reference_step import Known, slopes
from transformers import AutoModelForCausalLM

from polyrl.config.recipe import AlgorithmConfig
from polyrl.trainer.batch import TrainSample
from polyrl.trainer.model import Policy
from polyrl.trainer.optimizer import Optimizer, Update

VOCAB = 64
CAP = 16
"""Answers end here."""


def save_small(folder: Path, family: str = "qwen3", seed: int = 0) -> Path:
    return save_tiny(family, folder, seed=seed, vocab_size=VOCAB, hidden_size=32, intermediate_size=48, head_dim=8)


def draw_groups(seed: int, sizes: tuple[int, ...] = (4, 2, 3)) -> list[list[TrainSample]]:
    """Behaviour log-probabilities are about those of a random policy, so that ratios fall on both sides of a clip."""
    rng = np.random.default_rng(seed)
    groups: list[list[TrainSample]] = []
    for number, size in enumerate(sizes):
        prompt = rng.integers(3, VOCAB, rng.integers(1, 9)).astype(np.int32)
        group: list[TrainSample] = []
        for _ in range(size):
            num = int(rng.integers(1, CAP + 1))
            answer = rng.integers(3, VOCAB, num).astype(np.int32)
            logprobs = np.zeros(num, np.float32)
            finish = "length" if num == CAP else "stop"
            group.append(TrainSample(prompt, answer, logprobs, float(rng.normal()), number, finish))
        groups.append(group)
    return groups


def near(policy: Policy, groups: list[list[TrainSample]], spread: float = 0.3) -> list[list[TrainSample]]:
    """The same samples as if an engine a little apart from the policy had drawn them."""
    rng = np.random.default_rng(99)
    out: list[list[TrainSample]] = []
    for group in groups:
        out.append([])
        for one in group:
            true = plain_logprobs(policy.model, one)[0].detach().numpy()
            noise = rng.normal(0, spread, len(true))
            out[-1].append(one._replace(logprobs=np.minimum(true + noise, 0.0).astype(np.float32)))
    return out


def plain_logprobs(model: Any, sample: TrainSample, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """One sample by itself, as anybody would do it: log-probabilities of its answer, and entropies."""
    ids = torch.from_numpy(np.concatenate([sample.prompt, sample.answer])).long()
    logits = model(ids.unsqueeze(0), use_cache=False).logits[0] / temperature
    logprobs = torch.log_softmax(logits, -1)[len(sample.prompt) - 1 : -1]
    return logprobs.gather(1, ids[len(sample.prompt) :, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


class Recording(Optimizer):
    """Keeps the gradient that an update had, divided and not yet clipped; and the weights before it."""

    last: dict[str, torch.Tensor]

    def update(self, step: int, denominator: float, num_steps: int | None = None, **more: float) -> Update:
        self.last = {name: one / denominator for name, one in self.gradients().items()}
        self.each = [*getattr(self, "each", []), self.last]
        weights = {name: one.detach().clone() for name, one in self._parameters.items()}
        self.weights_before = [*getattr(self, "weights_before", []), weights]
        return super().update(step, denominator, num_steps, **more)


def plain_gradient(
    folder: Path,
    groups: list[list[TrainSample]],
    config: AlgorithmConfig,
    reference: Path | None,
    temperature: float = 1.0,
    *,
    weights_now: dict[str, torch.Tensor] | None = None,
    only: tuple[int, ...] | None = None,
) -> tuple[float, dict[str, torch.Tensor]]:
    """The policy loss and the whole gradient in float64: sample by sample, with derivatives in closed form.

    Old log-probabilities are those of the folder's weights; the gradient is at `weights_now`, if these have moved, and
    of `only` these groups of the step.
    """
    start = load_plain(folder)
    model = load_plain(folder)
    if weights_now is not None:
        model.load_state_dict(weights_now, strict=False)
        model.tie_weights()
    frozen = None if reference is None else load_plain(reference)

    def known(one: TrainSample) -> Known:
        now, first, its = (
            None if of is None else plain_logprobs(of, one, temperature)[0].detach().numpy()
            for of in (model, start, frozen)
        )
        assert now is not None and first is not None
        return Known(one.reward, one.finish == "length", now, first, one.logprobs.astype(float), its)

    found = slopes(config, [[known(one) for one in group] for group in groups], CAP, only)
    for group, its_slopes, entropies in zip(groups, found.logprobs, found.entropies, strict=True):
        for one, slope, by_entropy in zip(group, its_slopes, entropies, strict=True):
            logp, entropy = plain_logprobs(model, one, temperature)
            ((logp * torch.from_numpy(slope)).sum() + by_entropy * entropy.sum()).backward()
    return found.loss, {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def load_plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").double()
