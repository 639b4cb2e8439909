"""Pictures of runs: what they show is tested; how they look was looked at."""

import sys

import numpy as np
import pytest
from tests.properties.hostile import play
from tests.telemetry.test_account import write_journal

from polyrl.telemetry import canvas
from polyrl.telemetry.account import read_account
from polyrl.telemetry.pictures import (
    draw_all,
    longest_figure,
    reward_cost_figure,
    reward_figure,
    running_mean,
    steps_figure,
    timeline_figure,
    workers_figure,
)
from polyrl.telemetry.runs import make_run, row_order

PNG = b"\x89PNG"


def metrics(num_steps, **more):
    return [
        {
            "step": step,
            "reward/mean": step / num_steps,
            "time/step_total": 10.0,
            "rounds/kind": "long" if step % 5 == 4 else "short",
            "token/response_length/max": 100 + step,
            "cost/usd_total": 0.5 * (step + 1),
            **more,
        }
        for step in range(num_steps)
    ]


@pytest.fixture(scope="module")
def account(tmp_path_factory):
    world = play(4, num_events=150)
    return read_account(write_journal(tmp_path_factory.mktemp("run") / "journal.bin", world))


def test_metrics_and_journal_are_one_run_and_metrics_are_believed(account):
    last = account.lines[-1]
    run = make_run(
        "r", account, [{"step": last.step, "reward/mean": 0.5, "time/step_total": 123.0, "fleet/workers": None}]
    )
    (step,) = [one for one in run.steps if one.step == last.step]
    assert (step.reward, step.step_s) == (0.5, 123.0)
    assert step.workers == last.mean_workers
    assert step.ended_s == last.trained_at - account.started_at
    assert [one.step for one in run.steps] == [line.step for line in account.lines]


def test_a_run_of_metrics_alone_counts_its_seconds_from_its_steps():
    run = make_run("r", None, metrics(3))
    assert [one.ended_s for one in run.steps] == [10.0, 20.0, 30.0]
    assert [one.usd for one in run.steps] == [0.5, 1.0, 1.5]


def test_a_step_without_its_time_leaves_the_seconds_after_it_unknown():
    run = make_run("r", None, [{"step": 0, "time/step_total": 5.0}, {"step": 1}, {"step": 2, "time/step_total": 5.0}])
    assert [one.ended_s for one in run.steps] == [5.0, None, None]


def test_tokens_a_second_are_of_one_kind_throughout(account):
    without = make_run("r", account, [{"step": account.lines[0].step, "reward/mean": 0.5}])
    assert not without.has_prompts_in_tok_s
    given = make_run("r", None, metrics(2, **{"perf/throughput_all_gpus": 7.0}))
    assert given.has_prompts_in_tok_s
    assert [one.tok_s for one in given.steps] == [7.0, 7.0]


def test_there_is_no_picture_of_what_is_not_known(account):
    of_journal, of_metrics, of_nothing = (
        make_run("j", account, []),
        make_run("m", None, metrics(3)),
        make_run("n", None, []),
    )
    assert reward_figure([of_journal]) is None
    assert reward_cost_figure([of_journal]) is None
    assert timeline_figure(of_metrics) is None
    assert workers_figure([of_metrics]) is None
    for figure in (reward_figure([of_nothing]), longest_figure([of_nothing]), steps_figure(of_nothing)):
        assert figure is None


def test_several_runs_are_lines_of_one_picture():
    figure = reward_figure([make_run("a", None, metrics(4)), make_run("b", None, metrics(6))])
    assert figure is not None
    (axes,) = figure.axes
    assert [line.get_label() for line in axes.lines] == ["a", "b"]
    assert [np.size(line.get_xdata()) for line in axes.lines] == [4, 6]


def test_a_run_of_imposed_lengths_is_marked_in_every_picture_of_its_metrics():
    imposed = make_run("a", None, metrics(4, **{"rollout/imposed_lengths": 1, "fleet/workers": 1}))
    figures = [draw([imposed]) for draw in (reward_figure, reward_cost_figure, longest_figure)]
    figures.append(steps_figure(imposed))
    for figure in figures:
        assert figure is not None
        assert figure.axes[0].get_title(loc="left").endswith(": a, lengths of answers are imposed")
    beside = reward_figure([imposed, make_run("b", None, metrics(4))])
    assert beside is not None
    assert [line.get_label() for line in beside.axes[0].lines] == ["a, lengths of answers are imposed", "b"]


def test_many_steps_are_a_pale_line_and_a_running_mean():
    figure = reward_figure([make_run("a", None, metrics(300))])
    assert figure is not None
    assert len(figure.axes[0].lines) == 2
    assert running_mean([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]


def test_reward_is_drawn_against_dollars_only_where_there_are_any():
    paid, free = make_run("a", None, metrics(4)), make_run("b", None, metrics(4, **{"cost/usd_total": 0.0}))
    both, one = reward_cost_figure([paid]), reward_cost_figure([free])
    assert both is not None
    assert one is not None
    assert (len(both.axes), len(one.axes)) == (2, 1)


def test_short_and_long_rounds_are_bars_apart():
    figure = steps_figure(make_run("a", None, metrics(10)))
    assert figure is not None
    labels = [bars.get_label() for bars in figure.axes[0].containers]
    assert labels == ["short round, mean 10 s", "long round, mean 10 s"]


def test_every_worker_has_a_row_and_every_loss_a_cross(account):
    figure = timeline_figure(make_run("a", account, []))
    assert figure is not None
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == row_order(account)
    (crosses,) = [line for line in axes.lines if line.get_label() == "lost"]
    assert np.size(crosses.get_xdata()) == sum(life.ending == "lost" for life in account.lives) > 0


def test_local_workers_come_first_then_the_others_as_they_joined(account):
    local = {life.worker for life in account.lives if life.local}
    order = row_order(account)
    assert set(order[: len(local)]) == local
    remote = list(dict.fromkeys(life.worker for life in account.lives if not life.local))
    assert order[len(local) :] == remote


def test_all_pictures_of_two_runs_are_written_under_names_of_their_own(account, tmp_path):
    runs = [make_run("x/a", account, metrics(6)), make_run("b", None, metrics(6))]
    paths = draw_all(runs, tmp_path)
    assert [path.name for path in paths] == [
        "reward.png",
        "reward-cost.png",
        "longest.png",
        "workers.png",
        "x_a-steps.png",
        "x_a-timeline.png",
        "b-steps.png",
    ]
    assert all(path.read_bytes().startswith(PNG) for path in paths)


def test_without_matplotlib_one_line_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(canvas.NoPlottingError, match=r"pip install 'polyrl\[plot\]'"):
        draw_all([make_run("a", None, metrics(3))], tmp_path)
