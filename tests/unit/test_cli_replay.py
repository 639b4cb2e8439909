"""`polyrl replay` and `polyrl story`: what they print, and how they end."""

import json

import pytest
from tests.properties.hostile import play

from polyrl.cli.main import main
from polyrl.journal.files import FILE_NAME, JournalWriter
from polyrl.scheduling.core.events import TimePassed


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    world = play(4, num_events=60)
    with JournalWriter(directory / FILE_NAME, world.config, {"scenario": "hostile"}) as writer:
        for entry in world.log:
            writer.append(*entry)
    return directory


def test_a_journal_is_replayed_and_its_digest_printed(run_dir, capsys):
    assert main(["replay", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{run_dir}: ")
    assert out.endswith("same commands\n")


def test_replay_as_json_is_one_object(run_dir, capsys):
    assert main(["replay", str(run_dir / FILE_NAME), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["same"] is True
    assert report["difference"] is None
    assert report["about"] == {"scenario": "hostile"}
    assert report["records"] > 60
    assert len(report["digest"]) == 32


def journal_with_a_difference(directory):
    world = play(4, num_events=60)
    with JournalWriter(directory / FILE_NAME, world.config) as writer:
        now, event, commands = next(entry for entry in world.log if entry[2])
        for entry in world.log[: world.log.index((now, event, commands))]:
            writer.append(*entry)
        writer.append(now, event, commands[:-1])
        writer.append(now, TimePassed(), [])


def test_a_difference_is_one_line_and_exit_code_1(tmp_path, capsys):
    journal_with_a_difference(tmp_path)
    assert main(["replay", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"polyrl: difference: {tmp_path}: record ")
    assert printed.err.count("\n") == 1


def test_a_difference_as_json_names_the_event_and_both_digests(tmp_path, capsys):
    journal_with_a_difference(tmp_path)
    assert main(["replay", str(tmp_path), "--json"]) == 1
    difference = json.loads(capsys.readouterr().out)["difference"]
    assert difference["expected"] != difference["got"]
    assert difference["event"]["event"]
    assert difference["commands"]


@pytest.mark.parametrize("command", [["replay"], ["story"]])
def test_a_damaged_or_missing_journal_is_one_line_and_exit_code_2(command, run_dir, tmp_path, capsys):
    whole = (run_dir / FILE_NAME).read_bytes()
    damaged, cut, other = tmp_path / "damaged.bin", tmp_path / "cut.bin", tmp_path / "other.bin"
    damaged.write_bytes(whole[:3000] + bytes([whole[3000] ^ 1]) + whole[3001:])
    cut.write_bytes(whole[:-1])
    other.write_bytes(b"[run]\nsteps = 3\n")
    rest = ["99999/0"] if command == ["story"] else []
    for path, why in (
        (damaged, "checksum"),
        (cut, "cut short"),
        (other, "not a journal"),
        (tmp_path, "there is no run; expected journal.bin of a simulation, or"),
    ):
        assert main([*command, str(path), *rest]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith(f"polyrl: error: {path}")
        assert why in printed.err
        assert printed.err.count("\n") == 1


def test_a_story_is_told(run_dir, capsys):
    assert main(["story", str(run_dir), "1/0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("sample 1/0: prompt ")
    assert any(" s until " in line for line in lines)


def test_a_sample_that_is_none_is_exit_code_2(run_dir, capsys):
    assert main(["story", str(run_dir), "99999/0"]) == 2
    assert (
        f"polyrl: error: {run_dir}: there is no sample 99999/0: this journal has groups 1 to "
        in capsys.readouterr().err
    )
    assert main(["story", str(run_dir), "twelve"]) == 2
    assert "SAMPLE: a sample is written GROUP/INDEX" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["replay", "story", "bench"])
def test_help_has_an_example(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert f"  polyrl {command} " in capsys.readouterr().out
