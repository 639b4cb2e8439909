"""Products done as one, as a GPU runs them, on the CPU: the same results, the same weights, and nothing kept."""

import copy
import weakref
from typing import Any

import pytest
import torch
from tests.builtin.tiny_models import FAMILIES, SHARED
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from polyrl.engines.builtin.cuda.merging import merge_projections

TOKENS = torch.arange(3, 40).unsqueeze(0)


def pair(family: str) -> tuple[Any, Any]:
    """A model, and the same one merged."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**SHARED, **FAMILIES[family]), dtype=torch.float32)
    merged = copy.deepcopy(model.eval())
    merge_projections(merged)
    return model, merged


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "qwen3_moe"])
def test_a_merged_model_gives_the_same_before_and_after_its_weights_change(family):
    model, merged = pair(family)
    names = [name for name, _ in merged.named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]
    for _ in range(2):
        with torch.no_grad():
            assert (model(TOKENS).logits - merged(TOKENS).logits).abs().max() < 1e-5
            for one in (*model.parameters(), *merged.parameters()):
                one.mul_(1.1)


def test_gradients_are_those_of_separate_products():
    model, merged = pair("qwen2")
    for one in (model, merged):
        one(TOKENS).logits.square().sum().backward()
    for (name, ours), theirs in zip(merged.named_parameters(), model.parameters(), strict=True):
        assert ours.grad is not None and torch.equal(ours.grad, theirs.grad), name


def test_merging_twice_is_merging_once():
    _, merged = pair("llama")
    modules = dict(merged.named_modules())
    merge_projections(merged)
    assert dict(merged.named_modules()) == modules


def test_nothing_of_a_pass_is_kept():
    _, merged = pair("qwen2")
    attention = merged.model.layers[0].self_attn
    x = torch.randn(5, 64)
    with torch.no_grad():
        results = [part(x) for part in (attention.q_proj, attention.k_proj, attention.v_proj)]
    kept = [weakref.ref(one) for one in results]
    del results
    assert [one() for one in kept] == [None, None, None]


def test_a_merged_layer_compiles_as_one_graph():
    model, merged = pair("llama")
    compiled = torch.compile(merged.model.layers[0].mlp, backend="eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for num in (3, 7):
            x = torch.randn(num, 64)
            assert (compiled(x) - model.model.layers[0].mlp(x)).abs().max() < 1e-5
