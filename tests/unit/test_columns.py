"""Cells and columns: what is packed is read back, and a frame that cannot be true is refused whatever its bytes are."""

import math
import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrl.not_data import NOT_DATA
from polyrl.wire import frames
from polyrl.wire.columns import (
    ANY_VOCABULARY,
    CELL_BYTES,
    MAX_LOGPROB,
    MIN_LOGPROB,
    BadColumns,
    Vocabulary,
    check,
    check_cells,
    in_pieces,
    pack_cells,
    pack_column,
    pack_tokens,
    tokens_of,
    unpack_tokens,
    view_cells,
)

TOKENS = st.integers(0, 2**31 - 1)
LOGPROBS = st.floats(-(2.0**100), 0.0, width=32)
RUN = st.tuples(
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(-(2**31), 2**31 - 1),
    st.lists(st.tuples(TOKENS, LOGPROBS), min_size=1, max_size=4),
)


def packed(*runs) -> tuple[bytes, bytes, bytes, bytes, bytes]:
    """The columns of runs (lease, offset, version, cells)."""
    cells = [cell for run in runs for cell in run[3]]
    return (
        pack_column("<u8", [run[0] for run in runs]),
        pack_column("<u4", [run[1] for run in runs]),
        pack_column("<u4", [len(run[3]) for run in runs]),
        pack_column("<i4", [run[2] for run in runs]),
        pack_cells([token for token, _ in cells], [logprob for _, logprob in cells]),
    )


# Packing


def test_a_cell_is_a_token_and_its_log_probability_in_eight_bytes_little_endian():
    assert pack_cells([7], [-0.5]) == struct.pack("<if", 7, -0.5)
    assert len(pack_cells([1, 2, 3], [-1.0, -1.0, -1.0])) == 3 * CELL_BYTES


@given(st.lists(st.tuples(TOKENS, LOGPROBS)))
def test_cells_are_read_back_as_they_were(cells):
    tokens, logprobs = [token for token, _ in cells], [logprob for _, logprob in cells]
    data = pack_cells(tokens, logprobs)
    assert view_cells(data)["token"].tolist() == tokens
    assert view_cells(data)["logprob"].tolist() == logprobs
    assert unpack_tokens(tokens_of(data)) == tokens == unpack_tokens(pack_tokens(tokens))


def test_a_view_is_no_copy():
    data = bytearray(pack_cells([1, 2], [-1.0, -1.0]))
    view = view_cells(data)
    with pytest.raises(BufferError):
        data += b"12345678"
    assert view["token"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("kind", "letter", "largest"), [("<u8", "Q", 2**64 - 1), ("<u4", "I", 2**32 - 1), ("<i4", "i", 2**31 - 1)]
)
def test_columns_hold_the_largest_numbers_they_are_made_for(kind, letter, largest):
    assert pack_column(kind, [0, largest]) == struct.pack(f"<2{letter}", 0, largest)
    with pytest.raises(OverflowError):
        pack_column(kind, [largest + 1])


# Checking


@given(st.lists(RUN, max_size=5))
def test_a_true_frame_is_read_as_it_was_made(made):
    columns = check(*packed(*made))
    assert columns.leases == [run[0] for run in made]
    assert columns.offsets == [run[1] for run in made]
    assert columns.versions == [run[2] for run in made]
    assert columns.counts == [len(run[3]) for run in made]
    ends = [0, *columns.ends]
    cells = packed(*made)[4]
    for start, end, run in zip(ends, ends[1:], made, strict=False):
        assert unpack_tokens(tokens_of(cells[start:end])) == [token for token, _ in run[3]]


def test_a_frame_without_leases_is_true():
    assert check(b"", b"", b"", b"", b"") == ([], [], [], [], [])


LEASES, OFFSETS, COUNTS, VERSIONS, CELLS = packed((1, 0, 0, [(5, -1.0), (6, -1.0)]))


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ((LEASES[:-1], OFFSETS, COUNTS, VERSIONS, CELLS), "ends inside a number"),
        ((LEASES, OFFSETS, COUNTS, VERSIONS, CELLS[:-1]), "ends inside a number"),
        ((LEASES, OFFSETS[:-1], COUNTS, VERSIONS, CELLS), "do not fit each other"),
        ((LEASES, OFFSETS, COUNTS * 2, VERSIONS, CELLS), "do not fit each other"),
        ((LEASES, OFFSETS, COUNTS, b"", CELLS), "do not fit each other"),
        ((LEASES, OFFSETS, COUNTS, VERSIONS, CELLS[:8]), "that add up to"),
        ((LEASES, OFFSETS, COUNTS, VERSIONS, CELLS * 2), "that add up to"),
        ((b"", b"", b"", b"", CELLS), "that add up to"),
        ((LEASES * 2, OFFSETS * 2, pack_column("<u4", [2, 0]), VERSIONS * 2, CELLS), "a lease without a token"),
        # Counts whose sum would be right in 32 bits.
        ((LEASES * 2, OFFSETS * 2, pack_column("<u4", [2**32 - 1, 3]), VERSIONS * 2, CELLS), "that add up to"),
        ((LEASES, OFFSETS, COUNTS, VERSIONS, pack_cells([-1, 6], [-1.0, -1.0])), "token id -1; expected 0 or more"),
        ((LEASES, OFFSETS, COUNTS, VERSIONS, pack_cells([5, 6], [-1.0, 0.01])), "log-probability"),
        ((LEASES, OFFSETS, COUNTS, VERSIONS, pack_cells([5, 6], [-1.0, math.nan])), "log-probability"),
        ((LEASES, OFFSETS, COUNTS, VERSIONS, pack_cells([5, 6], [math.nan, -1.0])), "log-probability"),
        ((LEASES, OFFSETS, COUNTS, VERSIONS, pack_cells([5, 6], [-1.0, -math.inf])), "log-probability"),
        ((LEASES, OFFSETS, COUNTS, VERSIONS, pack_cells([5, 6], [-1.0, math.inf])), "log-probability"),
    ],
)
def test_a_frame_that_cannot_be_true_is_refused_with_the_reason(columns, why):
    with pytest.raises(BadColumns, match=why):
        check(*columns)
        check_cells(columns[-1], ANY_VOCABULARY)


