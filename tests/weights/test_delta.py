"""Whatever two versions are, the delta turns one into the other bit by bit; whatever a blob is, it does no harm."""

import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrl.weights import delta
from polyrl.weights.chunks import bad_chunks, table_of
from polyrl.weights.delta import BadDelta
from polyrl.weights.manifest import BadManifest, DeltaManifest, DeltaPart, Manifest, Spec, decode_delta, encode, lay_out

DTYPES = ["bfloat16", "float16", "float32", "float8_e4m3fn", "int8", "int64"]


def one_tensor(dtype, num):
    return lay_out([Spec("w", dtype, (num,))])


def filled(layout, bits):
    """A version whose tensors hold these bits, with zeros between them."""
    version = np.zeros(layout.num_bytes, np.uint8)
    for tensor, one in zip(layout.tensors, bits, strict=True):
        version[tensor.start : tensor.end] = one.view(np.uint8)
    return version


def manifest_of(version, layout, number=0, parent=""):
    return Manifest(number, layout, table_of(version), parent)


def delta_of(old, new, layout, threads=1):
    base = manifest_of(old, layout)
    return delta.make(base, manifest_of(new, layout, 1, base.digest), old, new, threads=threads)


def assert_comes_back(old, new, layout):
    value, blob = delta_of(old, new, layout)
    value = decode_delta(encode(value), layout, value.digest)
    target = old.copy()
    delta.apply(value, layout, blob, target)
    assert target.tobytes() == new.tobytes()
    return value, blob


def random_bits(dtype, num, seed):
    size = one_tensor(dtype, 1).tensors[0].item_bytes
    return np.random.default_rng(seed).integers(0, 256, num * size, np.uint8).view(f"u{size}")


PATTERNS = {
    "nothing": lambda old, rng: old,
    "everything by one": lambda old, rng: old + old.dtype.type(1),
    "everything, anyhow": lambda old, rng: rng.integers(0, 256, old.nbytes, np.uint8).view(old.dtype),
    "few by one": lambda old, rng: old + (rng.random(len(old)) < 0.02).astype(old.dtype),
    "few, anyhow": lambda old, rng: np.where(rng.random(len(old)) < 0.02, np.flip(old), old),
    "signs": lambda old, rng: old ^ (old.dtype.type(1) << old.dtype.type(8 * old.itemsize - 1)),
    "half by little": lambda old, rng: old + rng.integers(0, 3, len(old)).astype(old.dtype),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", PATTERNS)
@given(num=st.integers(0, 3000), seed=st.integers(0, 1 << 32))
@settings(max_examples=12)
def test_every_pattern_of_every_dtype_comes_back(dtype, pattern, num, seed):
    layout, old = one_tensor(dtype, num), random_bits(dtype, num, seed)
    new = PATTERNS[pattern](old, np.random.default_rng(seed))
    assert_comes_back(filled(layout, [old]), filled(layout, [new]), layout)


@given(st.data())
@settings(max_examples=60)
def test_several_tensors_with_any_single_changes_come_back(data):
    shapes = data.draw(st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 70)), max_size=6))
    layout = lay_out([Spec(f"w{index}", dtype, (num,)) for index, (dtype, num) in enumerate(shapes)])
    bits = [random_bits(dtype, num, index) for index, (dtype, num) in enumerate(shapes)]
    old, new = filled(layout, bits), filled(layout, bits)
    for tensor in layout.tensors:
        for offset in data.draw(st.lists(st.integers(0, tensor.num_bytes - 1), max_size=4)) if tensor.num_bytes else []:
            new[tensor.start + offset] ^= data.draw(st.integers(1, 255))
    assert_comes_back(old, new, layout)


SPECIAL_BF16 = [0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x7F80, 0xFF80, 0x7F81, 0xFFC1, 0x7FFF, 0xFFFF, 0x3F80]


@pytest.mark.parametrize("before", SPECIAL_BF16)
def test_nan_payloads_signed_zeros_and_denormals_keep_their_bits(before):
    num = 4096
    layout, old = one_tensor("bfloat16", num), np.full(num, before, np.uint16)
    new = old.copy()
    new[7 : 7 + 37 * len(SPECIAL_BF16) : 37] = SPECIAL_BF16
    value, _ = assert_comes_back(filled(layout, [old]), filled(layout, [new]), layout)
    assert [part.encoding for part in value.parts] == ["sparse"]


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 257, 509, 510, 511, 764, 765, 766, 4000])
def test_gaps_around_every_escape_come_back(gap):
    layout, old = one_tensor("bfloat16", 8192), random_bits("bfloat16", 8192, 1)
    for first in (0, gap):
        new = old.copy()
        new[[first, first + gap + 1]] += 1
        assert_comes_back(filled(layout, [old]), filled(layout, [new]), layout)


