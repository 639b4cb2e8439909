"""Every loss x advantage x correction x aggregation x KL, as whole steps of a very small policy, and their references.

The table is made from the registries and from the recipe's types: a name that is new is in it at once, and fails until
`formulas` has it too. Gradients are compared by all parameters: the reference multiplies the derivative by each token's
log-probability with the Jacobian of these, which transformers and autograd give once, in float64.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import numpy as np
import torch
from tests.builtin.tiny_models import save_tiny
from tests.trainer.reference_step import Known, slopes
from tests.trainer.small import Recording, load_plain, plain_logprobs

from polyrl.config.recipe import AlgorithmConfig, OptimizerConfig
from polyrl.scheduling.rules.order import mix64
from polyrl.trainer.batch import TrainSample
from polyrl.trainer.critic import Critic
from polyrl.trainer.model import Policy
from polyrl.trainer.objectives.registry import ADVANTAGES, BATCH_ADVANTAGES, BY_CRITIC, LOSSES
from polyrl.trainer.step import StepAccumulator

CAP = 5
TOLERANCE = 1e-5
VOCAB = 16
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
CLIPS: dict[str, dict[str, Any]] = {
    "ppo_clip": {"clip_low": 0.1, "clip_high": 0.15, "dual_clip": 1.3},
    "gspo": {"clip_low": 0.05, "clip_high": 0.08},
    "cispo": {"clip_low": 0.1, "clip_high": 0.15},
}
"""Narrow, so that they hold some tokens and not others."""
BOUNDS: dict[str, dict[str, Any]] = {
    "tis-token": {"correction_high": 1.1},
    "tis-sequence": {"correction_high": 1.2},
    "icepop": {"correction_low": 0.8, "correction_high": 1.2},
    "sequence-mask": {"correction_low": 0.9, "correction_high": 1.1},
}


def shipped(registry: Mapping[str, Any]) -> list[str]:
    """Names that come with the package; tests register others."""
    return [name for name, one in registry.items() if one.__module__.startswith("polyrl.")]


def choices(key: str) -> list[str]:
    """What the recipe's type allows for a key, beside None."""
    kind = get_type_hints(AlgorithmConfig)[key]
    found = [one for part in (kind, *get_args(kind)) for one in get_args(part) or ()]
    return [one for one in found if isinstance(one, str)]


def all_losses() -> list[str]:
    return shipped(LOSSES)


def all_advantages() -> list[str]:
    return [*shipped(ADVANTAGES), *shipped(BATCH_ADVANTAGES), BY_CRITIC]


def kinds_of_kl() -> list[dict[str, Any]]:
    placed = [one for one in choices("kl") if one != "none"]
    return [{"kl": "none"}] + [
        {"kl": kl, "kl_estimator": estimator, "kl_coef": 0.3}
        for kl, estimator in product(placed, choices("kl_estimator"))
    ]


def cases(loss: str, advantage: str) -> Iterator[dict[str, Any]]:
    """Of one loss with one advantage, all there are."""
    rest = product(choices("old_logprobs"), choices("correction"), choices("aggregation"), kinds_of_kl())
    for old, correction, aggregation, kl in rest:
        if old == "engine" and correction != "none":  # refused: the ratio has it already
            continue
        case = {"loss": loss, "advantage": advantage, "old_logprobs": old, "correction": correction}
        yield case | {"aggregation": aggregation} | kl | CLIPS.get(loss, {}) | BOUNDS.get(correction, {})


def sample_of_cases(stride: int) -> list[dict[str, Any]]:
    """Every so many of the whole table; each second one with two updates."""
    table = [case for loss, advantage in product(all_losses(), all_advantages()) for case in cases(loss, advantage)]
    return [case | {"mini_batches": 1 + number % 2} for number, case in enumerate(table[::stride])]


class Found(NamedTuple):
    loss: float
    gradients: list["np.ndarray[Any, np.dtype[np.float64]]"]
    """Of the policy's updates, each as one long row; then of the critic's, where there is one."""


