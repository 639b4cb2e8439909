"""`polyrl plot`: which pictures it draws of what there is, and how it ends."""

import sys
from pathlib import Path

import pytest
from tests.properties.hostile import play

from polyrl.cli.main import main
from polyrl.journal.files import FILE_NAME, JournalWriter
from polyrl.scheduling.core.parameters import DomainData, SchedulerConfig
from polyrl.telemetry.metrics import MetricsFile
from polyrl.telemetry.runs import short_names


def write_metrics(run_dir):
    run_dir.mkdir(parents=True, exist_ok=True)
    file = MetricsFile(run_dir / "metrics.jsonl")
    for step in range(4):
        file.log(step, {"reward/mean": step / 4, "time/step_total": 2.0, "cost/usd_total": step + 1.0})
    file.close()
    return run_dir


@pytest.fixture
def run_dir(tmp_path):
    """The directory of a run that has a journal."""
    world = play(4, num_events=150)
    (tmp_path / "out").mkdir()
    with JournalWriter(tmp_path / "out" / FILE_NAME, world.config) as writer:
        for entry in world.log:
            writer.append(*entry)
    return tmp_path / "out"


def plot(capsys, *argv):
    capsys.readouterr()
    code = main(["plot", *map(str, argv)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_without_metrics_only_what_the_journal_gives_is_drawn_and_one_line_says_so(run_dir, capsys):
    code, out, err = plot(capsys, run_dir)
    assert code == 0
    assert err == f"polyrl: {run_dir}: no metrics.jsonl: reward is not drawn, the rest is from the journal\n"
    assert out == f"drawn in {run_dir}/plots: longest.png, workers.png, steps.png, timeline.png\n"
    assert sorted(path.name for path in (run_dir / "plots").iterdir()) == [
        "longest.png",
        "steps.png",
        "timeline.png",
        "workers.png",
    ]


def test_a_run_that_is_not_there_is_one_line(tmp_path, capsys):
    assert plot(capsys, tmp_path / "none") == (2, "", f"polyrl: error: {tmp_path / 'none'}: there is no such file\n")


def test_with_metrics_reward_is_drawn_too_and_pictures_are_drawn_anew(run_dir, capsys):
    write_metrics(run_dir)
    (run_dir / "plots").mkdir()
    (run_dir / "plots" / "reward.png").write_bytes(b"old")
    code, out, err = plot(capsys, run_dir)
    assert (code, err) == (0, "")
    assert "reward.png, reward-cost.png, longest.png" in out
    assert (run_dir / "plots" / "reward.png").read_bytes() != b"old"


def test_runs_are_compared_in_a_folder_of_their_own(run_dir, tmp_path, capsys):
    other = write_metrics(tmp_path / "other")
    code, out, err = plot(capsys, run_dir, other, "--out", tmp_path / "compared")
    assert code == 0
    assert f"polyrl: {other}: no journal: no timeline is drawn, the rest is from the metrics\n" in err
    assert "out-timeline.png" in out
    assert (tmp_path / "compared" / "reward.png").exists()


def test_a_cut_journal_is_drawn_up_to_its_end(run_dir, tmp_path, capsys):
    cut = tmp_path / "cut.bin"
    cut.write_bytes((run_dir / FILE_NAME).read_bytes()[:-20])
    code, out, _ = plot(capsys, cut, "--out", tmp_path / "plots")
    assert code == 0
    assert "timeline.png" in out


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_what_is_no_run_is_one_line_and_exit_code_2(tmp_path, capsys, name):
    (tmp_path / "empty").mkdir()
    code, out, err = plot(capsys, tmp_path / name)
    assert (code, out) == (2, "")
    assert "polyrl: error: " in err
    assert not (tmp_path / "empty" / "plots").exists()


def test_a_run_in_which_nothing_happened_is_said(tmp_path, capsys):
    with JournalWriter(
        tmp_path / FILE_NAME,
        SchedulerConfig(domains=(DomainData(name="d", prompts_per_step=1, num_prompts=10),), max_new_tokens=8),
    ):
        pass
    code, _, err = plot(capsys, tmp_path)
    assert code == 2
    assert "there is nothing to draw yet" in err


def test_without_matplotlib_it_is_one_line(run_dir, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, _, err = plot(capsys, run_dir)
    assert code == 2
    assert "pip install 'polyrl[plot]'" in err


def test_runs_are_called_by_as_much_of_their_path_as_tells_them_apart():
    assert short_names([Path("/a/x"), Path("/a/y")]) == ["x", "y"]
    assert short_names([Path("/a/run"), Path("/b/run")]) == ["a/run", "b/run"]
    assert short_names([Path("/a/run"), Path("/a/run")]) == ["run#1", "run#2"]
    assert short_names([Path("/a/no\udcfftext")]) == [r"no\udcfftext"]