EDGES = [0, 1, 1 << 31, 0x3A83126E, 0x3A83126F, 0x3A831270, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0xFF7FFFFF, 0xFF800000]
AROUND_THE_LEAST = [0xC2000000, 0xC2C7FFFF, 0xC2C80000, 0xC2C80001, 0xC3000000]
BITS = st.one_of(st.sampled_from(EDGES + AROUND_THE_LEAST), st.integers(0, 2**32 - 1))
SIZES = [1, 2, 255, 256, 257, 32_000, 65_535, 65_536, 65_537, 151_936, 1 << 24, (1 << 24) + 1, 1 << 31]
IDS = st.one_of(BITS, st.sampled_from([size + more for size in SIZES for more in (-1, 0, 1)]))


@settings(max_examples=300)
@given(st.lists(st.tuples(IDS, BITS), max_size=6), st.integers(0, 200), st.sampled_from(SIZES))
def test_cells_are_good_or_not_whatever_their_bits_are_and_however_many_there_are(odd, num_others, size):
    def is_good(cell: bytes) -> bool:
        token, logprob = struct.unpack("<if", cell)
        return 0 <= token < size and MIN_LOGPROB <= logprob <= MAX_LOGPROB

    made = [struct.pack("<II", *one) for one in odd] + [pack_cells([0], [-0.5])] * num_others
    try:
        check_cells(b"".join(made), Vocabulary(size))
    except BadColumns:
        assert not all(map(is_good, made))
    else:
        assert all(map(is_good, made))


def test_a_certain_token_may_be_a_little_more_than_certain():
    check_cells(pack_cells([5, 6], [0.0, 1e-4]), ANY_VOCABULARY)


def test_an_id_beyond_the_vocabulary_is_named_with_what_was_expected():
    with pytest.raises(BadColumns, match="token id 32000; expected 0 to 31999"):
        check_cells(pack_cells([5, 32_000], [-1.0, -1.0]), Vocabulary(32_000))


@given(st.tuples(*[st.binary(max_size=40)] * 5))
@settings(max_examples=300)
def test_whatever_the_bytes_are_they_are_read_or_refused(columns):
    try:
        read = check(*columns)
    except BadColumns as refused:
        assert "\n" not in str(refused)
        return
    assert len(read.leases) == len(read.offsets) == len(read.counts) == len(read.versions) == len(read.ends)
    assert sum(read.counts) * CELL_BYTES == len(columns[4])


@given(RUN, st.data())
@settings(max_examples=200)
def test_a_frame_with_a_changed_byte_is_read_or_refused(run, data):
    columns = [bytearray(column) for column in packed(run)]
    column = data.draw(st.sampled_from(columns))
    column[data.draw(st.integers(0, len(column) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        read = check(*map(bytes, columns))
    except BadColumns:
        return
    assert sum(read.counts) * CELL_BYTES == len(columns[4])


@pytest.mark.parametrize("place", [(), (7, 0)])
def test_a_frame_of_tokens_has_nothing_in_it_that_nobody_reads(place: tuple[int, ...]):
    """It is journalled as it came: whoever may add to it may fill the disk."""
    said = msgspec.msgpack.decode(
        frames.encode(frames.NewTokens(1, b"", b"", b"", b"", b"", (frames.Ended(1, 0, "stop"),)))
    )
    frames.decode_from_worker(msgspec.msgpack.encode(said))
    grown = said
    for index in place:
        grown = grown[index]
    grown.append(b"\0" * 1000)
    with pytest.raises(NOT_DATA):
        frames.decode_from_worker(msgspec.msgpack.encode(said))


@given(st.lists(st.integers(0, 50)), st.integers(1, 100))
def test_pieces_are_the_whole_in_order_and_none_is_larger_than_its_last_item_makes_it(sizes: list[int], most: int):
    pieces = list(in_pieces(sizes, lambda size: size, most))
    assert [size for piece in pieces for size in piece] == sizes
    assert all(piece and sum(piece[:-1]) < most for piece in pieces)
    assert all(sum(piece) >= most for piece in pieces[:-1])
