"""Metrics: no step twice, nothing lost by a kill, names that mean what the page says."""

import json
import math
from typing import get_args

import pytest
from tests.full_disk import files_of_at_most

from polyrl.errors import UserError
from polyrl.ids import Step
from polyrl.scheduling.core.ledger import DiscardCause, StepLine
from polyrl.telemetry.metric_names import ALIASES, HEADLINES, METRICS, describe
from polyrl.telemetry.metrics import (
    CUT_FILE_NAME,
    MetricsFile,
    from_step_line,
    read_metrics,
    show_value,
    step_line,
    with_aliases,
)


def a_line(step=3, **changes):
    fields = {
        "step": Step(step),
        "kind": "long",
        "opened_at": 100.0,
        "closed_at": 130.0,
        "trained_at": 140.0,
        "step_s": 40.0,
        "num_groups": 4,
        "num_samples": 16,
        "tokens_trained": 8000,
        "tokens_discarded": {"speculation": 300},
        "longest": 900,
        "trained_mean": 500.0,
        "generated_mean": 480.0,
        "inclusion_by_length": ((9, 10, 8), (10, 4, 4)),
        "wait_train_s": 4.0,
        "wait_remote_s": 10.0,
        "train_s": 12.0,
        "seed_window_s": 5.0,
        "seed_window_why": "",
        "mean_workers": 2.5,
        "num_moves": 3,
        "usd": 2.0,
    }
    return StepLine(**{**fields, **changes})


def write(path, *steps, first_step=0):
    file = MetricsFile(path, first_step=first_step)
    for step in steps:
        file.log(step, {"reward/mean": step / 10})
    file.close()


def steps_of(path):
    return [line["step"] for line in read_metrics(path)]


# The file


def test_what_was_logged_is_read_again_and_is_plain_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.log(0, {"reward/mean": 0.25, "rounds/kind": "short", "tokens/kept": 12, "actor/kl_loss": None})
    assert read_metrics(path) == [json.loads(path.read_text())]  # before it is closed: a kill loses nothing
    assert read_metrics(path)[0] == {
        "step": 0,
        "reward/mean": 0.25,
        "rounds/kind": "short",
        "tokens/kept": 12,
        "actor/kl_loss": None,
    }
    file.close()


def test_a_number_that_json_cannot_say_is_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.log(0, {"actor/pg_loss": math.nan, "actor/grad_norm": math.inf})
    file.close()
    assert read_metrics(path) == [{"step": 0, "actor/pg_loss": None, "actor/grad_norm": None}]


@pytest.mark.parametrize("torn", [b'{"step":2,"reward/me', b'{"step":2}', b"\0" * 30, b'{"step":2,"\xff'])
def test_a_last_line_that_was_cut_short_is_skipped_and_then_cut_off(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    write(path, 0, 1)
    path.write_bytes(path.read_bytes() + torn)
    assert steps_of(path) == [0, 1]
    write(path, 2, 3, first_step=2)
    assert steps_of(path) == [0, 1, 2, 3]
    assert not (tmp_path / CUT_FILE_NAME).exists()


@pytest.mark.parametrize("cut_at", range(0, 90, 7))
def test_wherever_a_kill_cuts_the_file_the_run_goes_on_with_every_step_once(tmp_path, cut_at):
    path = tmp_path / "metrics.jsonl"
    write(path, 0, 1, 2)
    path.write_bytes(path.read_bytes()[:cut_at])
    whole = steps_of(path)
    write(path, *range(len(whole), 4), first_step=len(whole))
    assert steps_of(path) == [0, 1, 2, 3]


def test_a_run_that_goes_on_at_an_earlier_step_has_no_step_twice_and_keeps_what_it_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 0, 1, 2, 3)
    path.write_bytes(path.read_bytes() + b'{"step":4,"rew')
    write(path, 2, 3, 4, first_step=2)
    assert steps_of(path) == [0, 1, 2, 3, 4]
    assert steps_of(tmp_path / CUT_FILE_NAME) == [2, 3]


def test_a_step_is_not_written_a_second_time(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.log(0, {})
    with pytest.raises(ValueError, match="step 0 was written already"):
        file.log(0, {})
    file.close()


def test_a_line_that_is_none_is_named_and_nothing_is_changed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\nhello\n{"step": 1}\n')
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: not a line of metrics"):
        MetricsFile(path)
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: "):
        read_metrics(path)
    assert path.read_bytes() == before


def test_a_line_without_its_step_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"reward/mean": 1}\n{"step": 1}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:1: not a line of metrics: it has no `step`"):
        read_metrics(path)


