"""The slices of all ranks are those of a plain resharding with numpy, for TP 1, 2, 4 and 8."""

import numpy as np
import pytest

from polyrl.engines.engine import EngineError
from polyrl.engines.served.installing import shard_of
from polyrl.weights.manifest import Spec, lay_out

HIDDEN, VOCAB, PADDED = 32, 151, 192
TABLE, NORM = "model.embed_tokens.weight", "model.norm.weight"
LAYOUT = lay_out(
    [Spec(TABLE, "bfloat16", (VOCAB, HIDDEN)), Spec(NORM, "float32", (HIDDEN,))], tied={"lm_head.weight": TABLE}
)
VERSION = np.random.default_rng(1).integers(0, 256, LAYOUT.num_bytes, np.uint8)
TP = pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])


def tensor(name):
    """A tensor of the version as integers of its size, in its shape."""
    entry = LAYOUT.by_name[name]
    return VERSION[entry.start : entry.end].view(f"u{entry.item_bytes}").reshape(entry.shape)


def shard(name, rank, num_ranks, **more):
    found = shard_of(LAYOUT, name, rank, num_ranks, **more)
    its = VERSION[found.start : found.end]
    whole = np.concatenate([its, np.zeros(found.num_bytes - len(its), np.uint8)])
    return whole.view({"bfloat16": "u2", "float32": "u4"}[found.dtype]).reshape(found.shape)


@TP
@pytest.mark.parametrize("name", [TABLE, "lm_head.weight"])
def test_a_vocabulary_is_padded_and_its_rows_dealt_out_in_order(name, num_ranks):
    table = tensor(TABLE)
    padded = np.concatenate([table, np.zeros((PADDED - VOCAB, HIDDEN), table.dtype)])
    for rank, expected in enumerate(np.split(padded, num_ranks)):
        np.testing.assert_array_equal(shard(name, rank, num_ranks), expected)


@TP
def test_what_is_not_split_is_whole_at_every_rank(num_ranks):
    for rank in range(num_ranks):
        np.testing.assert_array_equal(shard(NORM, rank, num_ranks), tensor(NORM))


def test_the_last_ranks_of_a_padded_vocabulary_get_zeros():
    assert not shard(TABLE, 7, 8, multiple=1024).any()
    assert shard(TABLE, 0, 8, multiple=1024).shape == (128, HIDDEN)
    np.testing.assert_array_equal(shard(TABLE, 1, 8, multiple=1024)[:23], tensor(TABLE)[128:])


@pytest.mark.parametrize(
    ("name", "rank", "num"), [("nothing.weight", 0, 2), (NORM, 2, 2), (TABLE, -1, 2), (TABLE, 0, 1 << 60)]
)
def test_a_slice_that_cannot_be_is_refused_in_a_line(name, rank, num):
    """Name and rank are a server's own words."""
    with pytest.raises(EngineError) as caught:
        shard_of(LAYOUT, name, rank, num)
    assert "\n" not in str(caught.value)
