"""Advantages, losses, KL and aggregation on random data, against formulas that share no code with them."""

import numpy as np
import pytest
import torch
from tests.trainer import formulas

from polyrl.config.recipe import AlgorithmConfig
from polyrl.trainer.objectives import aggregation, corrections, kl
from polyrl.trainer.objectives.advantages import dr_grpo, grpo, rloo
from polyrl.trainer.objectives.losses import ppo_clip
from polyrl.trainer.objectives.registry import RewardBatch, TokenBatch, find_advantage, find_batch_advantage, find_loss

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
    loss, slope = formulas.ppo_clip(logp, old, gain, *config.clip_range, config.dual_clip)
    np.testing.assert_allclose(losses.detach().numpy(), loss, rtol=1e-9)
    assert mine.grad is not None
    np.testing.assert_allclose(mine.grad.numpy(), slope, rtol=1e-9, atol=1e-12)
    clipped = (stats["clip_frac_low"] | stats["clip_frac_high"]).numpy()
    if gain:
        held = clipped | stats["clip_frac_dual"].numpy() if config.dual_clip else clipped
        assert (held == (slope == 0)).all()


class Drawn:
    """Samples of several lengths with their log-probabilities, as a loss sees them and one by one."""

    def __init__(self, seed: int, spread: float, lengths: tuple[int, ...] = (1, 7, 30, 2, 12, 5, 60)) -> None:
        rng = np.random.default_rng(seed)
        self.engine = [-rng.exponential(2.0, one) for one in lengths]
        self.old = [np.minimum(one + rng.normal(0, spread, len(one)), -1e-3) for one in self.engine]
        self.logp = [np.minimum(one + rng.normal(0, spread, len(one)), -1e-3) for one in self.old]
        self.gains = rng.normal(size=len(lengths))
        self.present = torch.from_numpy(np.concatenate(self.logp)).requires_grad_()
        num = torch.tensor(lengths)
        sample = torch.repeat_interleave(torch.arange(len(lengths)), num)
        old, engine = (torch.from_numpy(np.concatenate(one)) for one in (self.old, self.engine))
        self.batch = TokenBatch(self.present, old, engine, torch.from_numpy(self.gains)[sample], sample, num)


@pytest.mark.parametrize("clips", [{}, {"clip_low": 0.05, "clip_high": 0.1}, {"clip_low": 0.0}])
@pytest.mark.parametrize("name", ["gspo", "cispo"])
def test_a_loss_of_samples_or_of_clipped_weights_and_its_gradient_are_the_formula_s(name, clips):
    config = AlgorithmConfig(loss=name, **clips)
    for seed in range(5):
        drawn = Drawn(seed, 0.3)
        losses, stats = find_loss(name)(drawn.batch, config)
        losses.sum().backward()
        rows = zip(drawn.logp, drawn.old, drawn.gains, strict=True)
        parts = [getattr(formulas, name)(*row, *config.clip_range) for row in rows]
        values, slopes = (np.concatenate(one) for one in zip(*parts, strict=True))
        np.testing.assert_allclose(losses.detach().numpy(), values, rtol=1e-9)
        assert drawn.present.grad is not None
        np.testing.assert_allclose(drawn.present.grad.numpy(), slopes, rtol=1e-9, atol=1e-12)
        if name == "gspo":
            assert ((stats["clip_frac_low"] | stats["clip_frac_high"]).numpy() == (slopes == 0)).all()


def test_every_loss_has_its_usual_clip_range_and_takes_another():
    assert AlgorithmConfig().clip_range == (0.2, 0.2)
    assert AlgorithmConfig(loss="gspo").clip_range == (3e-4, 4e-4)
    assert AlgorithmConfig(loss="cispo", clip_low=0.0).clip_range == (0.0, 4.0)
    assert AlgorithmConfig(loss="my:own", clip_high=0.0).clip_range == (0.2, 0.0)


