"""A delta made by torch on a device is that of the host, byte for byte. Here the device is the CPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrl.weights import delta
from polyrl.weights.tensors import layout_of, snapshot
from polyrl.weights.tensors_gpu import GpuDeltaEncoder


def bytes_of(state, layout):
    out = bytearray(layout.num_bytes)
    snapshot(state, layout, out)
    return out


def assert_the_same_as_on_the_host(states, layout, part_elements=delta.PART_ELEMENTS, **sizes):
    encoder = GpuDeltaEncoder(layout, states[0], threads=2, part_elements=part_elements, **sizes)
    previous = bytes_of(states[0], layout)
    for state in states[1:]:
        newest = bytes_of(state, layout)
        assert encoder.encode(state) == delta.encode(previous, newest, layout, part_elements=part_elements)
        previous = newest


def random_state(seed, dtype=torch.float32):
    make = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (50, 33), "b": (7,), "c.weight": (1,), "d": (0, 3), "e.weight": (129, 65)}
    return {name: (torch.randn(shape, generator=make) * 0.02).to(dtype) for name, shape in shapes.items()}


def stepped(state, lr, seed):
    make = torch.Generator().manual_seed(seed)
    return {name: one - lr * torch.randn(one.shape, generator=make).to(one.dtype) for name, one in state.items()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("lr", [0.0, 1e-7, 1e-6, 1e-5, 1e-3, 1.0])
def test_steps_of_any_size(dtype, lr):
    state = random_state(1)
    states = [state, stepped(state, lr, 2), stepped(stepped(state, lr, 2), lr, 3)]
    assert_the_same_as_on_the_host(states, layout_of(state, dtype))


def test_tensors_of_several_pieces_and_layouts_of_several_slabs():
    state = {**random_state(1), "n": torch.arange(10), "z.weight": torch.randn(40, 50)}
    later = stepped(random_state(1), 1e-6, 2)
    states = [state, {**state, **later}, {**state, **later, "n": torch.arange(10) + (torch.arange(10) == 3) * 2**40}]
    assert_the_same_as_on_the_host(states, layout_of(state), part_elements=1000, slab_elements=2500)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
@given(data=st.data())
@settings(max_examples=60)
def test_any_bits(dtype, data):
    limits = torch.iinfo(dtype)
    values = st.one_of(
        st.integers(limits.min, limits.max),
        st.integers(-300, 300).map(lambda one: max(min(one, limits.max), limits.min)),
    )
    num = data.draw(st.integers(1, 40))
    base = torch.zeros(600, dtype=dtype)
    base[:: 600 // num] = data.draw(values)
    changed = base.clone()
    for place in data.draw(st.lists(st.integers(0, 599), max_size=20)):
        changed[place] = data.draw(values)
    state = {"x": base, "y": torch.ones(3, dtype=torch.int8)}
    assert_the_same_as_on_the_host([state, {**state, "x": changed}], layout_of(state))
