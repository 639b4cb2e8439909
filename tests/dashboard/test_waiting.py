"""Where a run's time goes, and the sentences about the part that holds it up."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace
from tests.dashboard.test_alarms import STATUS
from tests.properties.hostile import play
from tests.telemetry.test_account import write_journal
from tests.telemetry.test_metrics import a_line

from polyrl.dashboard.waiting import WORDS, TimePart, TimeUse, WaitingContext, doing, seconds_a_step, slowest
from polyrl.dashboard.watched import WatchedRun
from polyrl.journal.files import FILE_NAME
from polyrl.scheduling.core.desk import Desk
from polyrl.wire.control import EnvironmentStatus, RewardsStatus, WaitStatus


def desk(*, busy: bool = False, validates: bool = False, paused: bool = False, **of_round: Any) -> Desk:
    """Return as much of a scheduler's state as is looked at."""
    told = {"num_waiting": 0, "num_leased": 0, "num_playing": 0, "num_unhosted": 0, "num_delivered": 0}
    round_ = SimpleNamespace(**{**told, "quotas": [4], "num_planned": 32, **of_round})
    scoring = {1: 0.0} if of_round.get("scored") else {}
    writers = of_round.get("writers", 1)
    clock = SimpleNamespace(validating_since=0.0 if validates else None, busy_since=0.0 if busy else None)
    seats = {number: SimpleNamespace(may_generate=True, leases={}) for number in range(writers)}
    local = [SimpleNamespace(may_generate=True, leases={1: None})] if of_round.get("own") else []
    fleet = SimpleNamespace(local=lambda: local)
    state = SimpleNamespace(clock=clock, paused=paused, fleet=fleet)
    hosts = SimpleNamespace(seats={})
    rounds = {} if of_round.get("none") else {0: round_}
    found = SimpleNamespace(
        state=state, rounds=rounds, seats=seats, hosts=hosts, scoring=SimpleNamespace(running=scoring, queue=[])
    )
    return cast(Desk, found)


@pytest.mark.parametrize(
    ("of", "what"),
    [
        ({"busy": True}, "trains"),
        ({"validates": True}, "validates"),
        ({"none": True}, "updates"),
        ({"num_delivered": 4}, "updates"),
        ({"paused": True, "num_waiting": 3}, "pause"),
        ({"num_waiting": 3, "writers": 0}, "no worker"),
        ({"num_waiting": 3, "num_leased": 5}, "places"),
        ({"num_unhosted": 3}, "no host"),
        ({"num_playing": 3}, "environments"),
        ({"num_leased": 30}, "answers"),
        ({"num_leased": 8}, "last answers"),
        ({"scored": True}, "rewards"),
        ({"own": True, "num_leased": 8}, "writes"),
    ],
)
def test_every_moment_has_one_word(of: dict[str, Any], what: str):
    assert doing(desk(**of)) == what
    assert what in WORDS


def test_the_parts_of_the_time_are_seconds_shares_and_dollars():
    use = TimeUse()
    use.mark(desk(scored=True), 10.0)
    use.mark(desk(busy=True), 40.0)
    waits, trains = use.parts([], 10.0, 50.0, usd=8.0)
    assert (waits.name, waits.seconds, waits.share, waits.usd) == ("rewards", 30.0, 0.75, 6.0)
    assert (trains.name, trains.seconds, trains.share, trains.usd) == ("trains", 10.0, 0.25, 2.0)


def part(name: str, seconds: float, of: float = 100.0, usd: float = 0.0) -> TimePart:
    return TimePart(name, WORDS[name], seconds, seconds / of, usd, seconds)


def test_a_run_that_trains_has_nothing_that_holds_it_up():
    assert slowest([], WaitingContext()) is None
    assert slowest([part("trains", 60.0), part("writes", 40.0)], WaitingContext()) is None
    assert slowest([part("trains", 80.0), part("rewards", 20.0)], WaitingContext()) is None
    assert slowest([part("rewards", 0.3, of=0.4), part("trains", 0.1, of=0.4)], WaitingContext()) is None


