"""The first command that anybody types: what is wrong is said at once, and Ctrl+C ends it wherever it is."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from polyrl.cli.main import main


def test_a_number_of_steps_that_cannot_be_is_one_line_before_a_model_is_made(tmp_path: Path, capsys):
    assert main(["demo", "--steps", "0", "--out", str(tmp_path / "demo")]) == 2
    said = capsys.readouterr()
    line = "polyrl: error: train.steps: got 0, expected an integer >= 1 and <= 1e+09 (given as train.steps=0)\n"
    assert (said.out, said.err) == ("", line)
    assert not (tmp_path / "demo").exists()


def test_a_demo_that_there_is_not_is_one_line(capsys):
    assert main(["demo", "agnet"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("polyrl: error: sums|agent: got 'agnet', expected one of sums, agent") and "agent" in said


@pytest.mark.parametrize("left", ["run", "model"])
def test_what_another_demo_has_left_is_one_line(tmp_path: Path, capsys, left: str):
    (tmp_path / left).mkdir()
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "there is a demo already" in capsys.readouterr().err


def test_ctrl_c_while_the_model_is_made_ends_it_and_leaves_nothing(tmp_path: Path):
    command = [sys.executable, "-m", "polyrl", "demo", "--out", str(tmp_path / "demo")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("1. ")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "polyrl: interrupted\n")
    assert not (tmp_path / "demo").exists()
