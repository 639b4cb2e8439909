"""Weights that go to the host's memory and come back. On a GPU, and how fast: tests/gpu/check_moves.py."""

import copy

import torch
from tests.builtin.tiny_models import save_tiny

from polyrl.engines.builtin import models
from polyrl.engines.builtin.cuda.merging import merge_projections
from polyrl.engines.builtin.cuda.offloading import Offloading


def test_weights_come_back_as_they_were_into_the_tensors_that_they_were(tmp_path):
    model = copy.deepcopy(models.load(str(save_tiny("qwen3", tmp_path)), "float32", "cpu").model)  # not of a file
    merge_projections(model)
    tokens = torch.arange(3, 20).unsqueeze(0)
    with torch.inference_mode():
        before = model(tokens).logits
    offloading = Offloading(model)
    for _ in range(2):
        offloading.take_away()
        offloading.take_away()
        assert {one.untyped_storage().nbytes() for one in model.parameters()} == {0}
        offloading.bring_back()
        offloading.bring_back()
        with torch.inference_mode():
            assert torch.equal(model(tokens).logits, before)
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.q_proj.weight.zero_()
    with torch.inference_mode():
        assert not torch.equal(model(tokens).logits, before), "a part is still a view of the merged matrix"