@pytest.mark.parametrize("bounds", [{}, {"correction_high": 1.05}])
@pytest.mark.parametrize("name", ["tis-token", "tis-sequence", "icepop", "sequence-mask"])
def test_a_correction_is_the_formula_s_and_has_no_gradient(name, bounds):
    config = AlgorithmConfig(correction=name, **bounds)
    for seed in range(5):
        drawn = Drawn(seed, 0.5)
        weights, stats, ratio = corrections.weigh(drawn.batch, config)
        rows = zip(drawn.old, drawn.engine, strict=True)
        expected = np.concatenate([formulas.correction(name, *row, *config.correction_range) for row in rows])
        np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-9)
        assert not weights.requires_grad
        assert float(ratio.max()) > 1
        if "correction_masked" in stats:
            assert (stats["correction_masked"].numpy() == (expected == 0)).all()
        else:
            assert (stats["correction_capped"].numpy() == (expected == config.correction_range[1])).all()


@pytest.mark.parametrize("name", ["tis-token", "tis-sequence", "icepop", "sequence-mask"])
def test_an_engine_that_agrees_is_not_corrected(name):
    same = torch.full((3,), -1.0)
    weights, _, _ = corrections.weigh(batch_of(same, same, 1.0), AlgorithmConfig(correction=name))
    assert weights.tolist() == [1.0, 1.0, 1.0]


def step_of(rewards, sizes: list[int], lengths: list[int], kept: list[bool]) -> RewardBatch:
    """A step whose rewards are of the answers alone."""
    numbers, counts, trained = torch.as_tensor(rewards, dtype=torch.float64), torch.tensor(lengths), torch.tensor(kept)
    group = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return RewardBatch(
        numbers, group, counts * trained, numbers.repeat_interleave(counts), trained.long().repeat_interleave(counts)
    )


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_an_advantage_of_the_step_is_the_formula_s_and_white_over_tokens(name):
    function = find_batch_advantage(name)
    assert function is not None
    rng = np.random.default_rng(8)
    groups = [rng.normal(3.0, 2.0, size) for size in (4, 1, 6)]
    lengths = [rng.integers(1, 50, len(one)).tolist() for one in groups]
    kept = [[(g, s) != (2, 1) for s in range(len(one))] for g, one in enumerate(lengths)]  # one counts for others alone
    rewards = [
        [np.append(np.zeros(num - 1), reward) for reward, num in zip(*row, strict=True)]
        for row in zip(groups, lengths, strict=True)
    ]
    batch = step_of(
        np.concatenate(groups), [4, 1, 6], [n for one in lengths for n in one], [k for one in kept for k in one]
    )
    ours = function(batch, AlgorithmConfig())
    ours = (
        ours
        if len(ours) == len(batch.to_come)
        else ours.repeat_interleave(torch.tensor([n for one in lengths for n in one]))
    )
    expected = [number for group in formulas.STEP_ADVANTAGES[name](rewards, kept) for one in group for number in one]
    np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-9, atol=1e-12)
    tokens = ours[batch.is_trained.bool()]
    assert float(tokens.mean()) == pytest.approx(0.0, abs=1e-9)
    assert float(tokens.std()) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_a_step_of_equal_rewards_or_of_one_token_has_no_advantage(name):
    function = find_batch_advantage(name)
    assert function is not None
    for rewards, lengths, keep in (([0.25] * 4, [3, 5, 1, 2], True), ([1.0], [1], True), ([1.0, 2.0], [1, 1], False)):
        batch = step_of(rewards, [len(rewards)], lengths, [keep] * len(rewards))
        assert set(function(batch, AlgorithmConfig()).tolist()) == {0.0}


@pytest.mark.parametrize("function", [ppo_clip, find_loss("gspo"), find_loss("cispo")])
def test_a_ratio_beyond_reason_stays_finite(function):
    logp = torch.tensor([-0.1, -200.0], requires_grad=True)
    losses, _ = function(batch_of(logp, torch.tensor([-500.0, -0.1]), -1.0), AlgorithmConfig())
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
