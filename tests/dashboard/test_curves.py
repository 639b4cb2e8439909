"""Curves are those of the metrics file, also while it is written, cut back, or written by somebody else."""

import json
from pathlib import Path

from tests.properties.hostile import play

from polyrl.dashboard.curves import Curves
from polyrl.scheduling.core import commands as c
from polyrl.telemetry.metrics import FILE_NAME


def write(path: Path, *lines: dict[str, object], end: str = "\n") -> None:
    with (path / FILE_NAME).open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines[:-1]) + json.dumps(lines[-1]) + end)


def test_a_metric_that_comes_later_or_now_and_then_has_gaps(tmp_path: Path):
    write(tmp_path, {"step": 0, "a": 1.0}, {"step": 1, "b": 2.0, "kind": "x"}, {"step": 2, "a": 3.0, "b": None})
    curves = Curves(tmp_path, list)
    assert curves.refresh() == 3
    assert curves.column("a") == [1.0, None, 3.0]
    assert curves.column("b") == [None, 2.0, None]
    assert curves.column("never") == [None, None, None]
    assert curves.names == ["a", "b"]


def test_a_line_that_is_half_written_is_read_when_it_is_whole(tmp_path: Path):
    write(tmp_path, {"step": 0, "a": 1.0}, {"step": 1, "a": 2.0}, end="")
    curves = Curves(tmp_path, list)
    assert curves.refresh() == 1
    with (tmp_path / FILE_NAME).open("a") as file:
        file.write("\n")
    write(tmp_path, {"step": 2, "a": 5.0})
    assert curves.refresh() == 3
    assert curves.column("a") == [1.0, 2.0, 5.0]


def test_a_run_that_went_on_from_an_earlier_step_is_read_anew(tmp_path: Path):
    write(tmp_path, *({"step": step, "a": float(step)} for step in range(9)))
    curves = Curves(tmp_path, list)
    assert curves.refresh() == 9
    (tmp_path / FILE_NAME).write_text('{"step":0,"a":7.0}\n')
    assert curves.refresh() == 1
    assert curves.column("a") == [7.0]


def test_a_line_that_is_none_of_ours_and_one_of_validation_alone_are_left_out(tmp_path: Path):
    (tmp_path / FILE_NAME).write_text(
        '[]\nnonsense\n{"a": 1}\n{"step":4,"validation/reward/mean":1.0}\n{"step":4,"a":2}\n'
    )
    curves = Curves(tmp_path, list)
    assert curves.refresh() == 1
    assert curves.steps == [4]


def test_seconds_add_up_and_dollars_are_those_of_the_run(tmp_path: Path):
    write(tmp_path, *({"step": n, "time/step_total": 2.0, "cost/usd_total": n / 2} for n in range(3)))
    curves = Curves(tmp_path, list)
    curves.refresh()
    assert curves.axis("seconds") == [2.0, 4.0, 6.0]
    assert curves.axis("dollars") == [0.0, 0.5, 1.0]
    assert curves.axis("step") == [0.0, 1.0, 2.0]


def test_any_number_of_names_is_bounded(tmp_path: Path):
    write(tmp_path, {"step": 0, **{f"own/{number}": 1.0 for number in range(5000)}})
    curves = Curves(tmp_path, list)
    curves.refresh()
    assert len(curves.names) < 2_001


def test_steps_that_the_journal_told_before_the_file_was_there_are_not_counted_twice(tmp_path: Path):
    world = play(4, num_events=300)
    told = [one.line for _, _, commands in world.log for one in commands if isinstance(one, c.ReportStep)]
    assert told
    curves = Curves(tmp_path, lambda: told)
    assert curves.refresh() == len(told)
    write(tmp_path, {"step": 0, "a": 1.0})
    assert curves.refresh() == 1
    assert curves.steps == [0] and curves.column("a") == [1.0]
