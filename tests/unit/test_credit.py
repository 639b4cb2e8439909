"""How many samples a worker is trusted with: few at first, more with what it shows, fewer after a stall."""

from collections.abc import Callable

import pytest
from tests.unit.driver import Driver, only, small_config

from polyrl.ids import WorkerName
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.fleet import UNBOUNDED
from polyrl.scheduling.core.parameters import FleetRules
from polyrl.scheduling.parts.credit import START
from polyrl.scheduling.parts.hearing import runs_of, teaches
from polyrl.scheduling.scheduler import Scheduler


def many(*, prompts: int = 64, **others) -> Driver:
    run = Driver(small_config(prompts=prompts, samples=4, **others))
    run.begin(steps=0)
    return run


def held(run: Driver, name: str) -> list[str]:
    leases = run.scheduler.desk.leases
    return [one for one, worker in run.workers.items() if worker == name and run.leases[one] in leases]


def report(run: Driver, name: str, num_tokens: int) -> None:
    leases = tuple(run.leases[one] for one in held(run, name))
    worker = WorkerName(name)
    run.tell(e.TokensArrived(worker, run.lives[worker], leases, (num_tokens,) * len(leases)))


def test_a_worker_begins_with_few_samples_whatever_it_claims_and_a_small_one_with_all_its_slots():
    run = many()
    run.join("large", slots=1_000_000)
    run.join("small", slots=3)
    run.request(0)
    assert (len(held(run, "large")), len(held(run, "small"))) == (START, 3)


def report_gathered(run: Driver, name: str, num_tokens: int) -> None:
    """As the manager tells it: of all workers at once."""
    leases = run.scheduler.desk.leases
    gains = [(run.leases[one], num_tokens - leases[run.leases[one]].num_tokens) for one in held(run, name)]
    seat = run.scheduler.desk.state.fleet.by_name[WorkerName(name)]
    run.tell(e.FleetReported((seat,), (0,), ((0, *runs_of(gains)),)))


@pytest.mark.parametrize("tell", [report, report_gathered])
def test_every_report_of_progress_doubles_it_until_its_slots_are_reached(tell: Callable[[Driver, str, int], None]):
    run = many()
    run.join("a", slots=100)
    run.request(0)
    seen = [len(held(run, "a"))]
    for number in range(1, 6):
        tell(run, "a", number)
        seen.append(len(held(run, "a")))
    assert seen == [8, 16, 32, 64, 100, 100]


def test_progress_of_a_worker_that_may_earn_more_is_worth_telling():
    run = many()
    run.join("a", slots=100)
    run.request(0)
    (worker,) = run.scheduler.desk.seats.values()
    assert teaches(worker, 0)
    worker.earned = UNBOUNDED
    assert not teaches(worker, 0)


def test_a_report_without_a_new_token_earns_nothing():
    run = many()
    run.join("a", slots=100)
    run.request(0)
    report(run, "a", 0)
    assert len(held(run, "a")) == START


def test_every_answer_earns_one_more():
    run = many()
    run.join("a", slots=100)
    run.request(0)
    run.finish(*held(run, "a"))
    assert len(held(run, "a")) == 2 * START


def test_claimed_slots_do_not_make_a_worker_look_idle():
    """By its claim, a worker with eight of a million is emptier than one with one of eight."""
    run = many(prompts=3)
    run.join("honest", slots=8)
    run.join("claims", slots=1_000_000)
    run.request(0)
    assert len(held(run, "claims")) == len(held(run, "honest")) == 6


def test_the_trainers_own_worker_is_trusted_from_the_start():
    run = many()
    run.join("local", slots=100, local=True)
    run.request(0)
    assert len(held(run, "local")) == 100


def test_a_worker_that_stalls_begins_with_less_and_is_sent_away_in_the_end():
    run = many(fleet_rules=FleetRules(stall_timeout_s=10.0, max_failures=3))
    run.request(0)
    seen, may_rejoin = [], []
    for _ in range(3):
        run.join("sits", slots=1000)
        seen.append(len(held(run, "sits")))
        (forgotten,) = only(run.wait(25.0), c.ForgetWorker)
        may_rejoin.append(forgotten.rejoin)
    assert seen == [8, 2, 1]
    assert may_rejoin == [True, True, False]


@pytest.mark.parametrize("slots", [1, 2, 8, 1000])
def test_an_answer_forgives_all_stalls_before_it_however_much_was_earned_meanwhile(slots: int):
    run = many(prompts=512, fleet_rules=FleetRules(stall_timeout_s=10.0, max_failures=3))
    run.request(0)
    for _ in range(5):
        run.join("a", slots=slots)
        for number in range(1, 12):
            report(run, "a", number)
        run.finish(held(run, "a")[0])
        (forgotten,) = only(run.wait(45.0), c.ForgetWorker)
        assert forgotten.rejoin


@pytest.mark.parametrize("rules", [0, 1])
def test_a_run_of_earlier_rules_is_replayed_by_them(rules: int):
    scheduler = Scheduler(small_config(prompts=64, samples=4), rules=rules)
    scheduler.handle(e.VersionPublished(0), 0.0)  # type: ignore[arg-type]
    scheduler.handle(e.WorkerJoined("a", 1, slots=100, version=0), 0.0)  # type: ignore[arg-type]
    commands = scheduler.handle(e.RoundRequested(0), 0.0)  # type: ignore[arg-type]
    assert sum(isinstance(one, c.Generate) for one in commands) == (START if rules else 100)
