"""The effective sample size of an update: against float64, and what it makes of the learning rate."""

import numpy as np
import pytest
import torch
from tests.trainer.small import CAP, draw_groups, near, plain_logprobs, save_small

from polyrl.config.recipe import AlgorithmConfig, OptimizerConfig
from polyrl.trainer.model import Policy
from polyrl.trainer.optimizer import Optimizer
from polyrl.trainer.step import StepAccumulator

LR = 1e-3


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = save_small(tmp_path_factory.mktemp("policy"))
    policy = Policy.load(str(folder))
    groups = near(policy, draw_groups(0))
    ratios = [_ratio(policy, one) for group in groups for one in group]
    return str(folder), groups, sum(ratios) ** 2 / (len(ratios) * sum(one**2 for one in ratios))


def _ratio(policy: Policy, sample) -> float:
    ours = plain_logprobs(policy.model, sample)[0].detach().double().numpy()
    return float(np.exp((ours - sample.logprobs.astype(np.float64)).sum()))


def trained(folder: str, calls, *, lr: float = LR, max_tokens: int = 10_000, **settings):
    policy = Policy.load(folder)
    steps = StepAccumulator(
        policy,
        Optimizer(policy.parameters(), OptimizerConfig(lr=lr), 1),
        AlgorithmConfig(**settings),
        max_tokens=max_tokens,
        max_new_tokens=CAP,
    )
    steps.begin(0)
    for groups in calls:
        steps.add(groups)
    metrics = steps.finish().metrics
    return metrics, torch.cat([one.detach().flatten() for one in policy.parameters().values()])


@pytest.mark.parametrize("old", ["engine", "recompute"])
@pytest.mark.parametrize("max_tokens", [24, 10_000])
def test_the_share_is_that_of_the_formula_however_groups_arrive_and_are_packed(world, old, max_tokens):
    folder, groups, share = world
    assert 0.1 < share < 0.95
    for calls in ([groups], [[one] for one in reversed(groups)]):
        metrics, _ = trained(folder, calls, max_tokens=max_tokens, old_logprobs=old)
        assert metrics["actor/effective_sample_size"] == pytest.approx(share, rel=1e-5)
        assert metrics["actor/lr"] == LR


def test_samples_of_the_current_policy_are_worth_their_number(world):
    folder, groups, _ = world
    policy = Policy.load(folder)
    own = [[one._replace(logprobs=plain_logprobs(policy.model, one)[0].detach().numpy()) for one in g] for g in groups]
    metrics, _ = trained(folder, [own], old_logprobs="engine")
    assert metrics["actor/effective_sample_size"] == pytest.approx(1.0, abs=1e-6)


def test_the_learning_rate_is_scaled_by_the_root_of_the_share(world):
    folder, groups, share = world
    metrics, scaled = trained(folder, [groups], old_logprobs="engine", scale_lr_by_sample_size=True)
    assert metrics["actor/lr"] == pytest.approx(LR * share**0.5, rel=1e-5)
    _, same = trained(folder, [groups], lr=LR * share**0.5, old_logprobs="engine")
    _, plain = trained(folder, [groups], old_logprobs="engine")
    torch.testing.assert_close(scaled, same, rtol=0, atol=1e-6)  # weights near 1 round by 1.2e-7
    assert (scaled - plain).abs().max() > 1e-5


def test_each_update_is_scaled_by_its_own_samples(world):
    folder, groups, _ = world
    policy = Policy.load(folder)
    shares = []
    for group in groups:
        ratios = [_ratio(policy, one) for one in group]
        shares.append(sum(ratios) ** 2 / (len(ratios) * sum(one**2 for one in ratios)))
    metrics, _ = trained(folder, [groups], old_logprobs="recompute", mini_batches=3, scale_lr_by_sample_size=True)
    assert metrics["actor/effective_sample_size"] == pytest.approx(sum(shares) / 3, rel=1e-5)
    assert any(metrics["actor/lr"] == pytest.approx(LR * share**0.5, rel=1e-5) for share in shares)
