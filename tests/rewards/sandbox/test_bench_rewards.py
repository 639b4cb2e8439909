"""`polyrl bench rewards`: it runs, and says what was asked for."""

import json

import pytest

from polyrl.cli.main import main


@pytest.mark.usefixtures("bubblewrap")
def test_the_json_has_the_promised_keys(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "rewards", "--quick", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    for key in ("programs_per_s", "plain_programs_per_s", "fresh_programs_per_s", "times_fresh", "p99_ms", "alone_ms"):
        assert result[key] > 0
    assert result["zygotes_replaced"] == 0 and "commit" in result


@pytest.mark.usefixtures("bubblewrap")
def test_the_table_names_the_goals(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "rewards", "--quick"]) == 0
    out = capsys.readouterr().out
    assert "goal: at least 3" in out and "goal: p99 below 100 ms" in out
