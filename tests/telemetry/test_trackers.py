"""Trackers: what was logged is in their files under its own name, and one that fails stops nothing."""

import base64
import json
import logging
import struct
import sys

import pytest
import wandb
from tensorboardX.proto import event_pb2
from wandb.proto import wandb_internal_pb2

from polyrl.errors import UserError
from polyrl.telemetry.metrics import read_metrics
from polyrl.telemetry.sample_tables import SampleRow, shorten_text, spread
from polyrl.telemetry.trackers import TensorBoardTracker, Trackers, WandbTracker, open_trackers

METRICS = {"reward/mean": 0.5, "validation/pass@1": 0.25, "rounds/kind": "short", "actor/kl_loss": None}


class Broken:
    """Fails at everything, from its `fails_at`-th call on."""

    name = where = "broken"

    def __init__(self, fails_at=1):
        self.num_calls = 0
        self.fails_at = fails_at

    def log(self, step, metrics):
        self.num_calls += 1
        if self.num_calls >= self.fails_at:
            raise ZeroDivisionError("by\ndesign")

    def close(self):
        raise OSError("by design")


class Kept:
    name = where = "kept"

    def __init__(self):
        self.steps = []
        self.closed = False

    def log(self, step, metrics):
        self.steps.append((step, dict(metrics)))

    def close(self):
        self.closed = True


def test_a_tracker_that_fails_is_warned_of_once_and_the_others_go_on(caplog):
    broken, kept = Broken(fails_at=2), Kept()
    trackers = Trackers([broken, kept])
    with caplog.at_level(logging.WARNING):
        for step in range(4):
            trackers.log(step, METRICS)
        trackers.close()
    assert [step for step, _ in kept.steps] == [0, 1, 2, 3]
    assert kept.closed
    assert broken.num_calls == 4
    assert [record.getMessage() for record in caplog.records] == [
        "broken failed to log, the run goes on: ZeroDivisionError: by design"
    ]


def test_names_and_values_reach_a_tracker_unchanged():
    kept = Kept()
    Trackers([kept]).log(3, METRICS)
    assert kept.steps == [(3, METRICS)]


def test_the_file_is_always_on_and_nothing_else_is_unless_asked_for(tmp_path):
    trackers = open_trackers(tmp_path)
    trackers.log(0, METRICS)
    trackers.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 0, **METRICS}]


def test_a_directory_that_cannot_be_written_to_is_one_line(tmp_path):
    with pytest.raises(UserError, match="cannot be written"):
        open_trackers(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("module", "option"), [("tensorboardX", {"tensorboard": True}), ("wandb", {"wandb": "offline"})]
)
def test_a_library_that_is_missing_is_said_before_the_run_begins(tmp_path, monkeypatch, module, option):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"track\.\w+: needs {module}: pip install 'polyrl\[track\]'"):
        open_trackers(tmp_path, **option)


# TensorBoard


def tensorboard_events(folder):
    """All events of all files, read as TensorBoard does: length, checksum, event, checksum."""
    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = event_pb2.Event()  # pyright: ignore[reportAttributeAccessIssue]  made at its import
            event.ParseFromString(data[at + 12 : at + 12 + length])
            yield event
            at += 16 + length


def test_tensorboard_has_every_number_of_every_step_before_it_is_closed(tmp_path):
    tracker = TensorBoardTracker(tmp_path)
    tracker.log(0, METRICS)
    tracker.log(1, {"reward/mean": 0.75})
    first, *steps = tensorboard_events(tmp_path)
    assert first.file_version == "brain.Event:2"
    found = [(event.step, {value.tag: value.simple_value for value in event.summary.value}) for event in steps]
    assert found == [(0, {"reward/mean": 0.5, "validation/pass@1": 0.25}), (1, {"reward/mean": 0.75})]
    tracker.close()


def test_a_run_that_goes_on_tells_tensorboard_which_steps_no_longer_hold(tmp_path):
    for first_step in (0, 2):
        tracker = TensorBoardTracker(tmp_path, first_step=first_step)
        tracker.log(first_step, METRICS)
        tracker.close()
    assert len(list(tmp_path.iterdir())) == 2
    restarts = [event for event in tensorboard_events(tmp_path) if event.WhichOneof("what") == "session_log"]
    assert [(event.step, event.session_log.status) for event in restarts] == [(2, 1)]


# Weights & Biases


def wandb_records(folder):
    """All records of all offline runs; small ones, so that each is whole in its block."""
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        data, at = path.read_bytes(), 7
        while at + 7 <= len(data):
            _, length, _ = struct.unpack_from("<IHB", data, at)
            record = wandb_internal_pb2.Record()  # pyright: ignore[reportAttributeAccessIssue]  made at its import
            record.ParseFromString(data[at + 7 : at + 7 + length])
            yield record
            at += 7 + length


