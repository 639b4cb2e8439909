"""AdamW with moments of eight bits: close to AdamW, small, and saved as it is."""

import importlib.util
import sys

import pytest
import torch

from polyrl.config.recipe import OptimizerConfig
from polyrl.errors import UserError
from polyrl.trainer.optimizer import Optimizer

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed: pip install 'polyrl[adam8bit]'"
)


def start(kind):
    torch.manual_seed(0)
    named = {"matrix": torch.nn.Parameter(torch.zeros(64, 128)), "norm": torch.nn.Parameter(torch.zeros(128))}
    config = OptimizerConfig(kind=kind, lr=0.02, betas=(0.9, 0.95), grad_clip=0.0, schedule="linear")
    return named, Optimizer(named, config, 100)


def problem():
    made = torch.Generator().manual_seed(1)
    rows = torch.randn(256, 128, generator=made)
    wanted = torch.randn(64, 128, generator=made)
    return rows, rows @ wanted.T + 0.5


def loss(named, rows, results):
    """Of a linear map with weighed inputs: least squares."""
    return ((rows * (1 + named["norm"])) @ named["matrix"].T + 0.5 - results).square().mean()


def train(named, optimizer, first, last):
    rows, results = problem()
    for step in range(first, last):
        loss(named, rows, results).backward()
        assert optimizer.update(step, 1.0).applied
    return float(loss(named, rows, results).detach())


@needs_torchao
def test_it_solves_a_problem_about_as_well_as_adamw():
    begin = float(loss(start("adamw")[0], *problem()).detach())
    plain, small = (train(*start(kind), 0, 100) for kind in ("adamw", "adamw8bit"))
    assert plain < 0.1 * begin
    assert small == pytest.approx(plain, rel=0.1)


@needs_torchao
def test_moments_of_matrices_take_a_byte_and_a_run_goes_on_from_them():
    named, optimizer = start("adamw8bit")
    train(named, optimizer, 0, 3)
    saved = {key: value.clone() for key, value in optimizer.state_dict().items()}
    assert saved["exp_avg.codes/matrix"].dtype == torch.uint8
    assert saved["exp_avg_sq.codes/matrix"].numel() == 64 * 128
    assert saved["exp_avg_sq/norm"].dtype == torch.float32, "too small to be worth it"
    train(named, optimizer, 3, 6)
    again, its = start("adamw8bit")
    its.load_state_dict(saved)
    train(again, its, 3, 6)
    assert all(torch.equal(one, again[name]) for name, one in named.items())
    assert all(torch.equal(one, its.state_dict()[key]) for key, one in optimizer.state_dict().items())


@needs_torchao
def test_state_of_plain_adamw_is_refused():
    named, optimizer = start("adamw")
    train(named, optimizer, 0, 1)
    with pytest.raises(UserError, match=r"exp_avg.codes/matrix is missing"):
        start("adamw8bit")[1].load_state_dict(optimizer.state_dict())


def test_without_torchao_the_command_that_installs_it_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(UserError, match=r"needs torchao: pip install 'polyrl\[adam8bit\]'"):
        start("adamw8bit")
