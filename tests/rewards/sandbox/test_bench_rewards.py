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
    assert result["math_times_plain"] > 0.1 and result["math_p99_ms"] >= result["math_p50_ms"] > 0
    assert result["num_waiting"] == 200 and result["waiting_shares"].keys() == {"queued", "under_way"}


@pytest.mark.usefixtures("bubblewrap")
def test_the_table_names_the_goals(capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "rewards", "--quick"]) == 0
    out = capsys.readouterr().out
    assert "goal: at least 3" in out and "goal: p99 below 100 ms" in out
    assert "goal: at least 0.8" in out and "200 waiting rewards" in out
