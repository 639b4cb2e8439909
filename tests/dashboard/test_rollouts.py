"""What the model said, as files of steps hold it: lists, filters, one answer token by token."""

from pathlib import Path

import numpy as np
import pytest
from tests.properties.hostile import play
from tests.unit.test_cli_samples import episode, write

from polyrl.cli.main import main
from polyrl.dashboard.following import Follower
from polyrl.dashboard.rollouts import Rollouts, SampleFilter, pieces
from polyrl.errors import JournalError, UserError
from polyrl.journal.files import EVENTS, LIVE_FOLDER, PAYLOAD
from polyrl.journal.records import encode_header, encode_record
from polyrl.run.kept_samples import text_decoder
from polyrl.trainer.batch import TrainSample, TrainSegment
from polyrl.trainer.state import entries


def rollouts(run_dir: Path) -> Rollouts:
    return Rollouts(run_dir, text_decoder(run_dir), Follower(run_dir, live=False))


def test_a_step_is_listed_with_rewards_parts_and_writers(tmp_path: Path):
    write(tmp_path, 3)
    told = rollouts(tmp_path).listed(None, SampleFilter(), 0, 100)
    assert (told["step"], told["num"], told["num_all"], told["workers"]) == (3, 4, 4, ["spot-1"])
    first = told["samples"][0]
    assert (first["name"], first["reward"], first["parts"], first["state"]) == ("1/0", 0.25, {"style": 0.5}, "trained")
    assert first["answer_begin"] == "5 6 7"
    assert told["samples"][3]["state"] == "rejected"


def begun_run(run_dir: Path) -> Rollouts:
    """A run with the answers of step 0, and more rounds in its journal, whose payload cannot be read."""
    write(run_dir, 0)
    world, folder = play(6, num_events=200), run_dir / LIVE_FOLDER
    folder.mkdir()
    records = b"".join(encode_record(*one) for one in world.log)
    (folder / f"{EVENTS}-000001.bin").write_bytes(encode_header(world.config) + records)
    (folder / f"{PAYLOAD}-000001.bin").write_bytes(b"who reads this fails")
    follower = Follower(run_dir, live=False)
    follower.start()
    assert follower.wait(20.0)
    return Rollouts(run_dir, text_decoder(run_dir), follower)