@pytest.mark.parametrize("step", [1, 126, 127, 128, 129, 253, 254, 255, 256, 32767, 32768, 65535])
def test_differences_around_every_escape_come_back(step):
    layout, old = one_tensor("bfloat16", 8192), random_bits("bfloat16", 8192, 2)
    new = old.copy()
    new[::300] += np.uint16(step)
    assert_comes_back(filled(layout, [old]), filled(layout, [new]), layout)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_tensor_of_several_parts_comes_back_also_at_their_edges(dtype):
    num = 2 * delta.PART_ELEMENTS + 3
    layout, old = one_tensor(dtype, num), random_bits(dtype, num, 3)
    new = old.copy()
    edges = [0, delta.PART_ELEMENTS - 1, delta.PART_ELEMENTS, 2 * delta.PART_ELEMENTS - 1, num - 3, num - 1]
    new[edges] += 1
    value, _ = assert_comes_back(filled(layout, [old]), filled(layout, [new]), layout)
    assert [(part.first, part.num_elements) for part in value.parts] == [
        (0, delta.PART_ELEMENTS),
        (delta.PART_ELEMENTS, delta.PART_ELEMENTS),
        (2 * delta.PART_ELEMENTS, 3),
    ]


def test_a_part_in_which_nothing_changed_is_not_written():
    layout = lay_out([Spec("a", "bfloat16", (500,)), Spec("b", "bfloat16", (500,))])
    old = filled(layout, [random_bits("bfloat16", 500, seed) for seed in (1, 2)])
    new = old.copy()
    new[layout.tensors[1].start] ^= 1
    value, _ = assert_comes_back(old, new, layout)
    assert [part.tensor for part in value.parts] == [1]
    same, blob = assert_comes_back(old, old, layout)
    assert (same.parts, blob) == ((), b"")


def test_each_part_is_written_in_its_smallest_way():
    num = 10_000
    rng = np.random.default_rng(5)
    old = [random_bits("bfloat16", num, seed) for seed in range(3)]
    new = [
        old[0] + (rng.random(num) < 0.01).astype(np.uint16),
        old[1] + rng.integers(0, 5, num).astype(np.uint16),
        random_bits("bfloat16", num, 9),
    ]
    layout = lay_out([Spec(name, "bfloat16", (num,)) for name in "abc"])
    value, _ = assert_comes_back(filled(layout, old), filled(layout, new), layout)
    assert [part.encoding for part in value.parts] == ["sparse", "planes", "raw"]


def test_the_delta_is_the_same_for_any_number_of_threads():
    layout = lay_out([Spec(f"w{index}", "bfloat16", (5000,)) for index in range(9)])
    bits = [random_bits("bfloat16", 5000, index) for index in range(9)]
    old, new = (
        filled(layout, bits),
        filled(layout, [PATTERNS["few by one"](one, np.random.default_rng(1)) for one in bits]),
    )
    one, three = delta_of(old, new, layout), delta_of(old, new, layout, threads=3)
    assert one == three
    target = old.copy()
    delta.apply(one[0], layout, one[1], target.data, threads=3)
    assert target.tobytes() == new.tobytes()


def test_at_one_percent_by_one_unit_a_delta_is_130_times_smaller_and_half_of_the_published_codec():
    num = 1 << 21
    rng = np.random.default_rng(8)
    weights = rng.normal(0, 0.02, num).astype(np.float32)
    old = (weights.view(np.uint32) >> 16).astype(np.uint16)
    new = old + rng.choice(np.array([0, 1, 65535], np.uint16), num, p=[0.99, 0.005, 0.005])
    layout = one_tensor("bfloat16", num)
    value, blob = assert_comes_back(filled(layout, [old]), filled(layout, [new]), layout)
    ours = len(blob) + len(encode(value))
    assert 2 * num / ours > 130
    where = np.flatnonzero(old != new)
    gaps = np.minimum(np.diff(where, prepend=-1) - 1, 65535).astype(np.uint16)
    published = sum(len(zstandard.compress(column.tobytes(), 1)) for column in (gaps, new[where]))
    assert published > 2 * ours


# A blob that is damaged is found by its digests; one that lies, with the right digests, by what is checked on the way.


