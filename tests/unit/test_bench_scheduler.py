"""`polyrl bench scheduler`: it runs, says what was asked for, and its world does what it claims."""

import contextlib
import io
import json

import pytest

from polyrl.bench.scheduler import table
from polyrl.bench.world import PlayedLoad, World
from polyrl.cli.main import main
from polyrl.scheduling.invariants import check


@pytest.fixture(scope="module")
def result():
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["bench", "scheduler", "--quick", "--json"]) == 0
    return json.loads(printed.getvalue())


def test_the_json_has_the_promised_keys(result):
    for key in ("events_per_s", "cost_ratio_1000_to_10_workers", "bytes_per_sample", "lease_updates_per_s"):
        assert result[key] > 0
    assert {"cpu", "python"} <= set(result["machine"])
    assert "commit" in result
    assert result["gc"].startswith("on")


def test_every_kind_of_event_of_a_live_run_is_in_the_mix(result):
    kinds = set(result["events_by_type"])
    assert kinds == set(result["us_per_event"]) == set(result["share_of_time"])
    assert kinds >= {
        *("TokensArrived", "WorkerReported", "SampleFinished", "RewardFinished", "GroupsTaken", "MicroBatchTrained"),
        *("StepTrained", "VersionPublished", "RoundRequested", "WeightsInstalled", "TimePassed", "WorkerLeft"),
    }
    assert sum(result["events_by_type"].values()) == result["events"]


def test_the_table_names_the_goals(result):
    out = "\n".join(table(result))
    assert "goal: at least 100,000" in out
    assert "goal: below 2,048" in out


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_the_world_keeps_the_laws_and_trains_its_steps(max_staleness):
    load = PlayedLoad(4, 32, num_prompts=20, num_steps=3, max_staleness=max_staleness, lose_every_s=20.0)
    world = World(load)
    while not world.is_over:
        world.play_second()
        check(world.scheduler, world.now)
        assert world.now < 10_000
    assert world.scheduler.ledger.prompts_trained == 60
