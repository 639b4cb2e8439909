"""How many host processes a fleet needs: what is played, what is enough, and what the command says."""

import json
import re
from itertools import pairwise

import pytest
from tests.unit.agents import write_agents
from tests.unit.tiny import write_tiny

from polyrl.cli.main import main
from polyrl.sim.host_planner import ENOUGH, HostRow, enough, plan_hosts
from polyrl.sim.library import load_scenario
from polyrl.sim.plan_report import print_host_plan


def rows(*step_times, problems=()):
    return [
        HostRow(processes=number, step_time_s=seconds, problem="stuck" if number in problems else None)
        for number, seconds in enumerate(step_times, start=1)
    ]


def test_enough_is_the_smallest_number_within_two_percent_of_the_best():
    found = enough(rows(200.0, 130.0, 101.9, 100.0, 100.5))
    assert found is not None
    assert found.processes == 3


def test_what_failed_is_neither_enough_nor_the_best():
    found = enough(rows(200.0, 130.0, 1.0, 125.0, problems=(3,)))
    assert found is not None
    assert found.processes == 4
    assert enough(rows(1.0, problems=(1,))) is None


def test_more_places_shorten_steps_up_to_the_number_that_is_enough(tmp_path):
    scenario = load_scenario(str(write_agents(tmp_path)), ["hosts.slots=4", "run.max_staleness=0"])
    plan = plan_hosts(scenario, [1, 2, 4, 8, 16], 4, 0, num_processes=1)
    times = [row.step_time_s for row in plan.rows]
    assert [row.problem for row in plan.rows] == [None] * 5
    assert all(later <= earlier * (1.0 + ENOUGH) for earlier, later in pairwise(times))
    assert plan.needed is not None
    assert plan.needed.processes == 8, "8 times 4 places for 32 episodes"
    assert times[0] > 2 * times[-1]
    assert [row.hosts_usd_per_hour for row in plan.rows] == pytest.approx([1.0, 2.0, 4.0, 8.0, 16.0])
    waiting = [row.waiting_for_host for row in plan.rows]
    assert waiting == sorted(waiting, reverse=True) and waiting[-1] == 0.0
    assert plan.why.startswith("8 host processes: ")
    assert "hosts for $8.00 an hour of" in plan.why
    assert "with 4 a step takes" in plan.why
    assert plan.is_enough


def test_the_largest_number_that_was_tried_is_not_called_enough(tmp_path, capsys):
    scenario = load_scenario(str(write_agents(tmp_path)), ["hosts.slots=4", "run.max_staleness=0"])
    plan = plan_hosts(scenario, [1, 2], 2, 0, num_processes=1)
    assert plan.needed is not None
    assert (plan.needed.processes, plan.is_enough) == (2, False)
    print_host_plan(plan)
    said = " ".join(capsys.readouterr().out.split())
    assert "at least: 2 host processes: " in said
    assert "no larger number was tried, and more may be needed" in said
    assert "enough" not in said


def test_processes_of_this_machine_do_not_change_what_comes_out(tmp_path):
    scenario = load_scenario(str(write_agents(tmp_path)))
    alone = plan_hosts(scenario, [1, 2], 2, 0, num_processes=1)
    assert plan_hosts(scenario, [2, 1, 1], 2, 0, num_processes=2) == alone


@pytest.mark.usefixtures("one_core")
def test_the_command_shows_a_table_and_the_number(tmp_path, capsys):
    out = tmp_path / "out"
    command = ["plan", str(write_agents(tmp_path)), "--hosts", "1-2", "--steps", "2", "--out", str(out)]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert text.startswith("agents, seed 0: 2 steps each, 16 episodes a host process")
    assert re.search(r"^\s*> [12] ", text, re.MULTILINE), "the row of the number that is enough"
    assert ("enough: " in text) is (json.loads((out / "plan.json").read_text())["is_enough"])
    plan = json.loads((out / "plan.json").read_text())
    assert [row["processes"] for row in plan["rows"]] == [1, 2]
    assert plan["needed"]["processes"] in (1, 2)


@pytest.mark.usefixtures("one_core")
def test_a_plan_of_workers_pays_for_hosts_too(tmp_path, capsys):
    options = ("--workers", "1", "--factors", "1", "--staleness", "0", "--steps", "2", "--json", "--no-progress")
    assert main(["plan", str(write_agents(tmp_path)), *options]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["hosts_usd_per_hour"] == pytest.approx(2.0)
    assert row["usd_per_hour"] == pytest.approx(83.79 + 5.32 + 2.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--hosts", "0-3"], "--hosts: got '0-3', expected a rising range from 1 up to 1000"),
        (["--hosts", "many"], "--hosts: got 'many', expected integers >= 1"),
        (["--hosts", "1-3", "--workers", "2"], "--workers: --hosts tries nothing else"),
        (["--hosts", "1-3", "--worker-price", "2"], "--worker-price: --hosts tries nothing else"),
    ],
)
def test_a_plan_of_hosts_that_makes_no_sense_is_refused(tmp_path, capsys, options, words):
    assert main(["plan", str(write_agents(tmp_path)), *options]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    assert words in output.err


def test_hosts_of_a_scenario_without_environments_are_refused(tmp_path, capsys):
    assert main(["plan", str(write_tiny(tmp_path)), "--hosts", "1-3"]) == 2
    assert "--hosts: no domain of tiny has an environment" in capsys.readouterr().err