def test_a_file_that_cannot_be_had_is_one_line(tmp_path):
    with pytest.raises(UserError, match="cannot be written"):
        MetricsFile(tmp_path / "nowhere" / "metrics.jsonl")
    with pytest.raises(UserError, match="cannot be read"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_a_disk_that_is_full_is_an_error_and_leaves_no_half_of_a_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.log(0, {})
    with files_of_at_most(path.stat().st_size + 10), pytest.raises(OSError):
        file.log(1, {"reward/mean": 0.123456789})
    file.log(1, {})
    file.close()
    assert path.read_text() == '{"step":0}\n{"step":1}\n'


# What the scheduler says


def test_a_step_line_becomes_metrics_against_the_step_before():
    metrics = from_step_line(a_line(), a_line(step=2, usd=1.2))
    assert metrics["time/step_total"] == 40.0
    assert metrics["time/step_generate"] == 30.0
    assert metrics["idle/trainer_share"] == pytest.approx(4.0 / 40.0)
    assert metrics["cost/usd_step"] == pytest.approx(0.8)
    assert metrics["cost/usd_per_mtok"] == pytest.approx(100.0)
    assert metrics["tokens/discarded/speculation"] == 300
    assert metrics["tokens/discarded/preemption"] == 0
    assert metrics["bias/inclusion_by_bin/9"] == 0.8
    assert (metrics["rounds/kind"], metrics["rounds/long"], metrics["weights/version"]) == ("long", 1, 4)


def test_shares_are_of_the_time_that_is_told():
    metrics = from_step_line(a_line(), step_s=16.0)
    assert (metrics["time/step_total"], metrics["idle/trainer_share"]) == (16.0, 4.0 / 16.0)


def test_the_first_step_costs_all_that_there_was_before():
    metrics = from_step_line(a_line(step=0))
    assert metrics["cost/usd_step"] == metrics["cost/usd_total"] == 2.0


def test_a_step_that_trained_nothing_has_no_price_a_token():
    assert from_step_line(a_line(tokens_trained=0, num_samples=0))["cost/usd_per_mtok"] is None


def test_every_name_of_a_scheduler_s_line_is_described():
    names = with_aliases(from_step_line(a_line()))
    assert [name for name in names if describe(name) is None] == []
    assert {f"tokens/discarded/{cause}" for cause in get_args(DiscardCause)} <= set(names)


def test_names_are_unique_and_a_name_is_described_by_one_of_them():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert all(metric.meaning for metric in METRICS)
    for name in (*ALIASES, *ALIASES.values(), *HEADLINES.values()):
        assert describe(name) is not None, name
    pass_at_8 = describe("validation/pass@8")
    assert pass_at_8 is not None
    assert pass_at_8.name == "validation/pass@<k>"
    assert describe("reward/format") is None


def test_aliases_carry_the_same_value_and_only_where_there_is_one():
    metrics = with_aliases({"time/step_total": 12.0, "reward/mean": 0.5})
    assert metrics == {"time/step_total": 12.0, "reward/mean": 0.5, "timing_s/step": 12.0}


# The line


WHOLE = {
    "reward/mean": 0.41234, "token/response_length/mean": 16.1611, "time/step_total": 12.34567,
    "actor/entropy": 0.41234, "actor/grad_norm": 1.2, "perf/throughput_all_gpus": 18234.7,
    "token/response_length/max": 35, "fleet/workers": 2.0, "cost/usd_total": 0.0289, "rounds/kind": "short", "own": 1,
}  # fmt: skip


def test_a_line_has_80_columns_and_a_wider_terminal_shows_more():
    line = step_line(1, WHOLE)
    assert line == "step    1  reward  0.412  len   16.2  time   12.3  entropy  0.412  grad    1.2"
    assert len(line) <= 80
    assert step_line(1, WHOLE, 120).startswith(line)
    assert step_line(1, WHOLE, 200).endswith("longest     35  tok/s  18235  workers      2  usd 0.0289  round  short")


def test_lines_stand_under_each_other_and_have_a_dash_where_a_step_trained_nothing():
    empty = {name: None if isinstance(value, float) else value for name, value in WHOLE.items()}
    one, other = step_line(9, WHOLE), step_line(1234, empty)
    assert len(one) == len(other)
    assert other == "step 1234  reward      -  len      -  time      -  entropy      -  grad      -"


def test_a_critic_is_in_the_line_of_a_run_that_has_one():
    line = step_line(1, {**WHOLE, "critic/vf_loss": 0.0123, "actor/kl_loss": 0.2})
    assert "critic 0.0123" in line and "kl    0.2" in line and len(line) <= 80


def test_imposed_lengths_are_said_in_every_line():
    line = step_line(1, {**WHOLE, "rollout/imposed_lengths": 1})
    assert line.endswith("(lengths of answers are imposed)") and "reward" in line and len(line) <= 80


def test_values_read_well():
    shown = [show_value(value) for value in (7, 1e-6, 0.5, 123.456, 1234567.8, "short", None, math.nan, -math.inf)]
    assert shown == ["7", "1e-06", "0.5", "123.5", "1234568", "short", "-", "nan", "-inf"]