class Table:
    """`folder` is for the models, which are made."""

    def __init__(self, folder: Path, dtype: str = "float32", device: str = "cpu", head_dim: int = 8) -> None:
        self.places = places = [
            save_tiny("qwen3", folder / str(seed), seed=seed, head_dim=head_dim, **SHAPE) for seed in range(3)
        ]
        self.policy, self.reference, trunk = (Policy.load(str(one), dtype, device) for one in places)
        self.reference.freeze()
        self.optimizer = Recording(self.policy.parameters(), OptimizerConfig(lr=1e-30), 1)
        self.critic = Critic(trunk, OptimizerConfig(lr=1e-30), 1)
        head = torch.randn(SHAPE["hidden_size"], generator=torch.Generator().manual_seed(5)) * 0.3
        self.critic.parameters()["value_head.weight"].data.copy_(head)
        self.critic.optimizer.__class__ = Recording  # a second one would take a bfloat16 model's gradients twice
        self.values: Any = self.critic.optimizer
        self._look_at(places, head)

    def _look_at(self, places: list[Path], head: torch.Tensor) -> None:
        """What the reference must know, in float64; and the samples, which are drawn a little apart from the policy."""
        model, other, trunk = (load_plain(one) for one in places)
        rng = np.random.default_rng(3)
        self.groups: list[list[TrainSample]] = []
        self.known: list[list[Known]] = []
        rows: list[torch.Tensor] = []
        value_rows: list[torch.Tensor] = []
        self.names = [name for name, _ in model.named_parameters()]
        self.value_names = [name for name, _ in trunk.model.named_parameters()] + [
            "value_head.weight",
            "value_head.bias",
        ]
        bias = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        weight = head.double().requires_grad_()
        for number, size in enumerate((3, 2, 2)):
            prompt = rng.integers(3, VOCAB, 3).astype(np.int32)
            self.groups.append([])
            self.known.append([])
            for _ in range(size):
                answer = rng.integers(3, VOCAB, rng.integers(1, CAP + 1)).astype(np.int32)
                bare = TrainSample(prompt, answer, np.zeros(len(answer), np.float32), float(rng.normal()), number)
                now, its = (plain_logprobs(one, bare)[0] for one in (model, other))
                said = values_of(trunk, bare) @ weight + bias
                rows += [jacobian(one, list(model.parameters())) for one in now]
                value_rows += [jacobian(one, [*trunk.model.parameters(), weight, bias]) for one in said]
                start = (now.detach().numpy() + rng.normal(0, 0.15, len(answer))).astype(np.float32)
                engine = (start + rng.normal(0, 0.15, len(answer))).astype(np.float32)
                self.groups[-1].append(bare._replace(logprobs=engine, old_logprobs=start))
                self.known[-1].append(
                    Known(
                        bare.reward,
                        False,
                        now.detach().numpy(),
                        start.astype(float),
                        engine.astype(float),
                        its.detach().numpy(),
                        said.detach().numpy(),
                    )
                )
        self.jacobian, self.value_jacobian = (torch.stack(one).numpy() for one in (rows, value_rows))

    def expected(self, config: AlgorithmConfig) -> Found:
        """Of each mini-batch, where there are several: the weights do not move."""
        order = sorted(range(len(self.groups)), key=lambda group: mix64(0, group))
        num = config.mini_batches
        ends = [len(order) * part // num for part in range(num + 1)]
        parts = [tuple(order[first:end]) for first, end in pairwise(ends)]
        found = [slopes(config, self.known, CAP, part) for part in parts]
        gradients = [_flat(one.logprobs) @ self.jacobian for one in found]
        if config.advantage == BY_CRITIC:
            gradients += [_flat(one.values) @ self.value_jacobian for one in found]
        return Found(sum(one.loss for one in found) / num, gradients)

    def step(self, config: AlgorithmConfig) -> Found:
        """A whole one, of groups that come in two calls."""
        has_critic = config.advantage == BY_CRITIC
        steps = StepAccumulator(
            self.policy,
            self.optimizer,
            config,
            max_tokens=24,
            max_new_tokens=CAP,
            reference=None if config.kl == "none" else self.reference,
            critic=self.critic if has_critic else None,
        )
        rows = [(self.optimizer, self.names), *([(self.values, self.value_names)] if has_critic else [])]
        for one, _ in rows:
            one.each, one.weights_before = [], []
        steps.begin(0)
        steps.add(self.groups[:1])
        steps.add(self.groups[1:])
        stats = steps.finish()
        return Found(
            stats.metrics["actor/pg_loss"], [_in_a_row(each, names) for one, names in rows for each in one.each]
        )

    def distance(self, case: Mapping[str, Any]) -> float:
        """How far a step is from what it must give, as a share of that: the gradients' and the loss's largest."""
        config = AlgorithmConfig(**case)
        ours, theirs = self.step(config), self.expected(config)
        apart = [abs(ours.loss - theirs.loss) / max(1.0, abs(theirs.loss))]
        for one, its in zip(ours.gradients, theirs.gradients, strict=True):
            apart.append(float(np.linalg.norm(one - its) / np.linalg.norm(its)))
        return max(apart)


def values_of(trunk: Any, one: TrainSample) -> torch.Tensor:
    """(answer tokens, width): hidden states before each of them."""
    ids = torch.from_numpy(np.concatenate([one.prompt, one.answer])).long()
    return trunk.model(ids.unsqueeze(0), use_cache=False).last_hidden_state[0][len(one.prompt) - 1 : -1]


def jacobian(number: torch.Tensor, parameters: list[torch.Tensor]) -> torch.Tensor:
    """Of one number, by all parameters in a row."""
    found = torch.autograd.grad(number, parameters, retain_graph=True, allow_unused=True)
    flat = [torch.zeros_like(by) if one is None else one for one, by in zip(found, parameters, strict=True)]
    return torch.cat([one.flatten() for one in flat])


def _flat(of_groups: list[list[Any]]) -> Any:
    return np.concatenate([one for group in of_groups for one in group])


def _in_a_row(gradient: dict[str, torch.Tensor], names: list[str]) -> Any:
    return torch.cat([gradient[name].double().cpu().flatten() for name in names]).numpy()
