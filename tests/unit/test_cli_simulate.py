"""`polyrl simulate` and `polyrl plan`, from the command line to the files: what they print, write and refuse."""

import json
import re
import tomllib

import pytest
from tests.full_disk import files_of_at_most
from tests.unit.tiny import play_tiny, write_tiny

from polyrl.cli import simulate
from polyrl.cli.main import main
from polyrl.scheduling.core.ledger import StepLine


@pytest.fixture
def tiny(tmp_path):
    return str(write_tiny(tmp_path))


def refused(capsys, *arguments):
    """The one line with which a command refuses."""
    assert main(list(arguments)) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    return output.err.removeprefix("polyrl: error: ").rstrip("\n")


def test_list_names_every_scenario_in_a_line(capsys):
    assert main(["simulate", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"colocated-8b", "elastic-8b", "ramp", "spot-trace", "all-together"} <= {line.split()[0] for line in lines}


def test_json_is_one_object_and_nothing_else(tiny, capsys):
    assert main(["simulate", tiny, "--json", "--seed", "3", "fleet.workers=1", "--steps", "2"]) == 0
    output = capsys.readouterr()
    result = json.loads(output.out)
    assert (result["scenario"], result["seed"], result["steps"], result["workers"]["joins"]) == ("tiny", 3, 2, 1)
    assert output.err == ""


def test_the_table_and_the_pictures_are_printed(tiny, capsys):
    assert main(["simulate", tiny]) == 0
    text = capsys.readouterr().out
    assert text.startswith("tiny, seed 0: 4 steps in ")
    assert "tokens a dollar" in text
    assert "What every worker did" in text
    [against] = [line for line in text.splitlines() if "against `off`" in line]
    assert re.search(r"[\d.]+% +that would train [\d,]+: every prompt", against), "what the share is of"


def test_out_writes_files_that_read_back(tiny, tmp_path, capsys):
    out = tmp_path / "deep" / "out"
    assert main(["simulate", tiny, "--out", str(out)]) == 0
    assert f"written to {out}" in capsys.readouterr().out
    result = json.loads((out / "result.json").read_text())
    steps = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [0, 1, 2, 3]
    assert set(steps[0]) == set(StepLine.__struct_fields__) - {
        *("predicted_s", "mode_left"),
        *("prompt_factor", "sample_factor"),
    }, "nothing was predicted, no mode left, no factor adapted"
    assert tomllib.loads((out / "scenario.toml").read_text())["fleet"]["workers"] == 2
    assert main(["replay", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["digest"] == result["journal_digest"]


def test_the_scenario_that_was_written_plays_the_same_run(tiny, tmp_path, capsys):
    (tmp_path / "spot.csv").write_text("at_s,workers\n0,1\n20,3\n")
    out = tmp_path / "out"
    assert main(["simulate", tiny, f'supply.trace="{tmp_path / "spot.csv"}"', "--json", "--out", str(out)]) == 0
    first = json.loads(capsys.readouterr().out)
    assert main(["simulate", str(out / "scenario.toml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["journal_digest"] == first["journal_digest"]


def test_an_empty_folder_may_be_written_into(tiny, tmp_path):
    (tmp_path / "out").mkdir()
    assert main(["simulate", tiny, "--json", "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "result.json").is_file()


def test_a_run_that_gets_stuck_is_one_line_and_1(tiny, capsys):
    assert main(["simulate", tiny, "run.max_time_s=3"]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("polyrl: stuck: not done after run.max_time_s = 3 s; ")
    assert output.err.count("\n") == 1


def test_a_law_that_does_not_hold_is_printed_and_1(tmp_path, capsys):
    sim, _ = play_tiny(tmp_path)
    sim.law_violations.append("at 7.0 s: a sample has two ends")
    assert simulate._report(sim, 1.0, None, as_json=True) == 1
    output = capsys.readouterr()
    assert json.loads(output.out)["law_violations"] == 1
    assert output.err == "polyrl: law violated: at 7.0 s: a sample has two ends\n"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("fleet.worker=2", "fleet.worker: unknown key; did you mean fleet.workers?"),
        ("flet.workers=2", "flet: unknown key; did you mean fleet?"),
        ("fleet.price_usd_per_hour=-1", "fleet.price_usd_per_hour: got -1, expected a number >= 0"),
        ("rounds.prompt_factor=0.9", "rounds.prompt_factor: got 0.9, expected a number >= 1 and <= 8"),
        ("run.mode=streamed", "run.mode: got "),
        (
            "supply.events=[{at_s=9.0,workers=1},{at_s=3.0,workers=2}]",
            "supply.events.1.at_s: 3.0 comes before 9.0; events must be in order of time",
        ),
        ("supply.trace=gone.csv", "gone.csv: cannot be read: No such file or directory"),
        ("workload.trace=gone.jsonl", "gone.jsonl: cannot be read: No such file or directory"),
        ("workers", "'workers': expected section.key=value"),
    ],
)
def test_what_is_wrong_with_a_scenario_is_one_line_and_nothing_is_written(tiny, tmp_path, capsys, override, line):
    out = tmp_path / "out"
    assert line in refused(capsys, "simulate", tiny, override, "--out", str(out))
    assert not out.exists()


def test_a_supply_trace_out_of_order_names_its_line(tiny, tmp_path, capsys):
    (tmp_path / "spot.csv").write_text("at_s,workers\n10,2\n5,1\n")
    line = refused(capsys, "simulate", tiny, f"supply.trace={tmp_path / 'spot.csv'}", "--out", str(tmp_path / "out"))
    assert line == f"{tmp_path / 'spot.csv'}:3: at_s 5 comes before 10; expected order"
    assert not (tmp_path / "out").exists()


def test_two_sources_of_supply_are_refused_before_anything_is_written(tiny, tmp_path, capsys):
    (tmp_path / "spot.csv").write_text("at_s,workers\n10,2\n")
    out = tmp_path / "out"
    line = refused(
        capsys,
        "simulate",
        tiny,
        f"supply.trace={tmp_path / 'spot.csv'}",
        "supply.market_mean_s=60.0",
        "--out",
        str(out),
    )
    assert "expected one source of supply" in line
    assert not out.exists()


def test_a_missing_file_and_an_unknown_name_are_refused(tmp_path, capsys):
    assert refused(capsys, "simulate", str(tmp_path / "gone.toml")) == f"{tmp_path / 'gone.toml'}: no such file"
    assert refused(capsys, "simulate", "elastic-9b").startswith("elastic-9b: no such scenario; expected a file")
    assert refused(capsys, "simulate").startswith("expected a SCENARIO")


def test_a_folder_that_holds_something_is_never_written_into(tiny, tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    assert "exists and is not empty" in refused(capsys, "simulate", tiny, "--out", str(out))
    assert "exists and is not empty" in refused(capsys, "plan", tiny, "--out", str(out))
    assert [path.name for path in out.iterdir()] == ["mine.txt"]
    assert "is a file" in refused(capsys, "simulate", tiny, "--out", str(out / "mine.txt"))


@pytest.mark.parametrize("share", [0.5, 1.0], ids=["journal", "pictures"])
def test_a_disk_that_is_full_is_one_line_and_leaves_no_file(tiny, tmp_path, capsys, share):
    whole, out = tmp_path / "whole", tmp_path / "out"
    arguments = ["simulate", tiny, "fleet.workers=1", "--steps", "1", "--json", "--out"]
    assert main([*arguments, str(whole)]) == 0
    num_bytes = (whole / "journal.bin").stat().st_size
    assert max(path.stat().st_size for path in whole.iterdir()) > num_bytes, "a picture is larger than the journal"
    capsys.readouterr()
    with files_of_at_most(int(share * num_bytes)):
        assert main([*arguments, str(out)]) == 2
    assert capsys.readouterr().err == f"polyrl: error: --out: cannot write to {out}: File too large\n"
    assert not list(out.iterdir())
    assert main([*arguments, str(out)]) == 0, "when there is room again"


def test_a_corrupt_journal_is_refused(tiny, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["simulate", tiny, "--json", "--out", str(out)]) == 0
    capsys.readouterr()
    journal = out / "journal.bin"
    content = bytearray(journal.read_bytes())
    content[len(content) // 2] ^= 0xFF
    journal.write_bytes(content)
    assert "journal.bin: record " in refused(capsys, "replay", str(out))


@pytest.mark.parametrize(("option", "value"), [("--seed", "-1"), ("--steps", "0")])
def test_numbers_out_of_range_are_refused(tiny, capsys, option, value):
    assert f"got {value}" in refused(capsys, "simulate", tiny, option, value)


PLAN = ("--workers", "0-1", "--factors", "1,1.5", "--staleness", "0", "--steps", "3")


@pytest.mark.usefixtures("one_core")
def test_a_plan_is_a_table_with_two_recommendations(tiny, tmp_path, capsys):
    assert main(["plan", tiny, *PLAN, "--worker-price", "2.66,5.32", "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert text.startswith("tiny, seed 0: 3 steps each")
    for words in ("cheapest at $2.66", "cheapest at $5.32", "fastest", "useful workers"):
        assert words in text
    assert len(json.loads((tmp_path / "out" / "plan.json").read_text())["rows"]) == 8


@pytest.mark.usefixtures("one_core")
def test_a_plan_for_a_trainer_that_does_not_generate_tries_no_empty_fleet(tiny, capsys):
    alone = ("trainer.local_workers=0", "--factors", "1", "--staleness", "0", "--steps", "1", "--no-progress")
    assert main(["plan", tiny, *alone, "--json"]) == 0
    assert [row["workers"] for row in json.loads(capsys.readouterr().out)["rows"]] == [1, 2, 3, 4, 5, 6]
    line = refused(capsys, "plan", tiny, *alone, "--workers", "0-2")
    assert line == (
        "tiny with 0 workers, no over-provisioning, on-policy: "
        "fleet.workers: expected at least 1, since trainer.local_workers = 0"
    )


@pytest.mark.usefixtures("one_core")
def test_a_plan_with_many_prices_cuts_no_heading(tiny, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    prices = [1, 2, 3, 4, 5.32, 6, 7, 8]
    assert main(["plan", tiny, *PLAN, "--worker-price", ",".join(map(str, prices))]) == 0
    printed = capsys.readouterr().out
    assert "…" not in printed
    assert all(f"at ${price:g}" in printed for price in prices)
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.usefixtures("one_core")
def test_a_plan_says_on_stderr_how_much_it_will_play(tiny, capsys):
    assert main(["plan", tiny, *PLAN, "--json"]) == 0
    assert "planning: 4 simulations of" in capsys.readouterr().err
    assert main(["plan", tiny, *PLAN, "--json", "--no-progress"]) == 0
    assert capsys.readouterr().err == ""


def test_a_long_simulation_speaks_now_and_then_where_there_is_no_terminal(capsys):
    moments = iter([0.0, 4.0, 12.0, 13.0, 30.0, 40.0])
    log = simulate.LogProgress("simulating", 5, lambda: next(moments))
    for done in (1, 2, 3, 4, 5):
        log.show(done)
    assert capsys.readouterr().err == "polyrl: simulating: 2 of 5, 12 s\npolyrl: simulating: 4 of 5, 30 s\n"


@pytest.mark.usefixtures("one_core")
def test_a_plan_on_a_full_disk_is_one_line_and_leaves_no_file(tiny, tmp_path, capsys):
    out = tmp_path / "out"
    with files_of_at_most(100):
        assert main(["plan", tiny, *PLAN, "--json", "--no-progress", "--out", str(out)]) == 2
    assert capsys.readouterr().err == f"polyrl: error: --out: cannot write to {out}: File too large\n"
    assert not list(out.iterdir())


@pytest.mark.usefixtures("one_core")
def test_a_plan_in_json_is_one_object(tiny, capsys):
    assert main(["plan", tiny, *PLAN, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert {"rows", "cheapest", "fastest"} <= set(plan)
    assert len(plan["rows"]) == 4
    assert plan["cheapest"]["why"]
    assert plan["rows"][0]["worker_price_usd_per_hour"] == 5.32


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--workers", "2-1"),
        ("--workers", "-1"),
        ("--workers", "many"),
        ("--factors", "0.9"),
        ("--factors", "nan"),
        ("--staleness", "1.5"),
        ("--worker-price", "-2"),
        ("--worker-price", "cheap"),
    ],
)
def test_a_plan_of_the_impossible_is_refused(tiny, capsys, option, value):
    line = refused(capsys, "plan", tiny, f"{option}={value}")
    assert line.startswith(f"{option}: got ")
    assert "expected" in line