def test_trained_answers_are_shown_without_a_look_at_the_managers_payload(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    shown = begun_run(tmp_path)
    assert shown.listed(None, SampleFilter(), 0, 100)["num"] == 4
    assert shown.one(0, "1/0")["reward"] == 0.25
    begun = shown.steps()[1:]
    assert begun and min(begun) > 0
    with pytest.raises(JournalError, match="not a run's payload"):
        shown.listed(begun[0], SampleFilter(), 0, 100)
    assert main(["samples", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("4 shown; step 0 is kept")


def test_a_step_without_answers_yet_is_left_out_of_those_of_its_prompt(tmp_path: Path):
    shown = begun_run(tmp_path)
    (tmp_path / LIVE_FOLDER / f"{PAYLOAD}-000001.bin").unlink()
    planned = next(one for group in range(1_000) if (one := shown._follower.prompt_of(group)) and one.step > 0)
    assert shown.prompt(planned.domain_number, planned.prompt) == []


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        (SampleFilter(order="best"), ["1/1", "1/0", "2/0", "2/1"]),
        (SampleFilter(order="worst"), ["2/0", "2/1", "1/0", "1/1"]),
        (SampleFilter(order="outcome"), ["2/0", "2/1", "1/0", "1/1"]),
        (SampleFilter(order="worker", low=0.1), ["1/0", "1/1"]),
        (SampleFilter(order="task", low=0.1), ["1/0", "1/1"]),
        (SampleFilter(fewest=3, most=3, low=0.5), ["1/1"]),
        (SampleFilter(fewest=4), []),
        (SampleFilter(most=2), []),
        (SampleFilter(low=0.5), ["1/1"]),
        (SampleFilter(high=0.3, low=0.1), ["1/0"]),
        (SampleFilter(outcome="rejected"), ["2/0", "2/1"]),
        (SampleFilter(worker="nobody"), []),
        (SampleFilter(text="6 7", outcome="trained"), ["1/0", "1/1"]),
        (SampleFilter(text="<script>"), []),
        (SampleFilter(task="sums"), []),
    ],
)
def test_lists_are_narrowed_and_ordered(tmp_path: Path, wanted: SampleFilter, names: list[str]):
    write(tmp_path, 0)
    assert [one["name"] for one in rollouts(tmp_path).listed(0, wanted, 0, 100)["samples"]] == names


def test_a_page_of_a_long_list(tmp_path: Path):
    write(tmp_path, 0)
    told = rollouts(tmp_path).listed(0, SampleFilter(), 1, 2)
    assert told["num"] == 4 and [one["name"] for one in told["samples"]] == ["1/1", "2/0"]


def test_every_token_of_an_answer_has_its_log_probability_and_its_writer(tmp_path: Path):
    sample = TrainSample(
        np.array([3], np.int32), np.array([5, 6, 7], np.int32), np.array([-0.5, -1.0, -2.0], np.float32), 1.0, 4,
        written_by=(TrainSegment(1, 1, "vllm", "a"), TrainSegment(2, 2, "vllm", "b")),
    )  # fmt: skip
    folder = tmp_path / entries.REDO_FOLDER
    folder.mkdir(parents=True)
    (folder / entries.name_of(0)).write_bytes(entries.encode(entries.make(0, 1, [[[sample]]], b"", [])))
    told = rollouts(tmp_path).one(0, "4/0")
    prompt, answer = told["sequences"][0]
    assert (prompt["drawn"], prompt["pieces"], prompt["logprobs"]) == (False, ["3"], [])
    assert answer["logprobs"] == [-0.5, -1.0, -2.0] and answer["writers"] == [0, 1, 1]
    assert "".join(answer["pieces"]) == "5 6 7"
    assert [one["worker"] for one in told["writers"]] == ["a", "b"]


def test_drawn_tokens_of_an_episode_have_theirs_and_given_ones_have_none(tmp_path: Path):
    folder = tmp_path / entries.REDO_FOLDER
    folder.mkdir(parents=True)
    made = entries.make(0, 1, [[[episode([3, 10, 11, 4, 12], [0, 1, 3])]]], b"", [])
    (folder / entries.name_of(0)).write_bytes(entries.encode(made))
    (spans,) = rollouts(tmp_path).one(0, "7/0")["sequences"]
    assert [(one["drawn"], len(one["pieces"]), len(one["logprobs"]), len(one["writers"])) for one in spans] == [
        (False, 1, 0, 0), (True, 2, 2, 2), (False, 1, 0, 0), (True, 1, 1, 1),
    ]  # fmt: skip


def test_what_is_not_there_is_a_line(tmp_path: Path):
    found = rollouts(tmp_path)
    assert found.listed(None, SampleFilter(), 0, 10)["step"] is None
    with pytest.raises(UserError, match="no answers are kept"):
        found.one(0, "1/0")
    write(tmp_path, 0)
    with pytest.raises(UserError, match="has no sample 9/9"):
        rollouts(tmp_path).one(0, "9/9")


def test_pieces_of_characters_that_take_several_tokens_make_the_whole_text():
    text = "aé€😀b"
    raw = list(text.encode())
    found = list(pieces(raw, lambda tokens: bytes(tokens).decode(errors="replace")))
    assert "".join(found) == text
    assert found[0] == "a" and found[1] == "" and found[2] == "é"
    broken = list(pieces([*raw, 0xE2, 0x82], lambda tokens: bytes(tokens).decode(errors="replace")))
    assert "".join(broken).startswith(text) and "\ufffd" in broken[-1]


def test_decoded_steps_are_kept_up_to_a_number_of_tokens(tmp_path: Path):
    for step in range(4):
        write(tmp_path, step)
    whole = rollouts(tmp_path)
    little = Rollouts(tmp_path, text_decoder(tmp_path), Follower(tmp_path, live=False), most_tokens=1)
    for step in range(4):
        assert little.listed(step, SampleFilter(), 0, 9) == whole.listed(step, SampleFilter(), 0, 9)
    assert list(little._steps) == [3] and list(whole._steps) == [0, 1, 2, 3]
