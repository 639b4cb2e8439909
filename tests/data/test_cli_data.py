"""`polyrl data model`: what it refuses, in a line."""

import time

import pytest

from polyrl.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["model", "geometry", "--out", "new"], "got 'geometry', expected arithmetic"),
        (["model", "smollm2", "--out", "new"], "examples/smollm2.py, in a checkout, makes that one"),
        (["model", "arithmetic", "--out", "new", "--seed", "-1"], "--seed: got -1"),
        (["model", "arithmetic", "--out", "full"], "expected a new or an empty directory"),
        (["model", "arithmetic", "--out", "full/file"], "expected a new or an empty directory"),
        (["model", "arithmetic", "--out", "full/file/new"], "full/file/new: cannot be written: Not a directory"),
        (["model", "arithmetic", "--out", "/proc/new"], "/proc/new: cannot be written: "),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    assert main(["data", *arguments]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "full" / "file").read_text() == "mine"


def test_a_place_that_cannot_be_written_is_said_before_the_work_is_done(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    began = time.process_time()
    assert main(["demo", "--out", str(tmp_path / "file" / "demo")]) == 2
    assert capsys.readouterr().err.endswith("demo/model: cannot be written: Not a directory\n")
    assert time.process_time() - began < 10, "teaching the model takes longer"
