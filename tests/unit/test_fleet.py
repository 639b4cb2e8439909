"""Who is there, in which life, how many on average, and how fast they were seen to be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.driver import Driver, leased, only, small_config
from tests.unit.workers import worker

from polyrl.ids import Incarnation, WorkerName
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.fleet import FleetState, Speed, settle
from polyrl.scheduling.core.ledger import Ledger


def test_news_is_of_that_very_life_or_of_nobody():
    fleet = FleetState()
    fleet.add(worker(1), 0.0)
    assert fleet.find(WorkerName("w1"), Incarnation(1)) is fleet.seats[1]
    assert fleet.find(WorkerName("w1"), Incarnation(2)) is None
    assert fleet.find(WorkerName("w2"), Incarnation(1)) is None


def test_the_mean_number_of_workers_is_weighted_by_time():
    fleet = FleetState()
    first, second = worker(1), worker(2)
    fleet.add(first, 0.0)
    fleet.add(second, 6.0)
    fleet.remove(first, 8.0)
    assert fleet.mean_remote(10.0) == pytest.approx((6 * 1 + 2 * 2 + 2 * 1) / 10)
    fleet.restart_mean(10.0)
    assert fleet.mean_remote(10.0) == fleet.mean_remote(12.0) == 1.0


def test_a_draining_worker_counts_no_more_and_is_not_subtracted_twice():
    fleet = FleetState()
    one = worker(1)
    fleet.add(one, 0.0)
    fleet.start_drain(one, 5.0)
    assert fleet.num_remote == 0
    fleet.remove(one, 8.0)
    assert fleet.num_remote == 0
    assert fleet.mean_remote(10.0) == 0.5


def test_a_local_worker_is_not_one_of_the_fleet():
    fleet = FleetState()
    fleet.add(worker(1, local=True), 0.0)
    assert fleet.num_remote == 0
    assert [one.seat for one in fleet.local()] == [1]


def test_seconds_go_to_what_the_worker_did():
    ledger = Ledger()
    ledger.worker_line(WorkerName("w1"), 2.0)
    one = worker(1)
    settle(one, ledger, 4.0)
    one.state = "draining"
    settle(one, ledger, 5.5)
    settle(one, ledger, 5.5)
    assert ledger.workers[WorkerName("w1")].seconds == {"idle": 4.0, "draining": 1.5}


def line(fixed_s: float, per_sample_s: float, *, sizes=(1, 2, 4, 8, 16, 32), times: int = 8) -> Speed:
    speed = Speed()
    for num in list(sizes) * times:
        speed.observe(num, fixed_s + per_sample_s * num)
    return speed


def test_a_steps_time_is_found_again_where_it_was_seen_and_in_between():
    speed = line(0.02, 0.001)
    for num in (1, 3, 8, 12, 20, 32):
        assert speed.step_s(num) == pytest.approx(0.02 + 0.001 * num, rel=1e-6)


def test_nothing_is_said_of_a_speed_that_was_not_seen():
    assert Speed().step_s(4) is None


def test_one_slow_step_hardly_counts_since_pauses_only_add_time():
    speed = line(0.02, 0.001)
    speed.observe(8, 0.5)
    assert speed.step_s(8) == pytest.approx(0.028, rel=0.6)
    speed.observe(8, 0.028)
    assert speed.step_s(8) == pytest.approx(0.028, rel=0.45)


@given(st.floats(0.001, 0.1), st.floats(0.0, 0.01), st.integers(1, 64), st.integers(1, 64))
def test_more_samples_never_make_a_step_faster(fixed_s, per_sample_s, first, second):
    speed = line(fixed_s, per_sample_s)
    few, many = sorted((first, second))
    at_few, at_many = speed.step_s(few), speed.step_s(many)
    assert at_few is not None and at_many is not None
    assert at_few <= at_many + 1e-12


def test_a_worker_goes_from_waiting_to_pulling_to_active_to_draining_to_gone():
    run = Driver(small_config(prompts=1, samples=1))
    run.join("a", ready=False)
    assert run.state("a") == "waiting"
    run.begin()
    assert run.state("a") == "pulling"
    run.install("a")
    assert run.state("a") == "active"
    assert only(run.drain("a"), c.HandOver)
    assert run.state("a") == "draining"
    assert only(run.end("1/0", at=3), c.ReleaseWorker)
    run.leave("a")
    assert run.scheduler.desk.seats == {}


def report(run, one, num_waiting):
    run.tell(e.WorkerReported(one.name, one.incarnation, num_waiting=num_waiting))


def test_an_engine_that_holds_samples_back_gets_fewer_and_then_slowly_more():
    run = Driver(small_config(prompts=10, samples=1))
    run.begin()
    run.join("a", slots=8)
    one = run.scheduler.desk.seats[1]
    assert (len(one.leases), one.plateau) == (8, 8)
    report(run, one, 3)
    run.bring("a", s1_0=4)
    report(run, one, 3)
    assert one.plateau == 5
    assert not leased(run.finish("1/0", "2/0", "3/0"))
    assert len(leased(run.finish("4/0"))) == 1
    report(run, one, 0)
    assert one.plateau == 6


def test_samples_that_wait_for_prompts_to_be_computed_say_nothing_about_an_engine():
    run = Driver(small_config(prompts=10, samples=1))
    run.begin()
    run.join("a", slots=8)
    one = run.scheduler.desk.seats[1]
    report(run, one, 7)  # the first prompt
    report(run, one, 7)  # it compiles: no token came between the two
    assert (one.plateau, one.num_waiting) == (8, 0)
    run.bring("a", s1_0=4)
    report(run, one, 4)  # it takes more and more of them in
    run.bring("a", s1_0=8)
    report(run, one, 1)
    assert (one.plateau, one.num_waiting) == (8, 0)
    run.bring("a", s1_0=12)
    report(run, one, 1)  # and now no more
    assert (one.plateau, one.num_waiting) == (7, 1)
