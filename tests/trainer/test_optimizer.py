"""AdamW against its formula, float32 masters under a bfloat16 model, schedules, and state that can be saved."""

import math

import numpy as np
import pytest
import torch
from tests.trainer.small import CAP, draw_groups, save_small

from polyrl.config.recipe import AlgorithmConfig, OptimizerConfig
from polyrl.errors import UserError
from polyrl.trainer.model import Policy
from polyrl.trainer.optimizer import Optimizer, lr_at
from polyrl.trainer.step import StepAccumulator


def parameters(dtype=torch.float32):
    torch.manual_seed(0)
    return {
        "matrix": torch.nn.Parameter(torch.randn(4, 3).to(dtype)),
        "norm": torch.nn.Parameter(torch.randn(5).to(dtype)),
    }


def push(named, seed):
    """A gradient of known value, through a backward pass."""
    torch.manual_seed(seed)
    pushes = {name: torch.randn(one.shape) for name, one in named.items()}
    sum((one * pushes[name].to(one.dtype)).sum() for name, one in named.items()).backward()  # type: ignore[union-attr]
    return {name: one.double().numpy() for name, one in pushes.items()}


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_updates_are_those_of_adamw_s_formula(clip):
    """With a large epsilon, since AdamW does not notice otherwise how long a gradient is."""
    config = OptimizerConfig(lr=0.01, betas=(0.8, 0.95), eps=0.1, weight_decay=0.1, grad_clip=clip)
    named = parameters()
    weights = {name: one.detach().double().numpy().copy() for name, one in named.items()}
    first, second = ({name: np.zeros_like(one) for name, one in weights.items()} for _ in range(2))
    optimizer = Optimizer(named, config, 10)
    for step in range(5):
        a, b = push(named, 2 * step), push(named, 2 * step + 1)
        update = optimizer.update(step, 4.0)
        grads = {name: (a[name] + b[name]) / 4.0 for name in a}
        norm = math.sqrt(sum((one**2).sum() for one in grads.values()))
        assert update.grad_norm == pytest.approx(norm, rel=1e-5)
        for name, grad in grads.items():
            grad = grad * min(1.0, clip / norm) if clip else grad
            first[name] = 0.8 * first[name] + 0.2 * grad
            second[name] = 0.95 * second[name] + 0.05 * grad**2
            unbiased = second[name] / (1 - 0.95 ** (step + 1))
            decay = 0.1 if name == "matrix" else 0.0
            weights[name] -= 0.01 * decay * weights[name]
            weights[name] -= 0.01 * first[name] / (1 - 0.8 ** (step + 1)) / (np.sqrt(unbiased) + 0.1)
            np.testing.assert_allclose(named[name].detach().numpy(), weights[name], rtol=2e-5, atol=1e-6)
        assert not optimizer.gradients(), "no gradient holds memory between steps"


def test_small_updates_of_a_bfloat16_model_are_not_lost():
    """Each is far below the spacing of bfloat16; the masters keep them, and the model follows."""
    config = OptimizerConfig(lr=1e-4, grad_clip=0.0)
    named, exact = parameters(torch.bfloat16), parameters(torch.bfloat16)
    exact = {name: torch.nn.Parameter(one.detach().float()) for name, one in exact.items()}
    half, full = Optimizer(named, config, 1), Optimizer(exact, config, 1)
    for step in range(300):
        for its in (named, exact):
            sum(one.sum() for one in its.values()).backward()  # type: ignore[union-attr]
        half.update(step, 1.0)
        full.update(step, 1.0)
    for name, one in named.items():
        assert one.dtype == torch.bfloat16
        assert one.grad is None
        torch.testing.assert_close(one, exact[name].detach().bfloat16())
        assert not torch.equal(one, parameters(torch.bfloat16)[name])


def test_gradients_of_a_bfloat16_model_are_added_up_in_float32():
    named = parameters(torch.bfloat16)
    optimizer = Optimizer(named, OptimizerConfig(), 1)
    for _ in range(1000):
        sum(one.sum() for one in named.values()).backward()  # type: ignore[union-attr]
    assert {float(one.min()) for one in optimizer.gradients().values()} == {1000.0}, "bfloat16 would stop at 256"


def test_a_gradient_that_is_not_finite_moves_nothing():
    named = parameters()
    optimizer = Optimizer(named, OptimizerConfig(lr=1.0), 1)
    before = {name: one.detach().clone() for name, one in named.items()}
    (named["matrix"].sum() * float("nan")).backward()
    update = optimizer.update(0, 1.0)
    assert not update.applied
    assert math.isnan(update.grad_norm)
    assert all(torch.equal(before[name], one) for name, one in named.items())
    assert not optimizer.gradients()


def test_learning_rates_warm_up_and_come_down():
    warm = OptimizerConfig(lr=2.0, warmup_steps=4)
    assert [lr_at(step, warm, 12) for step in (0, 1, 3, 4, 11)] == [0.5, 1.0, 2.0, 2.0, 2.0]
    linear = OptimizerConfig(lr=2.0, warmup_steps=4, schedule="linear")
    assert [lr_at(step, linear, 12) for step in (3, 4, 8, 12, 20)] == [2.0, 2.0, 1.0, 0.0, 0.0]
    cosine = OptimizerConfig(lr=2.0, schedule="cosine")
    assert [round(lr_at(step, cosine, 10), 9) for step in (0, 5, 10)] == [2.0, 1.0, 0.0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_goes_on_from_saved_state_as_if_it_had_not_stopped(dtype, tmp_path):
    folder = save_small(tmp_path)
    config = OptimizerConfig(lr=1e-2)

    def start():
        policy = Policy.load(str(folder), dtype)
        optimizer = Optimizer(policy.parameters(), config, 10)
        steps = StepAccumulator(policy, optimizer, AlgorithmConfig(), max_tokens=200, max_new_tokens=CAP)
        return policy, optimizer, steps

    def run(steps, first, last):
        for step in range(first, last):
            steps.begin(step)
            steps.add(draw_groups(step))
            assert not steps.finish().metrics["actor/skipped_updates"]

    policy, optimizer, steps = start()
    run(steps, 0, 2)
    saved = {key: value.clone() for key, value in optimizer.state_dict().items()}
    run(steps, 2, 4)
    again, its_optimizer, its_steps = start()
    its_optimizer.load_state_dict(saved)
    run(its_steps, 2, 4)
    for name, one in policy.parameters().items():
        assert torch.equal(one, again.parameters()[name]), name
    for key, value in optimizer.state_dict().items():
        assert torch.equal(value, its_optimizer.state_dict()[key]), key


def test_state_of_another_model_is_refused_and_changes_nothing():
    named = parameters()
    optimizer = Optimizer(named, OptimizerConfig(), 1)
    before = {name: one.detach().clone() for name, one in named.items()}
    state = {key: value.clone() + 1 for key, value in optimizer.state_dict().items()}
    for wrong, message in (
        ({**state, "master/other": state["master/norm"]}, "master/other is not in the model"),
        ({"master/norm": state["master/norm"]}, "master/matrix is missing"),
        ({**state, "master/norm": torch.zeros(7)}, r"master/norm is \[7\]"),
    ):
        with pytest.raises(UserError, match=message):
            optimizer.load_state_dict(wrong)
    assert all(torch.equal(before[name], one) for name, one in named.items())
