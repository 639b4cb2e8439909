"""`polyrl weights inspect|verify|diff` on versions in directories: figures, exit codes, errors in one line."""

import json

import numpy as np
import pytest

from polyrl.cli.main import main
from polyrl.weights import folder as folders
from polyrl.weights.chunks import table_of
from polyrl.weights.manifest import Manifest, Spec, lay_out

LAYOUT = lay_out(
    [Spec("a.weight", "bfloat16", (100, 30)), *(Spec(f"n{index:02}", "float32", (4,)) for index in range(12))],
    tied={"head": "a.weight"},
)


def version(number=0, changed=0):
    view = bytearray(np.random.default_rng(1).integers(0, 256, LAYOUT.num_bytes, np.uint8).tobytes())
    for one, stop in zip(LAYOUT.tensors, [*(one.start for one in LAYOUT.tensors[1:]), LAYOUT.num_bytes], strict=True):
        view[one.end : stop] = bytes(stop - one.end)
    for index in range(changed):
        view[index * 100] ^= 1
    return Manifest(number, LAYOUT, table_of(view), ""), view


@pytest.fixture
def two(tmp_path):
    folders.write(tmp_path / "old", *version())
    folders.write(tmp_path / "new", *version(1, changed=20))
    return tmp_path / "old", tmp_path / "new"


def test_inspect_tells_what_a_version_is(two, capsys):
    assert main(["weights", "inspect", str(two[1])]) == 0
    out = capsys.readouterr().out
    assert version(1, changed=20)[0].digest in out
    assert "bfloat16       100x30           a.weight" in out
    assert "... and 3 more (--all)" in out
    assert main(["weights", "inspect", "--json", str(two[1])]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["version"], found["num_tensors"], len(found["tensors"])) == (1, 13, 13)
    assert found["tied"] == {"head": "a.weight"}


def test_inspect_reads_a_model_directory_without_a_manifest(two, capsys):
    (two[0] / "manifest.json").unlink()
    assert main(["weights", "inspect", str(two[0])]) == 0
    assert "without a manifest" in capsys.readouterr().out
    assert main(["weights", "verify", str(two[0])]) == 2


def test_verify_says_that_all_is_well(two, capsys):
    digest = version()[0].digest
    assert main(["weights", "verify", str(two[0]), "--digest", digest]) == 0
    assert digest in capsys.readouterr().out
    assert main(["weights", "verify", str(two[0]), "--json", "--threads", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["digest"] == digest


def test_verify_names_the_tensor_that_is_damaged(two, capsys):
    file = two[0] / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert main(["weights", "verify", str(two[0])]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "1 of 1 chunks are damaged" in error


def test_verify_refuses_another_version_than_the_one_that_was_meant(two, capsys):
    assert main(["weights", "verify", str(two[0]), "--digest", "ab" * 32]) == 2
    assert "expected abababab" in capsys.readouterr().err


def test_diff_says_what_changed_and_what_the_delta_costs(two, capsys):
    assert main(["weights", "diff", str(two[0]), str(two[1])]) == 1
    out = capsys.readouterr().out
    assert "1 of 13 tensors changed, 20 of 3,048 elements" in out
    assert main(["weights", "diff", str(two[0]), str(two[1]), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["changed"] == {"a.weight": 20}
    assert found["ratio"] > 10
    assert main(["weights", "diff", str(two[0]), str(two[0])]) == 0
    assert "the same" in capsys.readouterr().out


def test_diff_of_different_models_lists_their_differences(two, tmp_path, capsys):
    layout = lay_out([Spec("a.weight", "float16", (100, 30))])
    view = bytearray(layout.num_bytes)
    folders.write(tmp_path / "other", Manifest(0, layout, table_of(view), ""), view)
    assert main(["weights", "diff", str(two[0]), str(tmp_path / "other")]) == 1
    assert "a.weight: bfloat16 [100, 30] -> float16 [100, 30]" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["inspect"], ["diff", "x"], ["verify", "gone"], ["verify", "x", "--threads", "0"]]
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, capsys):
    assert main(["weights", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1
