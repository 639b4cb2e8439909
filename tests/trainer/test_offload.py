"""The optimizer's state in the host's memory: the same numbers. tests/gpu/check_offload.py measures memory."""

import pytest
import torch
from tests.trainer.test_optimizer import parameters, push

from polyrl.config.recipe import OptimizerConfig
from polyrl.errors import UserError
from polyrl.trainer import offload
from polyrl.trainer.offload import HeldParameter, HostMemory, OffloadedAdamW, Sum
from polyrl.trainer.optimizer import Optimizer

CONFIG = {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1, "grad_clip": 0.5, "schedule": "linear"}


def start(dtype, **more):
    named = parameters(dtype)
    return named, Optimizer(named, OptimizerConfig(**CONFIG, **more), 20)


def train(named, optimizer, first, last):
    for step in range(first, last):
        push(named, 2 * step)
        push(named, 2 * step + 1)
        assert optimizer.update(step, 4.0).applied
        assert not optimizer.gradients()


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offloading_changes_no_bit_and_state_goes_both_ways(dtype):
    here, at_home = start(dtype)
    there, away = start(dtype, offload=True)
    train(here, at_home, 0, 4)
    train(there, away, 0, 4)
    assert_same(here, there)
    assert_same(at_home.state_dict(), away.state_dict())
    saved = {key: value.clone() for key, value in away.state_dict().items()}
    train(there, away, 4, 6)
    for more in ({}, {"offload": True}):
        again, optimizer = start(dtype, **more)
        optimizer.load_state_dict(saved)
        train(again, optimizer, 4, 6)
        assert_same(again, there)


def test_a_matrix_larger_than_a_piece_is_updated_piece_by_piece():
    num = offload._PIECE_ELEMENTS + 1000
    weights, grad = torch.randn(num), torch.randn(num)
    plain = weights.clone().requires_grad_()
    plain.grad = grad.clone()
    rule = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01}
    torch.optim.AdamW([plain], fused=True, **rule).step()
    half, total = weights.bfloat16(), Sum()
    total.grad = grad
    group = {"params": [weights], "lr": 0.1, "weight_decay": 0.01}
    one = OffloadedAdamW(
        [HeldParameter(half, weights, total)], [group], HostMemory(2 * num), beta1=0.9, beta2=0.99, eps=1e-8
    )
    one.step()
    assert float(one.state[weights]["step"]) == 1.0
    torch.testing.assert_close(weights, plain.detach(), rtol=0, atol=1e-7)
    assert torch.equal(half, weights.bfloat16())


def test_state_that_does_not_fit_changes_nothing():
    named, optimizer = start(torch.bfloat16, offload=True)
    train(named, optimizer, 0, 2)
    before = {key: value.clone() for key, value in optimizer.state_dict().items()}
    wrong = {**before, "exp_avg/norm": torch.zeros(7)}
    with pytest.raises(UserError, match=r"exp_avg/norm is \[7\]"):
        optimizer.load_state_dict(wrong)
    assert_same(before, optimizer.state_dict())


def test_pinned_memory_is_unpinned_before_it_is_given_back(monkeypatch):
    unpinned = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(offload, "pin", lambda view: view.nbytes == 400)
    monkeypatch.setattr(offload, "unpin", unpinned.append)
    memory = HostMemory(100)
    kept = memory.take(torch.zeros(10))
    at = kept.data_ptr()
    del memory
    assert not unpinned, "somebody has a part of it"
    assert kept.sum() == 0
    del kept
    assert unpinned == [at]
