"""Attention of long samples: the loop over a pack's samples and its gradient, with torch's kernel for the CPU in place
of cuDNN's. tests/gpu/check_train.py compares cuDNN's on a GPU.
"""

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from polyrl.engines.builtin import packed
from polyrl.engines.builtin.long_attention import attend_long, keep_results

LENGTHS = (5, 1, 12)


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(sum(LENGTHS), 2, 8, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3)
    )
    return query, key, value


def _one_by_one(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    parts = zip(*(one.transpose(0, 1).split(LENGTHS, 1) for one in (query, key, value)), strict=True)
    return torch.cat([scaled_dot_product_attention(*its, is_causal=True, scale=0.3) for its in parts], 1).transpose(
        0, 1
    )


def test_no_sample_sees_another_and_gradients_are_those_of_each_alone() -> None:
    borders = torch.tensor([0, 5, 6, 18])
    weights = torch.linspace(-1, 1, sum(LENGTHS) * 16, dtype=torch.float64).view(-1, 2, 8)
    found, expected = _inputs(), _inputs()
    out = attend_long(*found, borders, 0.3)[0]
    wanted = _one_by_one(*expected)
    torch.testing.assert_close(out, wanted)
    (out * weights).sum().backward()
    (wanted * weights).sum().backward()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_the_compiler_and_autograd_may_rely_on_the_operation() -> None:
    inputs = [one.detach().float().requires_grad_() for one in _inputs()]
    torch.library.opcheck(attend_long, (*inputs, torch.tensor([0, 5, 6, 18]), 0.3))


def test_only_packs_of_long_samples_are_laid_out_for_it() -> None:
    def on_host(lengths: list[int], *, long: bool) -> object:
        layout = packed.lay_out(lengths, torch.device("cpu"), flash=True, long=long)
        assert isinstance(layout, packed.Borders)
        return layout.on_host

    borders = on_host([4096, 5000], long=True)
    assert isinstance(borders, torch.Tensor) and borders.tolist() == [0, 4096, 9096]
    assert on_host([4096, 4095], long=True) is None
    assert on_host([4096, 5000], long=False) is None


class Layer(torch.nn.Module):
    """Attends twice, with products between."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(8, dtype=torch.float64) / 2)

    def forward(self, rows: torch.Tensor, borders: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            query = rows @ self.weight
            rows = rows + attend_long(query, query.tanh(), rows, borders, 0.3)[0]
        return rows


@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_that_runs_again_takes_the_results_that_attention_gave(compiled: bool) -> None:
    borders = torch.tensor([0, 5, 6, 18])

    def run(**settings: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
        layers = [Layer() for _ in range(3)]
        if compiled:
            for layer in layers:
                layer.compile(backend="aot_eager", dynamic=True)
        given = _inputs()[0]
        rows = given
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for layer in layers:
                rows = checkpoint(layer, rows, borders, use_reentrant=False, **settings)
            rows.square().sum().backward()
        assert given.grad is not None and layers[0].weight.grad is not None
        counts = {one.key: one.count for one in profile.key_averages()}
        num = counts["aten::_scaled_dot_product_flash_attention_for_cpu"]
        return given.grad, layers[0].weight.grad, num // (len(borders) - 1)

    again, kept = run(), run(context_fn=keep_results)
    assert (again[2], kept[2]) == (12, 6)
    assert torch.equal(again[0], kept[0]) and torch.equal(again[1], kept[1])