def a_delta():
    num = 4000
    layout = lay_out([Spec("a", "bfloat16", (num,)), Spec("b", "float32", (300,)), Spec("c", "int8", (300,))])
    old = [random_bits(dtype, size, 1) for dtype, size in [("bfloat16", num), ("float32", 300), ("int8", 300)]]
    new = [old[0].copy(), old[1] + np.arange(300, dtype=np.uint32), np.flip(old[2])]
    new[0][::40] += 1
    new[0][7::1000] += 5000
    before, after = filled(layout, old), filled(layout, new)
    value, blob = delta_of(before, after, layout)
    assert {part.encoding for part in value.parts} == {"sparse", "planes", "raw"}
    return layout, before, value, blob


@given(st.integers(0, 1 << 30), st.integers(0, 7))
def test_a_flipped_bit_anywhere_in_a_blob_is_found_before_it_is_used(position, bit):
    _, _, value, blob = a_delta()
    broken = bytearray(blob)
    broken[position % len(blob)] ^= 1 << bit
    assert bad_chunks(broken, value.chunks) == [0]


def apply_guarded(value, layout, blob, before):
    """Apply in the middle of a larger buffer, and see that nothing around it changes."""
    guard = 4096
    arena = np.full(before.nbytes + 2 * guard, 0xA5, np.uint8)
    inside = arena[guard:-guard]
    inside[:] = before
    try:
        delta.apply(value, layout, blob, inside.data)
    except (BadDelta, BadManifest) as error:
        assert "\n" not in str(error)
    assert (arena[:guard] == 0xA5).all()
    assert (arena[-guard:] == 0xA5).all()


@given(st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(0, 255)), min_size=1, max_size=8))
@settings(max_examples=300)
def test_a_blob_that_lies_never_writes_outside_and_never_crashes(edits):
    layout, before, value, blob = a_delta()
    broken = bytearray(blob)
    for position, byte in edits:
        broken[position % len(blob)] = byte
    apply_guarded(value, layout, broken, before)


HOSTILE_HEADS = [(0, 0, 0), (1, 1, 0), (2**32 - 1,) * 3, (5, 2**31, 0), (4, 3, 3), (2**31, 5, 0), (3, 5, 0)]


@pytest.mark.parametrize("head", HOSTILE_HEADS)
@pytest.mark.parametrize("gaps", [b"", b"\xff" * 64, b"\xfe" * 64, b"\x00" * 64, b"\xff" * 5000])
@pytest.mark.parametrize("codes", [b"", b"\xff" * 64, b"\x01" * 3])
def test_made_up_gaps_and_codes_do_no_harm(head, gaps, codes):
    packed = [zstandard.compress(gaps, 1), zstandard.compress(codes, 1)]
    for heads in (head, (len(gaps), len(codes), codes.count(255))):
        blob = struct.pack("<IIIII", *heads, *map(len, packed)) + b"".join(packed) + bytes(2 * min(heads[2], 99))
        layout = one_tensor("bfloat16", 1000)
        value = DeltaManifest(
            "aa" * 32, "bb" * 32, layout.fingerprint, (DeltaPart(0, 3, 90, "sparse", len(blob)),), table_of(blob)
        )
        apply_guarded(value, layout, blob, np.zeros(layout.num_bytes, np.uint8))


def test_a_frame_that_claims_a_terabyte_is_refused_before_memory_is_taken():
    frame = zstandard.ZstdCompressor(level=1).compress(bytes(1000))
    huge = struct.pack("<IBQ", 0xFD2FB528, 0xE0, 1 << 40) + frame[-7:]
    assert zstandard.get_frame_parameters(huge).content_size == 1 << 40
    layout = one_tensor("bfloat16", 1000)
    blob = struct.pack("<IIIII", 5, 5, 0, len(huge), len(frame)) + huge + frame
    value = DeltaManifest(
        "aa" * 32, "bb" * 32, layout.fingerprint, (DeltaPart(0, 0, 1000, "sparse", len(blob)),), table_of(blob)
    )
    with pytest.raises(BadDelta, match="w from element 0, sparse: a frame of 1099511627776 bytes; expected 5"):
        delta.apply(value, layout, blob, bytearray(layout.num_bytes))


def test_a_blob_or_a_buffer_of_another_size_is_refused():
    layout, before, value, blob = a_delta()
    with pytest.raises(BadDelta, match="expected"):
        delta.apply(value, layout, blob[:-1], bytearray(before))
    with pytest.raises(ValueError, match="bytes of weights"):
        delta.apply(value, layout, blob, bytearray(before[:-1]))
