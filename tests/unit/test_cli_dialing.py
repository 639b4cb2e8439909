"""Commands that dial a manager: where its address and a token come from."""

import pytest

from polyrl.cli.main import main
from polyrl.wire.credentials import TOKEN_VARIABLE


@pytest.mark.parametrize("command", [["status"], ["drain", "w1"]], ids=lambda command: command[0])
def test_without_a_token_the_directory_of_a_run_here_is_named_first(command, monkeypatch, capsys):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "polyrl: error: no token: give --run-dir, the directory of the run, or --token-file, or set "
    )


@pytest.mark.parametrize("command", ["status", "doctor"])
def test_a_manager_elsewhere_has_its_directory_elsewhere(command, monkeypatch, capsys):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert main([command, "--manager", "http://192.0.2.1:5000"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("polyrl: error: no token: give --token-file, or set ")


def test_a_notice_that_is_no_time_is_refused_before_anybody_is_asked(capsys):
    assert main(["drain", "w1", "--notice", "-5"]) == 2
    assert capsys.readouterr().err == "polyrl: error: --notice: -5; expected seconds from 0 to 86400\n"
