"""A version written as a directory comes back as it was, other tools can read it, and damage is found."""

import json
import os
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from polyrl.weights import folder as folders
from polyrl.weights.chunks import table_of
from polyrl.weights.folder import BadFolder
from polyrl.weights.manifest import DTYPE_BYTES, Manifest, Spec, lay_out

LAYOUT = lay_out(
    [
        *(Spec(f"layers.{index}.weight", "bfloat16", (7, 5)) for index in range(4)),
        *(Spec(f"kinds.{dtype}", dtype, (3,)) for dtype in DTYPE_BYTES),
        Spec("empty", "float32", (0, 4)),
        Spec("number", "float32", ()),
    ],
    tied={"head.weight": "layers.0.weight"},
)


def a_version(layout=LAYOUT):
    view = bytearray(layout.num_bytes)
    rng = np.random.default_rng(1)
    for one in layout.tensors:
        view[one.start : one.end] = rng.integers(0, 2, one.num_bytes, np.uint8).tobytes()
    return Manifest(3, layout, table_of(view, 256), "ab" * 32), view


@pytest.mark.parametrize("shard_bytes", [1, 100, 1 << 30])
def test_a_version_comes_back_as_it_was(tmp_path, shard_bytes):
    manifest, view = a_version()
    folders.write(tmp_path / "v3", manifest, view, shard_bytes=shard_bytes, beside={"config.json": b"{}"})
    assert folders.read(tmp_path / "v3") == (manifest, view)
    assert (tmp_path / "v3" / "config.json").read_bytes() == b"{}"
    assert [path.name for path in tmp_path.iterdir()] == ["v3"]


def test_the_files_are_those_of_the_library(tmp_path):
    manifest, view = a_version()
    folders.write(tmp_path / "ours", manifest, view)
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert set(ours) == {one.name for one in LAYOUT.tensors}
    for one in LAYOUT.tensors:
        assert ours[one.name].dtype == getattr(torch, one.dtype)
        assert tuple(ours[one.name].shape) == one.shape
        assert ours[one.name].reshape(-1).view(torch.uint8).numpy().tobytes() == view[one.start : one.end]
    (tmp_path / "theirs").mkdir()
    save_file(ours, tmp_path / "theirs" / "model.safetensors")
    plain, again = folders.read(tmp_path / "theirs")
    assert again == view
    assert plain.version == 0
    assert plain.layout.tensors == LAYOUT.tensors


def test_a_plain_model_directory_says_its_architecture(tmp_path):
    manifest, view = a_version()
    folders.write(tmp_path / "v", manifest, view, beside={"config.json": b'{"architectures": ["TinyForCausalLM"]}'})
    (tmp_path / "v" / "manifest.json").unlink()
    assert folders.read_manifest(tmp_path / "v") is None
    assert folders.layout_in(tmp_path / "v").architecture == "TinyForCausalLM"
    with pytest.raises(BadFolder, match=r"no manifest.json there; expected that of ababab"):
        folders.read(tmp_path / "v", "ab" * 32)


def test_a_file_that_is_cut_short_is_said_to_be(tmp_path):
    manifest, view = a_version()
    folders.write(tmp_path / "v", manifest, view)
    [file] = (tmp_path / "v").glob("*.safetensors")
    os.truncate(file, file.stat().st_size - 3)
    with pytest.raises(BadFolder, match=r"safetensors: ends 3 bytes before \S+ does; expected a whole file"):
        folders.layout_in(tmp_path / "v")


def test_a_directory_that_is_there_is_not_written_over(tmp_path):
    manifest, view = a_version()
    (tmp_path / "v").mkdir()
    with pytest.raises(BadFolder, match="is there already"):
        folders.write(tmp_path / "v", manifest, view)
    assert list((tmp_path / "v").iterdir()) == []


def test_a_write_that_fails_leaves_nothing(tmp_path):
    manifest, view = a_version()
    with pytest.raises(BadFolder, match="cannot be written"):
        folders.write(tmp_path / "v", manifest, view, beside={"no/such/place": b""})
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    manifest, view = a_version()
    folder = tmp_path_factory.mktemp("versions") / "v"
    folders.write(folder, manifest, view, shard_bytes=200)
    return folder, manifest, view


@given(st.data())
@settings(max_examples=150)
def test_a_flipped_bit_in_any_file_is_found_or_changes_nothing(written, data):
    folder, manifest, view = written
    path = data.draw(st.sampled_from(sorted(folder.iterdir())))
    whole = path.read_bytes()
    position = data.draw(st.integers(0, len(whole) - 1))
    broken = bytearray(whole)
    broken[position] ^= 1 << data.draw(st.integers(0, 7))
    try:
        path.write_bytes(broken)
        try:
            assert folders.read(folder, manifest.digest) == (manifest, view)
        except BadFolder as error:
            assert "\n" not in str(error)
    finally:
        path.write_bytes(whole)


@given(st.data())
@settings(max_examples=50)
def test_a_file_that_was_cut_is_found(written, data):
    folder, _, _ = written
    path = data.draw(st.sampled_from(sorted(folder.iterdir())))
    whole = path.read_bytes()
    try:
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
        with pytest.raises(BadFolder):
            folders.read(folder)
    finally:
        path.write_bytes(whole)


def head_of(**entries):
    head = json.dumps(entries).encode()
    return struct.pack("<Q", len(head)) + head


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        b"\xff" * 100,
        head_of(a=1),
        head_of(a={"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}),
        head_of(a={"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}) + bytes(4),
        head_of(a={"dtype": "F32", "shape": [1 << 60], "data_offsets": [0, 1 << 62]}) + bytes(4),
        head_of(a={"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}) + bytes(4),
        head_of(a={"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}) + bytes(8),
        head_of(
            a={"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
            b={"dtype": "F32", "shape": [1], "data_offsets": [2, 6]},
        )
        + bytes(8),
    ],
)
def test_a_header_that_cannot_be_true_is_refused(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(BadFolder) as caught:
        folders.read(tmp_path)
    assert str(caught.value).startswith(str(tmp_path))


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "x.bin"])
def test_an_index_cannot_lead_out_of_the_directory(tmp_path, name):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(BadFolder, match="plain name"):
        folders.read(tmp_path)


def test_an_empty_or_missing_directory_is_said_so(tmp_path):
    with pytest.raises(BadFolder, match=r"no \*.safetensors"):
        folders.read(tmp_path)
    with pytest.raises(BadFolder, match="no such directory"):
        folders.read(tmp_path / "gone")
