"""The display: a pure function of what the loop says, never too wide; without a terminal one line a step."""

import io
import math

import pytest
from msgspec.structs import replace
from rich.console import Console

from polyrl.telemetry.progress import Progress, RunView, WorkerView, eta_s, news, render, sparkline

WORKERS = (
    WorkerView("local", "training", local=True, version=12),
    WorkerView("w0", "generating", 16, 812.4, 12),
    WorkerView("w1-with-a-very-long-host-name.example.org-4711", "pulling", version=11, spot=True),
    WorkerView("w2", "draining", 1, 40.0, 12, spot=True),
)
VIEW = RunView(
    name="arithmetic",
    step=12,
    num_steps=40,
    kind="long",
    phase="training micro-batch 3",
    step_began_at=100.0,
    step_times_s=(6.0, 5.0, 7.0),
    rewards=(0.2, 0.3, 0.25, 0.4),
    num_groups=16,
    num_generated=12,
    num_scored=8,
    num_trained=4,
    workers=WORKERS,
    waits=("3 groups wait for 5 samples on w0, 3.2 s",),
    events=("worker w4 lost: its 7 samples moved",),
    usd=0.0523,
)


def drawn(view, width, now=104.0):
    text = io.StringIO()
    Console(file=text, width=width, color_system=None).print(render(view, width, now))
    return text.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal_and_none_is_wrapped(width):
    lines = drawn(VIEW, width).splitlines()
    assert max(len(line) for line in lines) <= width
    assert len(lines) == 3 + 1 + len(WORKERS) + 3


@pytest.mark.parametrize("width", [80, 120])
def test_everything_that_matters_can_be_read(width):
    text = drawn(VIEW, width)
    for words in (
        "arithmetic   step 12 of 40   long round   164 s left   $0.0523",
        "0.4  from 0.2, best 0.4",
        "4 trained, 8 scored, 12 generated of 16 groups  4.0 s",
        "3 remote, 1 local; 852 tokens/s",
        "generating   16 samples    812 tok/s  v12",
        "draining       1 sample     40 tok/s  v12    spot",
        "training micro-batch 3",
        "3 groups wait for 5 samples on w0, 3.2 s",
        "worker w4 lost: its 7 samples moved",
    ):
        assert words in text


def test_the_display_at_80_columns():
    lines = drawn(VIEW, 80).splitlines()
    assert lines[2] == "round    ████▓▓▓▓▒▒▒▒░░░░  4 trained, 8 scored, 12 generated of 16 groups  4.0 s"
    assert lines[6] == "         w1-with-a-very-l… ▾ pulling                               v11    spot"


def test_a_run_that_has_said_nothing_yet_can_be_drawn():
    text = drawn(RunView(name="new", step=0), 80)
    assert text.splitlines() == ["new   step 0   short round", "workers  none"]


def test_what_there_is_no_room_for_is_counted():
    many = replace(
        VIEW, workers=tuple(WorkerView(f"w{n}", "idle") for n in range(30)), waits=tuple(f"wait {n}" for n in range(5))
    )
    text = drawn(many, 80)
    assert "... and 18 more" in text
    assert "... and 2 more waits" in text


@pytest.mark.parametrize("rewards", [(math.nan,), (math.nan, 0.5, math.inf), (0.5,), (1.0, 1.0, 1.0), (-3.0, 5.0)])
def test_whatever_rewards_are_they_can_be_drawn(rewards):
    assert drawn(replace(VIEW, rewards=rewards), 80)


@pytest.mark.parametrize("counts", [(0, 0, 0), (20, 20, 20), (3, 9, 20), (5, 2, 1)])
def test_whatever_the_counts_the_bar_stays_a_bar(counts):
    trained, scored, generated = counts
    view = replace(VIEW, num_trained=trained, num_scored=scored, num_generated=generated)
    bar = drawn(view, 120).splitlines()[2].split()[1]
    assert len(bar) == 40
    assert bar == "█" * bar.count("█") + "▓" * bar.count("▓") + "▒" * bar.count("▒") + "░" * bar.count("░")


def test_a_sparkline_goes_from_the_lowest_to_the_highest_of_the_last_values():
    assert sparkline([0.0, 1.0, 2.0, 3.0], 10) == "▁▃▆█"
    assert sparkline([9.0, 0.0, 1.0], 2) == "▁█"
    assert sparkline([2.0, 2.0], 10) == "▁▁"


def test_the_time_left_is_what_the_last_steps_took():
    assert eta_s(VIEW, 100.0) == pytest.approx(28 * 6.0)
    assert eta_s(VIEW, 103.0) == pytest.approx(28 * 6.0 - 3.0)
    assert eta_s(replace(VIEW, step=39), 500.0) == 0.0
    assert eta_s(replace(VIEW, num_steps=None), 100.0) is None
    assert eta_s(replace(VIEW, step_times_s=()), 100.0) is None


# News


def test_who_came_and_who_went_is_told_as_written():
    before = (
        WorkerView("a", "generating", 7),
        WorkerView("b", "draining"),
        WorkerView("c", "idle"),
        WorkerView("d", "left"),
    )
    after = (WorkerView("c", "idle"), WorkerView("d", "idle"), WorkerView("e", "pulling", spot=True))
    assert news(before, after) == [
        "worker a lost: its 7 samples moved",
        "worker b left",
        "worker d joined",
        "worker e joined (spot)",
    ]


def test_a_worker_that_begins_to_drain_is_told_once():
    running, draining = WorkerView("a", "generating", 1), WorkerView("a", "draining", 1)
    assert news([running], [draining]) == ["worker a drains: 1 sample handed over"]
    assert news([draining], [draining]) == []


def test_a_view_like_the_one_before_is_no_news():
    assert news(WORKERS, WORKERS) == []


# Where it goes


def play(console):
    progress = Progress(console, clock=lambda: 104.0)
    with progress:
        progress.show(VIEW)
        progress.step_done(12, {"reward/mean": 0.5, "time/step_total": 6.0})
        progress.show(replace(VIEW, step=13, workers=WORKERS[:1]))
        progress.step_done(13, {"reward/mean": 0.6, "time/step_total": 5.0})
    return progress


def test_without_a_terminal_there_is_one_plain_line_a_step_and_nothing_else():
    text = io.StringIO()
    progress = play(Console(file=text, width=20))
    assert not progress.is_live
    assert text.getvalue() == ("step   12  reward    0.5  time      6\nstep   13  reward    0.6  time      5\n")


def test_in_a_terminal_lines_of_steps_stay_above_the_display():
    text = io.StringIO()
    progress = play(Console(file=text, width=80, force_terminal=True, color_system=None))
    assert progress.is_live
    printed = text.getvalue()
    assert "step   12  reward    0.5" in printed
    assert "worker w0 lost: its 16 samples moved" in printed
    assert printed.index("step   12") < printed.index("step   13")


def test_what_stands_in_square_brackets_is_not_taken_for_a_style():
    text = io.StringIO()
    with Progress(Console(file=text, width=80)) as progress:
        progress.say("reads [red]fish[/red] and [brackets]")
    assert text.getvalue() == "reads [red]fish[/red] and [brackets]\n"


def test_what_happens_again_and_again_is_shown_once():
    text = io.StringIO()
    with Progress(
        Console(file=text, width=80, force_terminal=True, color_system=None), clock=lambda: 104.0
    ) as progress:
        for _ in range(3):
            progress.note("the manager does not answer")
        progress.show(replace(VIEW, events=()))
    assert text.getvalue().rpartition("arithmetic")[2].count("the manager does not answer") == 1
