"""A manifest has one encoding and one digest, and one that cannot be true is refused in a line."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrl.weights import manifest as manifests
from polyrl.weights.chunks import table_of
from polyrl.weights.manifest import (
    BadManifest,
    DeltaManifest,
    DeltaPart,
    Layout,
    Manifest,
    Spec,
    changed_tensors,
    decode_delta,
    decode_manifest,
    encode,
    lay_out,
)

LAYOUT = lay_out(
    [Spec("b.weight", "bfloat16", (3, 5)), Spec("a.weight", "float32", (4,)), Spec("c.empty", "int8", (0, 7))],
    architecture="Tiny",
    tied={"head.weight": "b.weight"},
)


def manifest(**changes):
    values = {"version": 7, "layout": LAYOUT, "chunks": table_of(bytes(LAYOUT.num_bytes)), "parent": "ab" * 32}
    return Manifest(**{**values, **changes})


def delta(*parts, layout=LAYOUT):
    blob = bytes(sum(part.num_bytes for part in parts))
    return DeltaManifest("aa" * 32, "bb" * 32, layout.fingerprint, parts, table_of(blob))


def edited(value, *path_and_new):
    """The canonical bytes of a manifest with one place changed, and nothing else."""
    *path, new = path_and_new
    tree = json.loads(encode(value))
    place = tree
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = new
    return msgspec.json.encode(tree)


def test_tensors_are_laid_out_by_name_at_aligned_places():
    assert [(one.name, one.start, one.num_bytes) for one in LAYOUT.tensors] == [
        ("a.weight", 0, 16),
        ("b.weight", 64, 30),
        ("c.empty", 128, 0),
    ]
    assert LAYOUT.num_bytes == 128
    assert LAYOUT.by_name["head.weight"] is LAYOUT.by_name["b.weight"]


def test_a_manifest_comes_back_as_it_was():
    value = manifest()
    again = decode_manifest(encode(value), value.digest)
    assert again == value
    assert again.digest == value.digest
    assert encode(again) == encode(value)


def test_a_delta_comes_back_as_it_was():
    value = delta(DeltaPart(0, 0, 4, "raw", 16), DeltaPart(1, 3, 12, "sparse", 5))
    assert decode_delta(encode(value), LAYOUT, value.digest) == value
    assert changed_tensors([value], LAYOUT) == {"a.weight", "b.weight"}


@given(st.integers(0, 10**9), st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_found_by_the_digest(position, bit):
    value = manifest()
    data = bytearray(encode(value))
    data[position % len(data)] ^= 1 << bit
    with pytest.raises(BadManifest, match="digest"):
        decode_manifest(bytes(data), value.digest)


@pytest.mark.parametrize(
    "change", [lambda d: d + b" ", lambda d: d.replace(b'"parent":', b'"parent": '), lambda d: b" " + d]
)
def test_other_bytes_for_the_same_value_are_refused(change):
    with pytest.raises(BadManifest, match="canonical"):
        decode_manifest(change(encode(manifest())))


def test_fields_in_another_order_or_twice_are_refused():
    tree = json.loads(encode(manifest()))
    backwards = dict(reversed(tree.items()))
    with pytest.raises(BadManifest, match="canonical"):
        decode_manifest(msgspec.json.encode(backwards))
    with pytest.raises(BadManifest, match="canonical"):
        decode_manifest(encode(manifest()).replace(b'{"version":7', b'{"version":7,"version":7'))


@pytest.mark.parametrize(
    ("path", "new"),
    [
        (("version",), -1),
        (("version",), 1 << 60),
        (("version",), True),
        (("format",), 2),
        (("unknown",), 1),
        (("parent",), "AB" * 32),
        (("parent",), "ab"),
        (("lossy",), "fp8"),
        (("layout", "num_bytes"), 129),
        (("layout", "num_bytes"), 1 << 60),
        (("layout", "tied"), {"a.weight": "b.weight"}),
        (("layout", "tied"), {"x": "y"}),
        (("layout", "tensors", 0, "name"), "b.weight"),
        (("layout", "tensors", 0, "name"), "z"),
        (("layout", "tensors", 0, "name"), ""),
        (("layout", "tensors", 0, "dtype"), "float31"),
        (("layout", "tensors", 0, "shape"), [5]),
        (("layout", "tensors", 0, "shape"), [-4]),
        (("layout", "tensors", 0, "shape"), [1 << 60]),
        (("layout", "tensors", 0, "shape"), [1] * 9),
        (("layout", "tensors", 0, "num_bytes"), 17),
        (("layout", "tensors", 1, "start"), 0),
        (("layout", "tensors", 1, "start"), 1 << 63),
        (("layout", "tensors", 1, "start"), 128),
        (("chunks", "num_bytes"), 64),
        (("chunks", "chunk_bytes"), 0),
        (("chunks", "chunk_bytes"), 1),
        (("chunks", "hash"), "crc32"),
        (("chunks", "digests"), ""),
        (("chunks", "digests"), "not base64!"),
    ],
)
def test_a_manifest_that_cannot_be_true_is_refused_in_one_line(path, new):
    with pytest.raises(BadManifest) as caught:
        decode_manifest(edited(manifest(), *path, new))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"version":1e400}'])
def test_what_is_no_manifest_is_refused(data):
    with pytest.raises(BadManifest):
        decode_manifest(data)
    with pytest.raises(BadManifest):
        decode_delta(data, LAYOUT)


def test_a_huge_manifest_is_refused_before_it_is_read():
    with pytest.raises(BadManifest, match="at most"):
        decode_manifest(memoryview(bytearray(manifests.MAX_MANIFEST_BYTES + 1)))


@pytest.mark.parametrize(
    "parts",
    [
        [DeltaPart(3, 0, 1, "raw", 4)],
        [DeltaPart(0, 0, 5, "raw", 20)],
        [DeltaPart(0, 4, 1, "raw", 4)],
        [DeltaPart(0, 1 << 40, 1, "raw", 4)],
        [DeltaPart(2, 0, 1, "raw", 1)],
        [DeltaPart(0, 0, 3, "raw", 12), DeltaPart(0, 2, 2, "raw", 8)],
        [DeltaPart(1, 0, 1, "raw", 2), DeltaPart(0, 0, 1, "raw", 4)],
    ],
)
def test_parts_that_overlap_or_leave_their_tensor_are_refused(parts):
    with pytest.raises(BadManifest):
        decode_delta(encode(delta(*parts)), LAYOUT)


@pytest.mark.parametrize(
    ("path", "new"),
    [
        (("parts", 0, 2), 0),
        (("parts", 0, 2), 1 << 60),
        (("parts", 0, 4), 0),
        (("parts", 0, 4), 15),
        (("parts", 0, 3), "gzip"),
        (("parts", 0, 0), -1),
        (("parts", 0), [0, 0, 4, "raw", 16, 1]),
        (("fingerprint",), "cc" * 32),
        (("base",), ""),
    ],
)
def test_a_delta_that_cannot_be_true_is_refused(path, new):
    with pytest.raises(BadManifest):
        decode_delta(edited(delta(DeltaPart(0, 0, 4, "raw", 16)), *path, new), LAYOUT)


def test_a_fingerprint_is_of_names_dtypes_shapes_ties_and_architecture():
    specs = [Spec("a", "bfloat16", (2, 3)), Spec("b", "bfloat16", (6,))]
    layouts = [
        lay_out(specs),
        lay_out(specs, architecture="Other"),
        lay_out(specs, tied={"c": "a"}),
        lay_out([Spec("a", "float16", (2, 3)), specs[1]]),
        lay_out([Spec("a", "bfloat16", (3, 2)), specs[1]]),
        lay_out([Spec("x", "bfloat16", (2, 3)), specs[1]]),
    ]
    assert len({one.fingerprint for one in layouts}) == len(layouts)
    assert lay_out(specs[::-1]).fingerprint == layouts[0].fingerprint


def test_a_name_twice_cannot_be_laid_out():
    with pytest.raises(BadManifest):
        lay_out([Spec("a", "int8", (1,)), Spec("a", "int8", (2,))])


def test_an_empty_layout_is_one():
    empty = lay_out([])
    assert empty == Layout("", (), {}, 0)
    value = Manifest(0, empty, table_of(b""), "")
    assert decode_manifest(encode(value)) == value


def any_json():
    numbers = st.one_of(st.integers(-3, 300), st.sampled_from([1 << 31, 1 << 44, 1 << 60, 1 << 63, -(1 << 63)]))
    leaves = st.one_of(st.none(), st.booleans(), numbers, st.floats(allow_nan=False), st.text(max_size=5))
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    )


def places(tree, path=()):
    """Every place in a tree."""
    yield path
    children = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, child in children:
        yield from places(child, (*path, key))


@given(st.data())
def test_whatever_stands_at_any_place_a_manifest_is_refused_or_holds_together(data):
    value, is_delta = data.draw(st.sampled_from([(manifest(), False), (delta(DeltaPart(0, 0, 4, "raw", 16)), True)]))
    path = data.draw(st.sampled_from([path for path in places(json.loads(encode(value))) if path]))
    changed = edited(value, *path, data.draw(any_json()))
    try:
        found = decode_delta(changed, LAYOUT) if is_delta else decode_manifest(changed)
    except BadManifest as error:
        assert "\n" not in str(error)
        return
    assert encode(found) == changed
    if isinstance(found, Manifest):
        ends = [0, *(one.end for one in found.layout.tensors)]
        assert all(one.start >= end for one, end in zip(found.layout.tensors, ends, strict=False))
        assert ends[-1] <= found.layout.num_bytes == found.chunks.num_bytes
