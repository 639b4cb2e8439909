"""`polyrl samples` without a run: what a model may write, what a person may ask, what is kept on the disk."""

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.trainer.episodes import Played, group_of

from polyrl.cli.main import main
from polyrl.cli.samples import visible
from polyrl.run.kept_samples import Kept, NoLongerKept
from polyrl.trainer.batch import TrainSample, TrainSegment
from polyrl.trainer.state import entries

HOSTILE = {
    "an escape sequence": "\x1b[2J\x1b]0;title\x07",
    "a carriage return": "good\rbad",
    "a mark of direction": "abc\u202edcba\u2066x\u2069",
    "a C1 control": "a\x9b31mb",
    "a null": "\0",
    "a line separator": "a\u2028b",
    "half a character": "\ud800",
    "a zero-width joiner": "a\u200db",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_what_a_terminal_would_act_on_is_written_out(text: str):
    shown = visible(f"before\n{text}\nafter")
    assert shown.startswith("before\n") and shown.endswith("\nafter")
    assert all(line.isprintable() for line in shown.split("\n"))


def sample(reward: float, group: int = 1, **more: object) -> TrainSample:
    return TrainSample(
        np.array([3, 4], np.int32), np.array([5, 6, 7], np.int32), np.zeros(3, np.float32), reward, group,
        written_by=(TrainSegment(0, 3, "builtin", "spot-1"),), **more,  # type: ignore[arg-type]
    )  # fmt: skip


def write(run_dir: Path, step: int) -> Path:
    folder = run_dir / entries.REDO_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    groups, rejected = [[sample(0.25, parts={"style": 0.5}), sample(1.0)]], [[sample(0.0, 2), sample(0.0, 2)]]
    path = folder / entries.name_of(step)
    path.write_bytes(entries.encode(entries.make(step, 10, [groups], b"", rejected)))
    return path


@pytest.mark.parametrize(
    "lie",
    [
        {"written_by": (TrainSegment(0, 1 << 31),)},
        {"written_by": (TrainSegment(0, -3), TrainSegment(0, 6))},
        {"written_by": 7},
        {"reward": math.nan},
        {"reward": "\x1b[2J"},
        {"parts": {"style": math.inf}},
        {"parts": [1.0]},
        {"prompt": "text"},
        {"prompt": np.array([-5], np.int32)},
        {"logprobs": np.zeros(3, np.float64)},
        {"drawn": np.array([0, 1, 1 << 30], np.int32)},
        {"episode": [1]},
        {"finish": 5},
    ],
    ids=str,
)
def test_a_file_that_no_run_writes_is_one_line_although_its_digest_is_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lie: dict[str, Any]
):
    path = write(tmp_path, 3)
    path.write_bytes(entries.encode(entries.make(3, 10, [[[sample(1.0)._replace(**lie)]]], b"", [])))
    assert main(["samples", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"polyrl: error: {path}: is no entry of this PolyRL: ") and said.count("\n") == 1


def test_a_run_without_a_recipe_shows_tokens_with_rewards_parts_and_writers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write(tmp_path, 3)
    assert main(["samples", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "step 3  1/0  reward 0.25 (style 0.5)" in shown and "version 0 on spot-1" in shown
    assert "5 6 7" in shown and "rejected: its group teaches nothing" in shown
    assert main(["samples", str(tmp_path), "--grep", "5 6", "--best", "--limit", "1", "--json"]) == 0
    assert '"reward": 1.0' in capsys.readouterr().out


def episode(tokens: list[int], drawn: list[int], **more: object) -> TrainSample:
    """An episode's sequence: its prompt is the first token."""
    return TrainSample(
        np.array(tokens[:1], np.int32), np.array(tokens[1:], np.int32), np.zeros(len(drawn), np.float32), 0.5, 7,
        written_by=(TrainSegment(2, len(drawn), "builtin", "spot-1"),), drawn=np.array(drawn, np.int32),
        parts={"turns": 2.0}, **more,  # type: ignore[arg-type]
    )  # fmt: skip


def test_an_episode_is_shown_turn_by_turn_with_what_was_drawn_and_what_was_given(tmp_path: Path, capsys):
    one = episode([3, 10, 11, 4, 12], [0, 1, 3])
    forked = [
        episode([3, 10, 4, 12], [0, 2], episode=1, order=np.array([0, 1], np.int32)),
        episode([3, 10, 5, 13], [2], episode=1, order=np.array([2], np.int32)),
    ]
    folder = tmp_path / entries.REDO_FOLDER
    folder.mkdir(parents=True)
    made = entries.make(0, 1, [[[one, *forked]]], b"", [])
    (folder / entries.name_of(0)).write_bytes(entries.encode(made))
    assert main(["samples", str(tmp_path)]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    at = lines.index("step 0  7/0  reward 0.5 (turns 2)")
    assert lines[at + 1] == "3 tokens, stop; version 2 on spot-1"
    rows = [" ".join(line.split()) for line in lines[at + 2 : at + 6]]
    assert rows == ["given 3", "drawn 10 11", "given 4", "drawn 12"]
    assert "step 0  7/1  reward 0.5 (turns 2)" in lines and "2 shown; step 0 is kept" in lines[-1]
    second = [" ".join(line.split()) for line in lines[lines.index("training sequence 2 of 2") + 1 :]]
    assert second[:2] == ["given 3 10 5", "drawn 13"]
    assert main(["samples", str(tmp_path), "--json", "--grep", "13"]) == 0
    (told,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert told["num_tokens"] == 3
    assert told["sequences"][1] == [{"drawn": False, "text": "3 10 5"}, {"drawn": True, "text": "13"}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: there is no such directory; expected that of a run"),
        (["."], ".: no samples there; expected the directory of a run that has answered something"),
        ([".", "--limit", "0"], "--limit: got 0, expected at least 1"),
    ],
)
def test_what_cannot_be_shown_is_one_line(
    tmp_path: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    assert main(["samples", *arguments]) == 2
    assert capsys.readouterr().err == f"polyrl: error: {message}\n"


def test_a_file_that_is_damaged_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write(tmp_path, 0)
    path.write_bytes(path.read_bytes()[:-3])
    assert main(["samples", str(tmp_path)]) == 2
    assert f"{path}: is damaged, or cut short" in capsys.readouterr().err


def test_sequences_of_an_episode_are_shown_under_its_name(tmp_path: Path):
    played = Played([([3], [5, 6]), ([3, 5, 6, 7], [8]), ([4], [9])], 0.5)
    group = group_of([Played([([3], [5])]), played], 7)
    path = write(tmp_path, 3)
    path.write_bytes(entries.encode(entries.make(3, 10, [[group]], b"", [])))
    found = [(one.name, one.prompt, one.answer, one.reward) for one in Kept(tmp_path).of_step(3)]
    assert found == [("7/0", [3], [5], 0.0), ("7/1", [3], [5, 6, 7, 8], 0.5)]
    (_, episode) = Kept(tmp_path).of_step(3)
    assert [[list(span.tokens) for span in one] for one in episode.sequences] == [[[3], [5, 6], [7], [8]], [[4], [9]]]


def test_steps_that_nobody_trains_again_are_kept_up_to_a_size_the_newest_longest(tmp_path: Path):
    paths = [write(tmp_path, step) for step in range(5)]
    size = paths[0].stat().st_size
    entries.retire(tmp_path, paths[:4], 2 * size)
    assert list(entries.of_run(tmp_path)) == [2, 3, 4]
    entries.retire(tmp_path, paths[4:], 0)
    assert list(entries.of_run(tmp_path)) == []


def test_an_entry_of_before_there_were_parts_and_writers_is_read(tmp_path: Path):
    """Fields are told by their place, and those at the end may be missing."""
    import msgspec

    from polyrl.trainer.batch import decode_groups, encode_groups

    (group,) = msgspec.msgpack.decode(encode_groups([[sample(1.0)]]), ext_hook=msgspec.msgpack.Ext)
    old = [[[*one[:6], [turn[:3] for turn in one[6]], one[7]] for one in group]]
    ((found,),) = decode_groups(msgspec.msgpack.encode(old))
    assert found.parts == {} and found.written_by == (TrainSegment(0, 3, "builtin"),)


def test_a_step_whose_file_moves_after_it_was_listed_is_shown_and_one_that_goes_is_a_line(tmp_path: Path):
    for step in (3, 4):
        write(tmp_path, step)
    kept = Kept(tmp_path)
    redo = tmp_path / entries.REDO_FOLDER
    entries.retire(tmp_path, [redo / entries.name_of(3)], 1 << 20)
    (redo / entries.name_of(4)).unlink()
    assert [one.reward for one in kept.of_step(3)] == [0.25, 1.0, 0.0, 0.0]
    with pytest.raises(NoLongerKept, match="4 is no longer kept"):
        kept.of_step(4)


def test_samples_may_lie_on_another_disk_than_the_run(tmp_path: Path):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        if os.stat(elsewhere).st_dev == tmp_path.stat().st_dev:
            pytest.skip("there is one disk alone here")
        (tmp_path / entries.SAMPLES_FOLDER).symlink_to(elsewhere)
        path = write(tmp_path, 3)
        entries.retire(tmp_path, [path], 1 << 20)
        assert not path.exists()
        assert [one.name for one in Path(elsewhere).iterdir()] == [entries.name_of(3)]
        assert len(Kept(tmp_path).of_step(3)) == 4
