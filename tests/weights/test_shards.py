"""The slices of all ranks are those of a plain resharding with numpy, for every rule and TP 1, 2, 4 and 8."""

import numpy as np
import pytest

from polyrl.weights.manifest import Spec, lay_out
from polyrl.weights.shards import (
    BadShard,
    Columns,
    Heads,
    HeadsOf,
    Rows,
    Vocabulary,
    Whole,
    bytes_read,
    decoder_rules,
    fill,
    plan,
)

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB = 32, 8, 2, 8, 48, 151
TP = pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])


def specs():
    layer = {
        "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.q_proj.bias": (HEADS * HEAD_DIM,),
        "self_attn.k_proj.bias": (KV_HEADS * HEAD_DIM,),
        "self_attn.v_proj.bias": (KV_HEADS * HEAD_DIM,),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "self_attn.o_proj.bias": (HIDDEN,),
        "self_attn.q_norm.weight": (HEAD_DIM,),
        "mlp.gate_proj.weight": (INNER, HIDDEN),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
        "input_layernorm.weight": (HIDDEN,),
    }
    yield Spec("model.embed_tokens.weight", "bfloat16", (VOCAB, HIDDEN))
    yield Spec("model.norm.weight", "float32", (HIDDEN,))
    for name, shape in layer.items():
        yield Spec(f"model.layers.0.{name}", "bfloat16", shape)


LAYOUT = lay_out(specs(), tied={"lm_head.weight": "model.embed_tokens.weight"})
VERSION = np.random.default_rng(1).integers(0, 256, LAYOUT.num_bytes, np.uint8)


def tensor(name):
    """A tensor of the version as integers of its size, in its shape."""
    entry = LAYOUT.by_name[name]
    return VERSION[entry.start : entry.end].view(f"u{entry.item_bytes}").reshape(entry.shape)


def shard(rule, rank, num_ranks):
    """What a rank gets, through a buffer that was full of something else."""
    found = plan(rule, LAYOUT, rank, num_ranks)
    out = bytearray(b"\xa5" * found.num_bytes)
    fill(found, VERSION.data, out)
    size = {"bfloat16": 2, "float32": 4}[found.dtype]
    return np.frombuffer(out, f"u{size}").reshape(found.shape)


