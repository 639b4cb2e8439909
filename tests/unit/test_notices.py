"""A worker that was told when its machine goes works on until it must hand over."""

from tests.unit.driver import Driver, leased, only, small_config

from polyrl.ids import WorkerName
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.parameters import FleetRules


def begun(**others) -> Driver:
    """A run whose one sample is on `a`, at token 100, with `b` beside it."""
    run = Driver(small_config(prompts=1, samples=1, **others))
    run.begin()
    run.join("a")
    run.bring("a", s1_0=100)
    run.join("b")
    return run


def handed_over(said) -> list[str]:
    return [one.worker for one in only(said, c.HandOver)]


def test_a_worker_with_a_notice_works_on_and_hands_over_the_margin_before_it_goes():
    run = begun()
    assert run.drain("a", notice_s=60.0) == []
    assert not handed_over(run.wait(57.9))
    assert handed_over(run.wait(0.2)) == ["a"]
    said = run.end("1/0", at=500)
    assert leased(said) == {"1/0": ("b", 500)}
    assert [one.worker for one in only(said, c.ReleaseWorker)] == ["a"]
    run.leave("a")
    assert run.ledger.workers[WorkerName("a")].num_losses == 0


def test_the_margin_is_a_key():
    run = begun(fleet_rules=FleetRules(leave_margin_s=20.0))
    run.drain("a", notice_s=60.0)
    assert not handed_over(run.wait(39.9))
    assert handed_over(run.wait(0.2)) == ["a"]


def test_what_ends_before_the_machine_goes_is_not_moved():
    run = begun()
    run.drain("a", notice_s=60.0)
    run.wait(20.0)
    run.finish("1/0", at=300)
    assert not handed_over(run.wait(45.0))
    assert [one.worker for one in only(run.said, c.ReleaseWorker)] == ["a"]


def test_a_notice_shorter_than_the_margin_hands_over_at_once():
    assert handed_over(begun().drain("a", notice_s=1.5)) == ["a"]


def test_a_notice_that_is_no_time_hands_over_at_once():
    for notice_s in (0.0, -3.0, float("inf"), float("nan")):
        assert handed_over(begun().drain("a", notice_s=notice_s)) == ["a"]


def test_a_worker_gets_samples_until_moving_them_again_would_cost_what_it_writes():
    run = Driver(small_config(prompts=1, samples=1))
    run.begin()
    run.join("a")
    run.drain("a", notice_s=60.0)
    assert run.scheduler.desk.router.valid_seats() == [1]
    run.wait(52.0)
    assert run.scheduler.desk.router.valid_seats() == [1]
    run.wait(1.0)  # 2 s of margin, 0.5 s for a move and 5 s that it must bring
    assert run.scheduler.desk.router.valid_seats() == []
    assert run.scheduler.desk.seats[1].state == "active"


def test_a_notice_that_is_said_again_counts_as_it_is_said_last():
    run = begun()
    run.drain("a", notice_s=60.0)
    run.wait(30.0)
    run.drain("a", notice_s=60.0)
    assert not handed_over(run.wait(57.0))
    assert handed_over(run.drain("a")) == ["a"]


def test_a_machine_that_goes_does_not_wait_for_a_driver_that_was_away():
    run = begun()
    run.drain("a", notice_s=60.0)
    run.now += 50.0
    run.tell(e.DriverResumed(away_s=50.0, grace_s=0.0))
    assert handed_over(run.wait(8.1)) == ["a"]


def test_a_worker_that_goes_soon_does_not_get_what_another_failed_either():
    run = begun()
    run.drain("b", notice_s=6.0)
    assert leased(run.end("1/0", at=100, reason="engine_failed")) == {"1/0": ("a", 100)}
