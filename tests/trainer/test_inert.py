"""A setting is warned of if, and only if, no gradient of the step would be another without it."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from tests.trainer.small import Recording
from tests.trainer.table import CAP, Table

from polyrl.config.inert import inert
from polyrl.config.recipe import AlgorithmConfig, CriticConfig, OptimizerConfig
from polyrl.trainer.critic import Critic
from polyrl.trainer.model import Policy
from polyrl.trainer.objectives import kl
from polyrl.trainer.step import StepAccumulator

WORLDS: list[dict[str, Any]] = [
    {"old_logprobs": old, "mini_batches": updates, "kl": placed, "aggregation": "token-mean"}
    | ({"kl_estimator": {"reward": "k1", "loss": "k2"}[placed], "kl_coef": 0.1} if placed != "none" else {})
    for old, updates, placed in product(("recompute", "engine"), (1, 2), ("none", "loss", "reward"))
]
SETTINGS: dict[str, dict[str, Any]] = {
    "clip_low": {"clip_low": 0.0},
    "clip_high": {"clip_high": 0.0},
    "dual_clip": {"dual_clip": 1.01},
    "loss": {"loss": "gspo"},
    "critic.value_clip": {"critic": CriticConfig(value_clip=0.001)},
    "kl_coef": {"kl_coef": 0.4},
    "kl_estimator": {"kl_estimator": "k3"},
    "kl": {"kl": "loss", "kl_estimator": "k2", "kl_coef": 0.0},
    "overlong_penalty": {"overlong_penalty": 3.0},
    "overlong_buffer_tokens": {"overlong_buffer_tokens": 2},
    "entropy_coef": {"entropy_coef": 0.1},
    "aggregation": {"aggregation": "seq-mean-token-mean"},
}
NEARLY = {"kl_estimator"}
"""Beside those that do nothing it is warned of where it does nothing on average; see the last test."""


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Table:
    return Table(tmp_path_factory.mktemp("table"))


def gradients(world: Table, config: AlgorithmConfig) -> "np.ndarray[Any, Any]":
    """Of all updates of a step that moves the weights, which starts with nothing but what the engine said."""
    policy, trunk = (Policy.load(str(world.places[number])) for number in (0, 2))
    optimizer = Recording(policy.parameters(), OptimizerConfig(lr=5e-3), 1)
    critic = None
    if config.advantage == "gae":
        critic = Critic(trunk, OptimizerConfig(lr=5e-3), 1)
        critic.optimizer = Recording(critic.parameters(), OptimizerConfig(lr=5e-3), 1)
    reference = None if config.kl == "none" else world.reference
    steps = StepAccumulator(
        policy, optimizer, config, max_tokens=99, max_new_tokens=CAP, reference=reference, critic=critic
    )
    steps.begin(0)
    steps.add([[one._replace(old_logprobs=None) for one in group] for group in world.groups])
    steps.finish()
    recorded = [optimizer] if critic is None else [optimizer, critic.optimizer]
    each = [one for its in recorded if isinstance(its, Recording) for one in its.each]
    return torch.cat([one.flatten() for gradient in each for one in gradient.values()]).numpy()


@pytest.mark.parametrize("key", SETTINGS)
@pytest.mark.parametrize("base", WORLDS, ids=lambda one: "-".join(str(one[key]) for key in list(one)[:3]))
def test_a_setting_is_warned_of_where_gradients_are_the_same_without_it(world, base, key):
    base = base | ({"advantage": "gae"} if key.startswith("critic") else {})
    with_it = base | SETTINGS[key]
    if key == "kl":
        base = {name: one for name, one in base.items() if not name.startswith("kl")}
    config, without = AlgorithmConfig(**with_it), AlgorithmConfig(**base)
    ours, theirs = gradients(world, config), gradients(world, without)
    does_nothing = bool(np.linalg.norm(ours - theirs) <= 1e-6 * np.linalg.norm(theirs))
    is_warned_of = any(line.startswith(f"algorithm.{key}: has no effect: ") for line in inert(config))
    assert is_warned_of or not does_nothing
    assert does_nothing or not is_warned_of or key in NEARLY


def test_a_clip_that_a_loss_of_your_own_uses_in_another_way_is_not_warned_of(world):
    base: dict[str, Any] = {"loss": "tests.trainer.own:bounded_by_engine", "aggregation": "token-mean"}
    config, without = AlgorithmConfig(**base, clip_high=0.0), AlgorithmConfig(**base)
    assert config.ratio_is_one
    assert np.linalg.norm(gradients(world, config) - gradients(world, without)) > 0
    assert not inert(config)


def test_nothing_is_warned_of_that_was_not_set():
    assert not inert(AlgorithmConfig())
    assert not inert(AlgorithmConfig(kl="reward"))
    assert not inert(AlgorithmConfig(kl="loss", advantage="reinforce_plus_plus_baseline"))


@pytest.mark.parametrize("spread", [0.1, 0.3])
def test_an_estimator_is_warned_of_where_its_gradient_is_nothing_on_average(spread):
    """By enumeration of a whole vocabulary, near the reference: the share of the true KL's gradient."""
    draws = torch.Generator().manual_seed(1)
    reference = torch.randn(50, generator=draws, dtype=torch.float64)
    logits = (reference + spread * torch.randn(50, generator=draws, dtype=torch.float64)).requires_grad_()
    fixed = torch.log_softmax(reference, 0)

    def share(placed: str, estimator: Any) -> float:
        logp = torch.log_softmax(logits, 0)
        p, said = logp.exp(), kl.estimate(logp, fixed, estimator)
        (true,) = torch.autograd.grad((p * (logp - fixed)).sum(), logits, retain_graph=True)
        of_loss, of_reward = (p.detach() * said).sum(), (p.detach() * said.detach() * logp).sum()
        (ours,) = torch.autograd.grad(of_loss if placed == "loss" else of_reward, logits)
        return float(ours @ true / (true @ true))

    for placed, estimator in product(("loss", "reward"), ("k1", "k2", "k3")):
        acts = share(placed, estimator) > 0.5
        said = inert(AlgorithmConfig(kl=placed, kl_estimator=estimator))
        assert bool(said) is not acts
        assert acts or share(placed, estimator) < 0.1
    assert share("reward", AlgorithmConfig(kl="reward").kl_estimator) == pytest.approx(1.0)