def reference_heads(matrix, num_heads, rank, num_ranks):
    """Heads as a list, repeated when there are fewer of them than ranks, and dealt out in order."""
    heads = np.split(matrix, num_heads)
    heads = [head for head in heads for _ in range(max(1, num_ranks // num_heads))]
    share = len(heads) // num_ranks
    return np.concatenate(heads[rank * share : (rank + 1) * share])


def reference(name, rank, num_ranks):
    """The slice of an engine's parameter, made the slow way."""
    layer = "model.layers.0."
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        table = tensor("model.embed_tokens.weight")
        padded = np.concatenate([table, np.zeros((192 - VOCAB, HIDDEN), table.dtype)])
        return np.split(padded, num_ranks)[rank]
    if "qkv_proj" in name:
        what = name.rsplit(".", 1)[1]
        parts = [("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)]
        split = [
            reference_heads(tensor(f"{layer}self_attn.{kind}_proj.{what}"), heads, rank, num_ranks)
            for kind, heads in parts
        ]
        return np.concatenate(split)
    if "gate_up_proj" in name:
        gate, up = (np.split(tensor(f"{layer}mlp.{kind}_proj.weight"), num_ranks)[rank] for kind in ("gate", "up"))
        return np.concatenate([gate, up])
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return np.split(tensor(name), num_ranks, axis=1)[rank]
    return tensor(name)


@TP
def test_every_slice_of_a_decoder_is_that_of_the_reference(num_ranks):
    rules = decoder_rules(LAYOUT, num_heads=HEADS, num_kv_heads=KV_HEADS)
    assert set(rules) >= {
        "model.layers.0.self_attn.qkv_proj.weight",
        "model.layers.0.self_attn.qkv_proj.bias",
        "model.layers.0.mlp.gate_up_proj.weight",
        "lm_head.weight",
    }
    assert len(rules) == len(LAYOUT.by_name) - 5  # three became one twice, two became one once
    for name, rule in rules.items():
        for rank in range(num_ranks):
            np.testing.assert_array_equal(shard(rule, rank, num_ranks), reference(name, rank, num_ranks), name)


@TP
def test_unfused_slices_put_together_are_the_tensor(num_ranks):
    rules = decoder_rules(LAYOUT, num_heads=HEADS, num_kv_heads=KV_HEADS, fused=False)
    assert set(rules) == set(LAYOUT.by_name)
    for name, rule in rules.items():
        slices = [shard(rule, rank, num_ranks) for rank in range(num_ranks)]
        whole = tensor(name)
        match rule:
            case Whole():
                assert all((one == whole).all() for one in slices)
            case Rows():
                np.testing.assert_array_equal(np.concatenate(slices, axis=1), whole)
            case Heads(((_, num_heads),)) if num_heads < num_ranks:
                np.testing.assert_array_equal(np.concatenate(slices[:: num_ranks // num_heads]), whole)
            case _:
                np.testing.assert_array_equal(np.concatenate(slices)[: len(whole)], whole)


@pytest.mark.parametrize(("rank", "head"), [(0, 0), (3, 0), (4, 1), (7, 1)])
def test_with_more_ranks_than_kv_heads_neighbours_hold_the_same_head(rank, head):
    k = "model.layers.0.self_attn.k_proj.weight"
    found = shard(Heads((HeadsOf(k, KV_HEADS),)), rank, 8)
    np.testing.assert_array_equal(found, tensor(k)[head * HEAD_DIM : (head + 1) * HEAD_DIM])


def test_the_last_ranks_of_a_padded_vocabulary_get_zeros():
    rule = Vocabulary("model.embed_tokens.weight", 1024)
    assert not shard(rule, 7, 8).any()
    assert plan(rule, LAYOUT, 7, 8).copies == ()
    assert shard(rule, 0, 8).shape == (128, HIDDEN)
    np.testing.assert_array_equal(shard(rule, 1, 8)[:23], tensor("model.embed_tokens.weight")[128:])


def test_a_rank_reads_its_share_and_no_more():
    rules = decoder_rules(LAYOUT, num_heads=HEADS, num_kv_heads=KV_HEADS)
    alone = bytes_read(rules, LAYOUT, 0, 1)
    assert bytes_read(rules, LAYOUT, 0, 2) < 0.6 * alone


@pytest.mark.parametrize(
    ("rule", "num_ranks"),
    [
        (Columns(("model.layers.0.mlp.gate_proj.weight",)), 5),
        (Rows("model.layers.0.mlp.down_proj.weight"), 7),
        (Rows("model.norm.weight"), 2),
        (Heads((HeadsOf("model.layers.0.self_attn.k_proj.weight", 2),)), 3),
        (Heads((HeadsOf("model.layers.0.self_attn.k_proj.weight", 5),)), 1),
        (Columns(("model.norm.weight", "model.layers.0.mlp.up_proj.weight")), 1),
        (Whole("nothing.weight"), 1),
    ],
)
def test_what_does_not_divide_or_fit_is_refused_in_a_line(rule, num_ranks):
    with pytest.raises(BadShard) as caught:
        plan(rule, LAYOUT, 0, num_ranks)
    assert "\n" not in str(caught.value)


def test_a_buffer_of_another_size_is_refused():
    found = plan(Whole("model.norm.weight"), LAYOUT, 0, 1)
    with pytest.raises(BadShard, match="expected 128"):
        fill(found, VERSION.data, bytearray(127))
    with pytest.raises(BadShard, match="buffer of 100"):
        fill(found, bytes(100), bytearray(128))
