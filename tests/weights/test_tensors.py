"""A model's weights go into a version's bytes and come back bit by bit; what does not fit leaves the model alone."""

import pytest
import torch

from polyrl.engines.builtin.installing import StagedTensors
from polyrl.weights import delta
from polyrl.weights.chunks import bad_chunks, table_of
from polyrl.weights.manifest import Manifest, changed_tensors
from polyrl.weights.tensors import (
    BadTensors,
    entry_tensor,
    layout_of,
    pair_up,
    snapshot,
)


def load_into(state, layout, view, changed=None):
    """Install a version as the builtin engine does."""
    StagedTensors(pair_up(state, layout, view, changed)).put()


class Tiny(torch.nn.Module):
    def __init__(self, seed=0, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(seed)
        self.embed_tokens = torch.nn.Embedding(37, 16)
        self.up_proj = torch.nn.Linear(16, 48)
        self.down_proj = torch.nn.Linear(48, 16, bias=False)
        self.norm = torch.nn.LayerNorm(16)
        self.lm_head = torch.nn.Linear(16, 37, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        self.register_buffer("positions", torch.arange(5))
        self.to(dtype)

    def forward(self, tokens):
        hidden = self.embed_tokens(tokens)
        return self.lm_head(self.norm(hidden + self.down_proj(torch.relu(self.up_proj(hidden)))))


def version_of(model, layout):
    out = bytearray(layout.num_bytes)
    snapshot(model.state_dict(), layout, out)
    return out


def test_tied_tensors_are_there_once_and_other_dtypes_keep_theirs():
    layout = layout_of(Tiny().state_dict(), architecture="Tiny")
    assert layout.tied == {"lm_head.weight": "embed_tokens.weight"}
    assert {one.name: one.dtype for one in layout.tensors} == {
        "embed_tokens.weight": "bfloat16",
        "up_proj.weight": "bfloat16",
        "up_proj.bias": "bfloat16",
        "down_proj.weight": "bfloat16",
        "norm.weight": "bfloat16",
        "norm.bias": "bfloat16",
        "positions": "int64",
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_weights_come_back_in_the_serving_dtype_bit_by_bit(dtype):
    trained, served = Tiny(1), Tiny(2, getattr(torch, dtype))
    layout = layout_of(trained.state_dict(), dtype)
    load_into(served.state_dict(), layout, version_of(trained, layout))
    for name, tensor in served.state_dict().items():
        expected = trained.state_dict()[name]
        assert torch.equal(tensor, expected.to(tensor.dtype)), name
    assert served.lm_head.weight.data_ptr() == served.embed_tokens.weight.data_ptr()


def test_a_transposed_tensor_is_written_row_by_row():
    state = {"w": torch.arange(12.0).view(3, 4).t()}
    layout = layout_of(state, "float32")
    out = bytearray(layout.num_bytes)
    snapshot(state, layout, out)
    assert torch.equal(entry_tensor(layout.by_name["w"], out), state["w"])


def test_bytes_between_tensors_stay_zero():
    layout = layout_of(Tiny(1).state_dict())
    out = version_of(Tiny(1), layout)
    for one, after in zip(layout.tensors, layout.tensors[1:], strict=False):
        assert not any(out[one.end : after.start])


def test_only_what_changed_is_loaded():
    trained, served = Tiny(1), Tiny(2, torch.bfloat16)
    layout = layout_of(trained.state_dict())
    before = served.norm.weight.clone()
    load_into(served.state_dict(), layout, version_of(trained, layout), {"up_proj.bias"})
    assert torch.equal(served.up_proj.bias, trained.up_proj.bias.bfloat16())
    assert torch.equal(served.norm.weight, before)


def test_a_model_that_does_not_tie_them_gets_both_copies():
    trained, served = Tiny(1), Tiny(2, torch.bfloat16)
    served.lm_head.weight = torch.nn.Parameter(torch.zeros(37, 16, dtype=torch.bfloat16))
    layout = layout_of(trained.state_dict())
    load_into(served.state_dict(), layout, version_of(trained, layout))
    assert torch.equal(served.lm_head.weight, trained.embed_tokens.weight.bfloat16())
    assert torch.equal(served.embed_tokens.weight, served.lm_head.weight)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: {**state, "norm.bias": torch.zeros(15, dtype=torch.bfloat16)}, "norm.bias: shape"),
        (lambda state: {**state, "norm.bias": torch.zeros(16)}, "norm.bias: torch.float32 in the model"),
        (
            lambda state: {name: one for name, one in state.items() if name != "norm.bias"},
            "norm.bias: not in the model",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_left_alone(change, words):
    trained, served = Tiny(1), Tiny(2, torch.bfloat16)
    layout = layout_of(trained.state_dict())
    before = {name: tensor.clone() for name, tensor in served.state_dict().items()}
    with pytest.raises(BadTensors, match=words):
        load_into(change(served.state_dict()), layout, version_of(trained, layout))
    assert all(torch.equal(tensor, before[name]) for name, tensor in served.state_dict().items())
    if "float32" not in words:
        with pytest.raises(BadTensors, match=words):
            snapshot(change(trained.state_dict()), layout, bytearray(layout.num_bytes))


def test_a_chain_of_twenty_deltas_of_a_real_optimizer_gives_the_same_model_as_the_full_version():
    trained, by_chain, by_full = Tiny(1), Tiny(2, torch.bfloat16), Tiny(3, torch.bfloat16)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-4)
    layout = layout_of(trained.state_dict())
    newest = version_of(trained, layout)
    held = bytearray(newest)
    load_into(by_chain.state_dict(), layout, held)
    manifest = Manifest(0, layout, table_of(newest), "")
    for step in range(20):
        tokens = torch.randint(37, (8, 5))
        torch.nn.functional.cross_entropy(trained(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        previous, newest = newest, version_of(trained, layout)
        after = Manifest(step + 1, layout, table_of(newest), manifest.digest)
        found, blob = delta.make(manifest, after, previous, newest)
        delta.apply(found, layout, blob, held)
        assert bad_chunks(held, after.chunks) == []
        load_into(by_chain.state_dict(), layout, held, changed_tensors([found], layout))
        manifest = after
    load_into(by_full.state_dict(), layout, newest)
    for name, tensor in by_full.state_dict().items():
        assert torch.equal(by_chain.state_dict()[name], tensor)
    tokens = torch.arange(37)[None]
    assert torch.equal(by_chain(tokens), by_full(tokens))
