"""Chunk tables: every flipped bit is found, and a table that does not fit its own numbers cannot be read."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.weights.forging import forge

from polyrl.weights.chunks import UNFORGEABLE, ChunkTable, bad_chunks, digest_bytes, table_of

HASHES = ("xxh3-128", "blake3")
blobs = st.binary(max_size=300)
sizes = st.integers(1, 64)
hashes = st.sampled_from(HASHES)


@given(blobs, sizes, hashes, st.integers(1, 3))
def test_a_blob_agrees_with_its_own_table(blob, chunk_bytes, hash, threads):
    table = table_of(blob, chunk_bytes, hash, threads)
    assert bad_chunks(blob, table, threads) == []
    assert table == table_of(memoryview(blob), chunk_bytes, hash)
    assert b"".join(blob[slice(*table.range_of(i))] for i in range(table.num_chunks)) == blob


@given(st.binary(min_size=1, max_size=300), sizes, hashes, st.data())
def test_a_flipped_bit_is_found_in_its_chunk_alone(blob, chunk_bytes, hash, data):
    bit = data.draw(st.integers(0, 8 * len(blob) - 1))
    flipped = bytearray(blob)
    flipped[bit // 8] ^= 1 << bit % 8
    assert bad_chunks(flipped, table_of(blob, chunk_bytes, hash)) == [bit // 8 // chunk_bytes]


@pytest.mark.parametrize("hash", HASHES)
def test_a_blob_of_another_size_has_no_good_chunk(hash):
    table = table_of(bytes(10), 4, hash)
    assert bad_chunks(bytes(9), table) == bad_chunks(bytes(11), table) == [0, 1, 2]
    assert bad_chunks(b"x", table_of(b"", 4, hash)) == [0]


def test_a_view_of_another_format_is_hashed_as_bytes():
    assert table_of(memoryview(bytes(range(16))).cast("I"), 4) == table_of(bytes(range(16)), 4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_bytes": -1},
        {"num_bytes": 9},
        {"num_bytes": 1 << 60},
        {"chunk_bytes": 0},
        {"chunk_bytes": 1 << 40},
        {"chunk_bytes": 1},
        {"digests": b""},
        {"hash": "blake3"},
        {"hash": "md5"},
    ],
    ids=str,
)
def test_a_table_that_does_not_fit_its_own_numbers_is_refused(wrong):
    right = {"num_bytes": 8, "chunk_bytes": 4, "hash": "xxh3-128", "digests": bytes(2 * digest_bytes("xxh3-128"))}
    assert msgspec.convert(right, ChunkTable).num_chunks == 2
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(right | wrong, ChunkTable)


@pytest.mark.parametrize("num_bytes", [4096, 5001, 65536])
def test_xxh3_can_be_forged_and_blake3_finds_it(num_bytes: int):
    """Why the one is for those who can trust their neighbours."""
    data = np.random.default_rng(1).bytes(num_bytes)
    other = forge(data)
    assert sum(a != b for a, b in zip(data, other, strict=True)) > num_bytes / 2
    assert bad_chunks(other, table_of(data, hash="xxh3-128")) == []
    assert bad_chunks(other, table_of(data, hash="blake3")) == [0]
    assert "xxh3-128" not in UNFORGEABLE
