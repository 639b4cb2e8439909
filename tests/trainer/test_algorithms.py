"""Advantages, losses, KL and aggregation on random data, against formulas that share no code with them."""

import numpy as np
import pytest
import torch
from tests.trainer import formulas

from polyrl.config.recipe import AlgorithmConfig
from polyrl.trainer import aggregation, kl
from polyrl.trainer.advantages import dr_grpo, grpo, rloo
from polyrl.trainer.losses import ppo_clip
from polyrl.trainer.registry import TokenBatch, find_advantage

NAMES = ("grpo", "dr_grpo", "rloo")
CLIPS = ({}, {"clip_high": 0.28}, {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 1.5}, {"clip_low": 0.0})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num", [2, 3, 8, 16])
def test_an_advantage_is_the_formula_s(name, num):
    rng = np.random.default_rng(num)
    for rewards in (rng.normal(size=num), rng.integers(0, 2, num).astype(float), np.arange(num) * 100.0):
        ours = find_advantage(name)(torch.from_numpy(rewards), AlgorithmConfig())
        np.testing.assert_allclose(ours.numpy(), formulas.advantages(name, rewards), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("function", [grpo, dr_grpo, rloo])
def test_equal_rewards_and_lone_samples_have_no_advantage(function):
    for rewards in ([1.0], [0.5] * 8):
        gains = function(torch.tensor(rewards, dtype=torch.float64), AlgorithmConfig())
        assert gains.tolist() == [0.0] * len(rewards)


def batch_of(logp, old, gain) -> TokenBatch:
    num = len(logp)
    zero = torch.zeros(num, dtype=torch.int64)
    return TokenBatch(logp, old, old, torch.full((num,), gain, dtype=logp.dtype), zero, torch.tensor([num]))


@pytest.mark.parametrize("clips", CLIPS)
@pytest.mark.parametrize("gain", [-1.7, -0.3, 0.0, 0.4, 2.0])
def test_the_clipped_loss_and_its_gradient_are_the_formula_s(clips, gain):
    config = AlgorithmConfig(**clips)
    rng = np.random.default_rng(3)
    old = -rng.exponential(2.0, 400)
    logp = np.minimum(old + rng.normal(0, 0.5, 400), -1e-3)
    mine = torch.from_numpy(logp).requires_grad_()
    losses, stats = ppo_clip(batch_of(mine, torch.from_numpy(old), gain), config)
    losses.sum().backward()
    loss, slope = formulas.ppo_clip(logp, old, gain, config.clip_low, config.clip_high, config.dual_clip)
    np.testing.assert_allclose(losses.detach().numpy(), loss, rtol=1e-9)
    assert mine.grad is not None
    np.testing.assert_allclose(mine.grad.numpy(), slope, rtol=1e-9, atol=1e-12)
    clipped = (stats["clip_frac_low"] | stats["clip_frac_high"]).numpy()
    if gain:
        held = clipped | stats["clip_frac_dual"].numpy() if config.dual_clip else clipped
        assert (held == (slope == 0)).all()


def test_a_ratio_beyond_reason_stays_finite():
    logp = torch.tensor([-0.1, -200.0], requires_grad=True)
    losses, _ = ppo_clip(batch_of(logp, torch.tensor([-500.0, -0.1]), -1.0), AlgorithmConfig())
    losses.sum().backward()
    assert losses.isfinite().all()
    assert logp.grad is not None
    assert logp.grad.isfinite().all()


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_a_kl_estimator_and_its_gradient_are_the_formula_s(name):
    rng = np.random.default_rng(5)
    logp, ref = -rng.exponential(2.0, 100), -rng.exponential(2.0, 100)
    mine = torch.from_numpy(logp).requires_grad_()
    ours = kl.estimate(mine, torch.from_numpy(ref), name)
    ours.sum().backward()
    value, slope = formulas.kl(name, logp, ref)
    np.testing.assert_allclose(ours.detach().numpy(), value, rtol=1e-9, atol=1e-12)
    assert mine.grad is not None
    np.testing.assert_allclose(mine.grad.numpy(), slope, rtol=1e-9, atol=1e-12)
    assert torch.autograd.gradcheck(lambda one: kl.estimate(one, torch.from_numpy(ref), name), (mine,))


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_true_kl(name):
    """Weighed with p over the whole vocabulary, instead of drawn from it."""
    rng = np.random.default_rng(6)
    p, q = (torch.log_softmax(torch.from_numpy(rng.normal(size=50)), 0) for _ in range(2))
    true = (p.exp() * (p - q)).sum()
    torch.testing.assert_close((p.exp() * kl.estimate(p, q, name)).sum(), true)


@pytest.mark.parametrize("name", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "fixed"])
def test_an_aggregation_is_the_formula_s(name):
    config = AlgorithmConfig(aggregation=name, fixed_tokens=20 if name == "fixed" else None)
    rng = np.random.default_rng(7)
    lengths = [3, 1, 12, 7]
    losses = [rng.normal(size=one) for one in lengths]
    sample = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    weights = aggregation.token_weights(sample, torch.tensor(lengths), config)
    flat = torch.from_numpy(np.concatenate(losses))
    total = (flat if weights is None else flat * weights).sum() / aggregation.denominator(23, 4, 20, config)
    expected, over = formulas.weights_and_denominator(name, lengths, 20)
    np.testing.assert_allclose(
        float(total), sum(w * one.sum() for w, one in zip(expected, losses, strict=True)) / over, rtol=1e-6
    )