@pytest.mark.timeout(60)
def test_wandb_offline_keeps_every_step_and_the_recipe_in_files(tmp_path):
    trackers = open_trackers(tmp_path, wandb="offline", project="sums", recipe={"train": {"steps": 2}})
    trackers.log(0, METRICS)
    trackers.log(1, {"reward/mean": 0.75})
    trackers.close()
    wandb.teardown()  # a process that ends does it by itself; before that, its helper may still write
    records = list(wandb_records(tmp_path))
    lines = [
        {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    assert [(line["_step"], line["reward/mean"]) for line in lines] == [("0", "0.5"), ("1", "0.75")]
    assert lines[0]["validation/pass@1"] == "0.25"
    assert json.loads(lines[0]["rounds/kind"]) == "short"
    (run,) = [record.run for record in records if record.HasField("run")]
    assert (run.project, run.display_name) == ("sums", tmp_path.name)
    config = {item.key: item.value_json for item in run.config.update}
    assert json.loads(config["train"]) == {"steps": 2}


@pytest.mark.timeout(60)
def test_a_run_that_goes_on_keeps_its_wandb_id(tmp_path):
    (tmp_path / "wandb-run-id").write_text("abcd1234\n")
    WandbTracker(tmp_path, "offline", "sums").close()
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert folder.name.endswith("-abcd1234")


@pytest.mark.timeout(60)
def test_wandb_that_cannot_be_reached_is_kept_offline_and_the_run_begins(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    trackers = open_trackers(tmp_path, wandb="online")
    trackers.log(0, METRICS)
    trackers.close()
    assert "wandb cannot be reached, the run is kept offline" in caplog.text
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 1
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


def test_trackers_say_where_they_write(tmp_path):
    trackers = open_trackers(tmp_path, tensorboard=True, wandb="offline")
    trackers.close()
    assert trackers.where == (
        f"{tmp_path}/metrics.jsonl; TensorBoard: tensorboard --logdir {tmp_path}/tensorboard; W&B: offline in "
        f"{tmp_path}/wandb, `wandb sync` uploads it"
    )


ROWS = [
    SampleRow(3, f"{n}/0", n / 4, 7, "stop", "<b>2+2</b>", "|*four*|\n<script>x</script> \x1b[31m", "style 0.5")
    for n in range(5)
]
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
)


def test_tensorboard_has_answers_as_a_table_of_text_alone_and_the_pictures(tmp_path):
    tracker = TensorBoardTracker(tmp_path / "events")
    tracker.log_samples(3, ROWS)
    (tmp_path / "reward.png").write_bytes(PNG)
    tracker.log_pictures(9, [tmp_path / "reward.png"])
    tracker.close()
    samples, pictures = [value for event in tensorboard_events(tmp_path / "events") for value in event.summary.value]
    assert (samples.tag, samples.metadata.plugin_data.plugin_name) == ("samples", "text")
    [table] = samples.tensor.string_val
    lines = table.decode().splitlines()
    assert len(lines) == 2 + len(ROWS) and {line.count(" | ") for line in lines} == {7}
    assert not any(mark in table.decode() for mark in ("<b>", "<script>", "*four", "\x1b"))
    assert (pictures.tag, pictures.image.width, pictures.image.height) == ("pictures/reward", 1, 1)
    assert pictures.image.encoded_image_string == PNG


def test_tensorboards_own_reader_shows_the_table_and_the_picture(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tracker = TensorBoardTracker(tmp_path)
    tracker.log_samples(3, ROWS)
    (tmp_path / "reward.png").write_bytes(PNG)
    tracker.log_pictures(9, [tmp_path / "reward.png"])
    tracker.close()
    read = accumulator.EventAccumulator(str(tmp_path), size_guidance={accumulator.IMAGES: 0, accumulator.TENSORS: 0})
    read.Reload()
    assert read.Tags()["images"] == ["pictures/reward"]
    assert b"four" in read.Tensors("samples")[0].tensor_proto.string_val[0]


def test_wandb_keeps_answers_as_a_table_and_the_pictures_beside_the_metrics(tmp_path):
    tracker = WandbTracker(tmp_path, "offline", "polyrl")
    tracker.log_samples(3, ROWS)
    tracker.log(3, METRICS)
    (tmp_path / "reward.png").write_bytes(PNG)
    tracker.log_pictures(3, [tmp_path / "reward.png"])
    tracker.close()
    [table] = [json.loads(one.read_text()) for one in tmp_path.glob("wandb/offline-run-*/files/media/table/*.json")]
    assert table["columns"] == list(SampleRow._fields) and table["data"][0] == list(ROWS[0])
    assert len(list(tmp_path.glob("wandb/offline-run-*/files/media/images/pictures/*.png"))) == 1


def test_a_table_has_a_few_answers_from_the_lowest_reward_to_the_highest():
    many = [ROWS[0]._replace(reward=float(n), sample=f"{n}/0") for n in range(200)]
    found = [one.reward or 0.0 for one in spread(many)]
    assert len(found) == 16 and found == sorted(found) and (found[0], found[-1]) == (0.0, 199.0)
    assert len(shorten_text("x" * 10_000)) < 700