def test_what_holds_it_up_is_said_with_why_what_it_costs_and_what_to_do():
    around = WaitingContext(
        STATUS, [a_line()], join="polyrl worker --join URL", recipe={"validation": {"every_steps": 1}}
    )
    for name in WORDS:
        found = slowest([part(name, 60.0, usd=2.0), part("trains", 40.0)], around)
        if found is None:
            assert name in ("trains", "writes")
            continue
        assert "60% of the trainer's time" in found.what and found.why and found.do
        assert found.costs == "60.0 s of the last 100 s, and $2.00 of what they cost: $72.00 an hour"
    validates = slowest([part("validates", 90.0)], around)
    assert validates is not None and validates.why.startswith("after every step, all validation prompts")
    gone = slowest([part("no worker", 90.0)], around)
    assert gone is not None and gone.run == "polyrl worker --join URL"


def test_short_steps_are_held_up_too_and_what_it_takes_to_the_end_is_reckoned():
    waits = TimePart("answers", WORDS["answers"], 2.3, 0.58, 0.01, 0.23)
    recipe = {"train": {"steps": 101, "mode": "streaming"}}
    found = slowest([waits], WaitingContext(STATUS, [replace(a_line(), step=0)], recipe=recipe))
    assert found is not None and found.costs.endswith("; at this pace 23.0 s and $0.10 more by the last step")
    assert found.do.startswith('train.mode = "async" ("streaming" now) trains meanwhile')


def test_advice_on_validation_says_what_a_rarer_one_would_take():
    recipe = {"validation": {"every_steps": 1, "num_prompts": 256}}
    found = slowest([part("validates", 40.0)], WaitingContext(STATUS, [a_line()], recipe=recipe))
    assert found is not None and "validation.num_prompts (256 now)" in found.do
    assert "validation.every_steps (1 now): 10 would make it 6% of the time in place of 40%" in found.do
    rare = WaitingContext(STATUS, [a_line()], recipe={"validation": {"every_steps": 20}})
    found = slowest([part("validates", 40.0)], rare)
    assert found is not None and "(20 now): 40 would make it 25% of the time" in found.do


def test_advice_on_rewards_says_how_long_one_takes_and_proposes_a_number_of_processes():
    lines = [replace(a_line(), num_samples=100)]
    around = WaitingContext(STATUS, lines, recipe={"rewards": {"processes": 2}})
    found = slowest([part("rewards", 80.0)], around)
    assert found is not None and "a step waits 80.0 s for 100 of them and rewards.processes = 2" in found.why
    assert "one takes about 1.6 s" in found.why
    assert "rewards.processes (2 now): with 8, a step would wait 20.0 s in place of 80.0 s" in found.do


def test_what_helps_against_a_long_tail_is_ranked_with_its_price_and_the_cap():
    lines = [replace(a_line(), longest=400), replace(a_line(), longest=300)]
    recipe: dict[str, Any] = {"rollout": {"max_new_tokens": 400}, "rounds": {"tail_batching": "off"}}
    found = slowest([part("last answers", 40.0)], WaitingContext(STATUS, lines, recipe=recipe))
    assert found is not None and "the cap, rollout.max_new_tokens = 400, in 1 of the last 2 steps" in found.why
    assert found.do.startswith("1. rounds.tail_batching (off now)") and "; 2. train.mode" in found.do
    assert "; 3. a lower rollout.max_new_tokens (400 now)" in found.do
    recipe = {"train": {"mode": "async"}, "rounds": {"tail_batching": "short"}}
    found = slowest([part("last answers", 40.0)], WaitingContext(STATUS, lines, recipe=recipe))
    assert found is not None and found.do.startswith("a lower rollout.max_new_tokens")


