"""A model's weights go into a version's bytes and come back bit by bit; what does not fit leaves the model alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polyrl.weights import delta
from polyrl.weights.chunks import bad_chunks, table_of
from polyrl.weights.manifest import Manifest, changed_tensors
from polyrl.weights.tensors import (
    BadTensors,
    dequantise,
    entry_tensor,
    layout_of,
    load_into,
    quantise,
    snapshot,
)


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
    loaded = load_into(served.state_dict(), layout, version_of(trained, layout))
    assert loaded == tuple(one.name for one in layout.tensors)
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
    assert load_into(served.state_dict(), layout, version_of(trained, layout), {"up_proj.bias"}) == ("up_proj.bias",)
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


# Lossy serving weights.

numbers = st.floats(-1e4, 1e4, width=32)


@given(st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=1, max_size=8))
def test_int8_is_within_half_a_scale(rows):
    tensor = torch.tensor(rows)
    elements, scales = quantise(tensor, "int8")
    error = (dequantise(elements, scales, torch.float32) - tensor).abs()
    assert (error <= scales[:, None] * 0.5001).all()


@given(st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=1, max_size=8))
def test_fp8_is_within_a_sixteenth_of_the_element_or_a_thousandth_of_the_scale(rows):
    tensor = torch.tensor(rows)
    elements, scales = quantise(tensor, "float8_e4m3fn")
    error = (dequantise(elements, scales, torch.float32) - tensor).abs()
    assert (error <= torch.maximum(tensor.abs() / 16 * 1.001, scales[:, None] / 1024 * 1.001)).all()


def test_a_row_of_zeros_stays_one():
    for dtype in ("int8", "float8_e4m3fn"):
        elements, scales = quantise(torch.zeros(2, 3), dtype)
        assert not dequantise(elements, scales, torch.float32).any()


@pytest.mark.parametrize(("lossy", "bound"), [("fp8-rows", 1 / 15), ("int8-rows", 0.01)])
def test_lossy_weights_are_named_so_and_hold_only_the_layers_matrices_in_bytes(lossy, bound):
    trained, served = Tiny(1), Tiny(2, torch.bfloat16)
    layout = layout_of(trained.state_dict(), lossy=lossy)
    small = [one.name for one in layout.tensors if one.item_bytes == 1]
    assert small == ["down_proj.weight", "up_proj.weight"]
    assert layout.by_name["up_proj.weight.scale"].shape == (48,)
    load_into(served.state_dict(), layout, version_of(trained, layout))
    assert torch.equal(served.embed_tokens.weight, trained.embed_tokens.weight.bfloat16())
    largest = trained.up_proj.weight.abs().max()
    assert (served.up_proj.weight.float() - trained.up_proj.weight).abs().max() < bound * largest
    assert load_into(served.state_dict(), layout, version_of(trained, layout), {"up_proj.weight.scale"}) == (
        "up_proj.weight",
    )
