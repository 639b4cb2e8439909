"""Pictures in the terminal and in files. What they show is tested; how they look was looked at."""

import io
import sys

import pytest
from rich.console import Console
from tests.unit.tiny import play_tiny

from polyrl.sim import pictures
from polyrl.sim.planner import PlanRow, make_plan
from polyrl.sim.report import bar_rows, cells, columns_of, merge_rows, row_order, time_axis, whole_report
from polyrl.telemetry import canvas
from polyrl.telemetry.looks import ACTIVITIES, LEFT, nice_ticks, unit_for
from polyrl.telemetry.timeline import Span, moments_of_going

PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    return play_tiny(
        tmp_path_factory.mktemp("tiny"), "rounds.tail_batching=race", "run.steps=6", "fleet.join_at_s=[20.0]"
    )


def printed(played, width):
    sim, result = played
    text = io.StringIO()
    Console(width=width, file=text).print(whole_report(sim, result, width))
    return text.getvalue()


def test_a_cell_shows_what_took_most_of_its_time():
    spans = [Span(0.0, 4.0, "generating"), Span(4.0, 5.0, "idle"), Span(5.0, 10.0, "training")]
    assert cells(spans, 10.0, 2) == ["generating", "training"]
    assert cells(spans, 10.0, 10)[4] == "idle"


def test_a_worker_that_is_not_there_is_blank_and_its_going_is_marked():
    spans = [Span(2.0, 6.0, "generating")]
    assert cells(spans, 10.0, 5) == [None, "generating", LEFT, None, None]


def test_a_worker_that_is_there_at_the_end_did_not_go():
    assert LEFT not in cells([Span(0.0, 5.0, "idle"), Span(5.0, 10.0, "generating")], 10.0, 7)


def test_every_activity_has_a_character_of_its_own():
    glyphs = [look.glyph for look in ACTIVITIES.values()]
    assert len(set(glyphs)) == len(glyphs)


def test_local_rows_that_look_the_same_are_one():
    rows = {"local1": ["idle"], "local2": ["idle"], "local3": [None], "w1": ["idle"], "w2": ["idle"]}
    assert [name for name, _ in merge_rows(rows)] == ["local1..2", "local3", "w1", "w2"]


def test_rows_are_in_the_order_of_the_grants():
    assert sorted(["w10", "w2", "local1"], key=row_order) == ["local1", "w2", "w10"]


@pytest.mark.parametrize("total_s", [5.0, 90.0, 4000.0, 90_000.0])
@pytest.mark.parametrize("width", [10, 40, 100])
def test_the_axis_is_never_wider_than_it_may_be(total_s, width):
    ruler, numbers = time_axis(total_s, width)
    assert len(ruler) == width
    assert len(numbers) <= width
    assert numbers.startswith("0 ")


def test_ticks_are_round_numbers_up_to_the_end():
    assert nice_ticks(24.0, 5) == [0.0, 5.0, 10.0, 15.0, 20.0]
    assert nice_ticks(0.0, 5) == [0.0]


def test_the_unit_of_time_fits():
    assert [unit_for(seconds).name for seconds in (30, 600, 601, 4 * 3600, 5 * 3600)] == ["s", "s", "min", "min", "h"]


def test_bars_are_as_high_as_their_values():
    assert bar_rows([8.0, 4.0, 1.0, 0.0], 8.0, 2) == [["█", " ", " ", " "], ["█", "█", "▂", " "]]


def test_more_steps_than_columns_are_shown_as_means():
    assert columns_of([1.0, 3.0, 5.0, 7.0, 9.0], 3) == ([2.0, 6.0, 9.0], 2, 1)


@pytest.mark.parametrize("width", [80, 120])
def test_the_report_has_table_timeline_and_saw_tooth_and_fits(played, width):
    text = printed(played, width)
    for words in (
        "tokens a second",
        "tokens discarded",
        "law violations",
        "What every worker did",
        "Seconds of each step",
    ):
        assert words in text
    assert "L" in text.rpartition("Seconds of each step")[2]
    assert max(len(line) for line in text.splitlines()) <= width
    for worker in ("w1", "w2", "w3"):
        assert any(line.strip().startswith(f"{worker} ") for line in text.splitlines())


def test_the_report_says_how_fast_each_number_of_workers_was(played):
    assert "Tokens a second by the number of workers" in printed(played, 100)


def test_three_pictures_are_drawn(played, tmp_path):
    paths = pictures.draw_all(played[0], tmp_path)
    assert [path.name for path in paths] == ["timeline.png", "steps.png", "workers.png"]
    assert all(path.read_bytes().startswith(PNG) and path.stat().st_size > 5000 for path in paths)


def test_a_plan_is_drawn(played, tmp_path):
    rows = [
        PlanRow(workers=n, factor=factor, staleness=k, throughput_tok_s=1000.0 + 100 * n, usd_per_hour=float(n))
        for k in (0, 1)
        for factor in (1.0, 1.25)
        for n in (0, 1)
    ]
    plan = make_plan(played[0].scenario, rows, [1.0], seed=0, steps=4)
    canvas.save(pictures.plan_figure(plan), tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(PNG)


def test_without_matplotlib_one_line_says_how_to_get_it(played, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(canvas.NoPlottingError, match=r"pip install 'polyrl\[plot\]'"):
        pictures.draw_all(played[0], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_machine_that_was_let_go_at_the_moment_of_its_start_has_no_end():
    assert moments_of_going([], 10.0) == []
