"""examples/smollm2.py: what it refuses, in a line. `make test-engines` makes the model for real."""

import pytest
from examples.smollm2 import main


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["new", "--wheel", "absent.whl"], "absent.whl: No such file"),
        (["new", "--wheel", "full/file"], "its SHA-256 is"),
        (["full"], "expected a new or an empty directory"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
    assert not (tmp_path / "new").exists()
