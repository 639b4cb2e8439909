"""A trace holds every span and every lease of a run, in the format that Perfetto reads."""

import json
from pathlib import Path

import pytest
from tests.dashboard.test_following import follow
from tests.properties.hostile import play
from tests.telemetry.test_account import write_journal

from polyrl.cli.main import main
from polyrl.journal.files import FILE_NAME


def test_every_span_and_lease_is_an_event(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write_journal(tmp_path / FILE_NAME, play(3, num_events=200))
    assert main(["trace", str(tmp_path)]) == 0
    assert "open it at ui.perfetto.dev" in capsys.readouterr().out
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = follow(path).everything()
    assert sum(1 for one in events if one["ph"] == "X") == sum(len(row.spans) for row in rows)
    begun = [one for one in events if one["ph"] == "b"]
    assert len(begun) == sum(len(row.leases) for row in rows) > 10
    ended = {one["id"]: one["ts"] for one in events if one["ph"] == "e"}
    assert all(ended[one["id"]] >= one["ts"] for one in begun)
    assert sum(1 for one in events if one["ph"] == "i" and one["name"] == "lost") > 0
    names = [one["args"]["name"] for one in events if one["name"] == "process_name"]
    assert len(set(names)) == len(rows) and "trainer (trainer)" in names


def test_a_trace_goes_where_it_is_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write_journal(tmp_path / FILE_NAME, play(1, num_events=60))
    assert main(["trace", str(path), "--out", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["traceEvents"]
    assert main(["trace", str(path), "--out", str(tmp_path / "no" / "x.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert main(["trace", str(tmp_path / "nowhere")]) == 2