def test_without_a_worker_the_last_loss_is_told_and_who_reaches_the_address():
    status = replace(STATUS, workers=(), ledger={"workers_joined": 2, "workers_lost": 2})
    around = WaitingContext(status, [a_line()], join="polyrl worker --join http://127.0.0.1:5000", last_loss="silent")
    found = slowest([part("no worker", 90.0)], around)
    assert found is not None and found.run == around.join and "127.0.0.1 is this one alone" in found.do
    assert found.why.startswith("0 workers are there now; a worker joined 2 times, and was lost 2 times, the last")
    assert found.why.endswith("because: silent") and "last step" not in found.costs


def test_a_worker_that_pulls_is_named_where_no_worker_could_write():
    pulling = replace(STATUS.workers[0], state="pulling", pulling=174)
    waits = (WaitStatus(what="pull", of="w1", age_s=4.4, given_up_in_s=900.0),)
    status = replace(STATUS, workers=(pulling,), published=190, waits=waits)
    found = slowest([part("no worker", 90.0)], WaitingContext(status, [a_line()]))
    assert found is not None and "w1 has been pulling version 174 for 4.4 s" in found.why
    assert "the trainer is 16 versions further" in found.why and found.do.startswith("have more workers join")


def test_the_seconds_of_a_step_are_those_that_pass_with_waits_and_validation():
    lines = [replace(a_line(), trained_at=10.0 * place, step_s=1.0) for place in range(20)]
    assert seconds_a_step(lines) == 10.0
    assert seconds_a_step(lines[:1]) is None


@pytest.mark.parametrize("name", ["updates", "validates"])
def test_what_comes_before_a_first_step_holds_nothing_up(name: str):
    assert slowest([part(name, 90.0)], WaitingContext(STATUS)) is None


def test_a_slow_environment_is_named_with_the_time_of_its_turns_and_whether_places_are_missing():
    slow = EnvironmentStatus(
        name="mine:Browser", places=128, playing=128, waiting=0, turn_p50_s=2.0, turn_p99_s=30.0, turn_limit_s=600.0,
        episode_limit_s=3600.0,
    )  # fmt: skip
    found = slowest([part("environments", 90.0)], WaitingContext(replace(STATUS, environments=[slow])))
    assert found is not None and "a turn of mine:Browser takes 2.0 s (median; p99 30.0 s)" in found.why
    assert found.do.startswith("see what its tools wait for") and "async" in found.do
    crowded = [replace(slow, places=64, waiting=64)]
    found = slowest([part("environments", 90.0)], WaitingContext(replace(STATUS, environments=crowded)))
    assert found is not None and "plays more at once: 64 episodes wait for a place" in found.do


def test_a_slow_worker_is_named_where_steps_wait_for_the_last_answers():
    found = slowest([part("last answers", 90.0)], WaitingContext(STATUS, slow_workers=["w3"], run_dir="runs/x"))
    assert found is not None and "on w3" in found.why and found.run == "polyrl drain w3 --run-dir runs/x"


def test_a_reward_function_is_named_also_while_no_call_of_it_runs(tmp_path):
    """Between steps nothing is scored; the name stays, and so it does when the run is over."""
    (tmp_path / "recipe.toml").write_text('[data]\nreward = "mine:slow"\n')
    write_journal(tmp_path / FILE_NAME, play(4, num_events=100))
    run = WatchedRun(tmp_path, live=False)
    run.start()
    assert run.follower.wait(20.0)
    assert run.context().reward_function == "mine:slow", "the recipe names it"
    busy = RewardsStatus(running=2, timeout_s=100.0, longest_s=3.0, function="mine:slower", failed=0, why="")
    quick = replace(busy, longest_s=0.2, function="mine:quick")
    idle = replace(busy, running=0, longest_s=0.0, function="")
    for told in (busy, quick, idle):
        run.tell(replace(STATUS, rewards=told))
        assert run.context().reward_function == "mine:slower"
    found = slowest([part("rewards", 90.0)], run.context())
    assert found is not None and "the reward function mine:slower scores them" in found.why
