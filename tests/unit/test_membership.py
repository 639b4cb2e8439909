"""Workers and their weights, told to a whole scheduler: what pure rules alone cannot show."""

import pytest
from tests.unit.driver import Driver, leased, only, small_config

from polyrl.ids import Step, Version, WorkerName
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.parameters import FleetRules, WeightDeliveryConfig
from polyrl.scheduling.parts import membership
from polyrl.scheduling.scheduler import Scheduler

ONE_UPLOAD = WeightDeliveryConfig(trainer_uploads=1)


def publish(run: Driver, version: int) -> list[c.Command]:
    return run.tell(e.VersionPublished(Version(version)))


def sources(run: Driver) -> dict[str, str]:
    seats = run.scheduler.desk.seats
    return {
        one.name: "trainer" if one.source == -1 else seats[one.source].name
        for one in seats.values()
        if one.pulling >= 0
    }


def test_a_worker_that_lost_its_source_is_not_sent_to_one_that_pulls_from_it():
    """Found by a reviewer: w4 from w1 from w5 from w4, and all laws held."""
    run = Driver(small_config(weight_delivery=ONE_UPLOAD, max_staleness=0))
    publish(run, 0)
    for number in range(1, 6):
        run.join(f"w{number}", ready=False)
    run.tell(e.WeightsFailed(WorkerName("w1"), run.lives[WorkerName("w1")], Version(0), "a bad chunk"))
    run.wait(2.5)
    run.leave("w3")
    fed = sources(run)
    for name in fed:
        seen = [name]
        while seen[-1] in fed:
            assert fed[seen[-1]] not in seen, f"a circle: {seen}"
            seen.append(fed[seen[-1]])
        assert seen[-1] == "trainer"


def test_a_peer_that_has_only_the_old_version_is_not_asked_for_the_new_one():
    run = Driver(small_config(weight_delivery=ONE_UPLOAD, max_staleness=4))
    publish(run, 0)
    run.join("w1")
    run.join("w2", ready=False)
    publish(run, 1)
    pulls = only(run.join("w3", ready=False), c.PullWeights)
    assert all(one.source is None for one in pulls if one.version == 1)


def test_a_peer_that_failed_may_be_asked_again_for_the_next_version():
    run = Driver(small_config(weight_delivery=ONE_UPLOAD, fleet_rules=FleetRules()))
    publish(run, 0)
    run.join("w1")
    run.scheduler.desk.seats[1].accused_by = [WorkerName("x"), WorkerName("y")]
    assert not run.scheduler.desk.seats[1].may_relay
    publish(run, 1)
    assert run.scheduler.desk.seats[1].may_relay


def test_no_lease_number_is_given_again_that_a_driver_may_have_given_and_lost_with_its_machine():
    """It wrote down what it did up to here, gave leases, and lost power before they were on the disk."""
    run = Driver()
    run.begin()
    before = run.scheduler.save()
    run.join("a")
    lost = set(run.leases.values())
    assert len(lost) == 4
    run.scheduler = run.scheduler.load(before)
    run.tell(e.DriverResumed(1.0, 10.0))
    run.join("b")
    assert len(run.leases) == 4
    assert lost.isdisjoint(run.leases.values())


# The driver was away


def go_away(run: Driver, away_s: float, *, survivors: tuple[str, ...] = ()) -> list[c.Command]:
    """The driver is killed, and back after so long; workers that died meanwhile are never heard of again."""
    run.beating = [WorkerName(name) for name in survivors]
    run.now += away_s
    return run.tell(e.DriverResumed(away_s, 10.0))


def paid(run: Driver, name: str) -> dict[str, float]:
    return {what: round(seconds, 6) for what, seconds in run.ledger.workers[WorkerName(name)].seconds.items()}


def test_a_worker_that_died_while_the_driver_was_away_is_paid_until_the_absence_began():
    run = Driver()
    run.begin()
    run.join("a", price_usd_per_hour=36.0)
    run.wait(8.0)
    go_away(run, 1000.0)
    assert only(run.wait(60.0), c.ForgetWorker)[0].why == "no heartbeat"
    assert paid(run, "a") == {"generating": 8.0, "starting": 0.0}
    assert round(run.ledger.workers[WorkerName("a")].usd, 6) == 0.08


def test_a_worker_that_is_heard_of_again_is_paid_for_the_absence_too():
    run = Driver()
    run.begin()
    run.join("a")
    run.wait(8.0)
    go_away(run, 100.0, survivors=("a",))
    run.wait(2.0)
    run.finish("1/0", "1/1", "2/0", "2/1")
    assert paid(run, "a") == {"generating": 110.0, "starting": 0.0}


def test_after_an_absence_samples_and_weights_go_only_to_workers_that_were_heard_of_since():
    run = Driver(small_config(max_staleness=1))
    run.begin()
    run.join("a")
    run.complete(1, 2)
    run.take(0, 1, 2)
    go_away(run, 100.0)
    run.tell(e.StepTrained(Step(0)))
    assert only(publish(run, 1), c.PullWeights) == []
    assert leased(run.request(1)) == {}
    assert len(leased(run.tell(e.WorkerReported(WorkerName("a"), run.lives[WorkerName("a")])))) == 4
    assert [one.worker for one in only(run.said, c.PullWeights)][-1] == "a"


def test_after_an_absence_others_go_on_with_samples_of_a_worker_that_is_not_heard_of_before_it_is_given_up():
    run = Driver()
    run.begin()
    run.join("dead")
    run.bring("dead", s1_0=20)
    go_away(run, 100.0)
    run.wait(5.0)
    said = run.join("t", local=True) + run.wait(1.5)
    assert leased(said)["1/0"] == ("t", 20)
    assert WorkerName("dead") in run.scheduler.desk.state.fleet.by_name


def test_no_second_of_a_name_is_paid_twice_when_a_new_process_was_started_before_the_old_one_was_missed():
    run = Driver()
    run.begin()
    run.join("a", starting_s=5.0)
    run.wait(10.0)
    run.silence("a")
    run.wait(2.0)
    run.join("a", starting_s=4.0)
    run.wait(1.0)
    run.leave("a")
    assert paid(run, "a") == {"starting": 5.0, "generating": 13.0}


def test_after_an_absence_a_new_process_is_paid_from_its_start():
    run = Driver()
    run.begin()
    run.join("a")
    run.wait(10.0)
    go_away(run, 100.0)
    run.wait(1.0)
    run.join("a", starting_s=4.0)
    assert paid(run, "a") == {"starting": 4.0, "generating": 10.0}


def test_a_worker_that_died_while_it_drained_is_lost_also_when_its_samples_were_taken_back_meanwhile():
    run = Driver()
    run.begin()
    run.join("a")
    run.drain("a")
    go_away(run, 100.0)
    run.tell(e.VersionReplaced(Version(0)))
    run.wait(60.0)
    assert WorkerName("a") not in run.scheduler.desk.state.fleet.by_name
    assert run.ledger.workers[WorkerName("a")].num_losses == 1


# An engine that dies and comes back while its worker stays


def down(run: Driver, name: str) -> list[c.Command]:
    return run.tell(e.EngineDown(WorkerName(name), run.lives[WorkerName(name)], "it was killed"))


def back(run: Driver, name: str, version: int | None) -> list[c.Command]:
    held = None if version is None else Version(version)
    return run.tell(e.EngineBack(WorkerName(name), run.lives[WorkerName(name)], held))


def test_a_worker_whose_engine_is_down_gets_no_samples_and_no_weights_and_stays():
    run = Driver(small_config(max_staleness=4))
    run.begin()
    run.join("a")
    down(run, "a")
    assert leased(run.end("1/0", at=7, reason="engine_failed")) == {}
    assert only(publish(run, 1), c.PullWeights) == []
    run.wait(60.0)
    assert run.sample("1/0").state == "waiting"
    assert WorkerName("a") in run.scheduler.desk.state.fleet.by_name
    assert leased(run.join("b"))["1/0"] == ("b", 7)


@pytest.mark.parametrize("says_so", [True, False])
def test_an_engine_that_dies_again_and_again_without_an_answer_between_costs_its_worker_its_place(says_so: bool):
    run = Driver(small_config(prompts=1, samples=2))
    run.begin()
    run.join("a")
    for _ in range(membership.MOST_DEATHS - 1):
        if says_so:
            down(run, "a")
        back(run, "a", 0)
    run.finish("1/0", at=3)
    assert run.scheduler.desk.seats[1].num_deaths == 0, "an answer clears it"
    for _ in range(membership.MOST_DEATHS):
        assert WorkerName("a") in run.scheduler.desk.state.fleet.by_name
        if says_so:
            down(run, "a")
        back(run, "a", 0)
    (forgotten,) = only(run.said, c.ForgetWorker)
    assert forgotten.why == "its engine died 8 times with samples, and it brought no answer between"
    assert not forgotten.rejoin


def test_the_death_of_an_engine_is_counted_against_neither_its_worker_nor_samples_that_it_was_writing():
    run = Driver(small_config(prompts=1, samples=8, fleet_rules=FleetRules(max_failures=1)))
    run.begin()
    run.join("a")
    down(run, "a")
    for index in range(8):
        run.end(f"1/{index}", at=3, reason="engine_failed")
    assert WorkerName("a") in run.scheduler.desk.state.fleet.by_name
    assert all(run.sample(f"1/{index}").state == "waiting" for index in range(8))
    assert len(leased(back(run, "a", 0))) == 8


def test_a_sample_that_kills_every_engine_at_its_first_step_is_given_up():
    run = Driver(small_config(prompts=1, samples=1, fleet_rules=FleetRules(max_failures=2)))
    run.begin()
    run.join("a")
    for _ in range(2):
        down(run, "a")
        run.end("1/0", at=0, reason="engine_failed")
        back(run, "a", 0)
    assert run.ledger.moves["engine_failed"] == 2
    assert run.ledger.samples_discarded == {"failed": 1}


def test_an_engine_that_is_back_with_an_older_version_fetches_the_newest_before_it_writes():
    run = Driver(small_config(max_staleness=0))
    run.begin()
    run.join("a")
    publish(run, 1)
    run.install("a", 1)
    down(run, "a")
    assert [one.version for one in only(back(run, "a", 0), c.PullWeights)] == [1]
    run.install("a", 1)
    assert run.scheduler.desk.seats[1].version == 1


def test_leases_that_a_dead_engine_never_ended_are_taken_back_when_it_is_there_again():
    run = Driver()
    run.begin()
    run.join("a")
    down(run, "a")
    said = back(run, "a", None)
    assert len(only(said, c.Abort)) == 4
    assert run.state("a") == "pulling"
    assert len(leased(run.install("a"))) == 4


# A version that is another than it was


def replaced(run: Driver, version: int) -> list[c.Command]:
    return run.tell(e.VersionReplaced(Version(version)))


def test_who_holds_a_version_that_is_replaced_gives_its_samples_back_and_fetches_it_anew():
    run = Driver(small_config(max_staleness=4))
    run.begin()
    run.join("a")
    run.join("b")
    publish(run, 1)
    run.install("a", 1)
    said = replaced(run, 1)
    assert {one.worker for one in only(said, c.Abort)} <= {"a"} and len(only(said, c.Abort)) > 0
    assert run.ledger.moves["replaced"] == len(only(said, c.Abort))
    assert {(one.worker, one.version) for one in only(said, c.PullWeights)} == {("a", 1), ("b", 1)}
    assert run.state("a") == "pulling" and run.scheduler.desk.seats[1].version == -1
    run.install("a", 1)
    assert run.state("a") == "active" and run.scheduler.desk.seats[1].version == 1


def test_who_holds_another_version_than_the_replaced_one_goes_on():
    run = Driver(small_config(max_staleness=4))
    run.begin()
    run.join("a")
    publish(run, 1)
    run.install("a", 1)
    publish(run, 2)
    assert only(replaced(run, 2), c.Abort) == []
    assert run.scheduler.desk.seats[1].version == 1 and run.state("a") == "active"


def test_a_local_worker_has_what_the_trainer_has_and_begins_its_samples_anew():
    run = Driver(small_config())
    run.begin()
    run.join("t", local=True)
    said = replaced(run, 0)
    assert len(only(said, c.Abort)) == 4 and only(said, c.PullWeights) == []
    assert len(only(said, c.Generate)) == 4


def test_a_worker_that_was_drained_may_not_join_again_whatever_it_is_given_up_for():
    reasons = set[str]()
    for is_silent in (False, True):
        run = Driver(small_config(fleet_rules=FleetRules(heartbeat_timeout_s=5.0, drain_timeout_s=20.0)))
        run.begin()
        run.join("a")
        run.drain("a")
        if is_silent:
            run.silence("a")
        (forgotten,) = only(run.wait(60.0), c.ForgetWorker)
        assert not forgotten.rejoin and forgotten.drained
        reasons.add(forgotten.why)
    assert reasons == {"it did not hand over in time", "no heartbeat"}


@pytest.mark.parametrize(
    "rules, after", [(0, {"a": "trainer", "d": "c"}), (1, {"a": "trainer", "b": "trainer", "c": "a", "d": "c"})]
)
def test_a_failed_pull_of_a_run_of_earlier_rules_is_replayed_by_them(rules: int, after: dict[str, str]):
    """Then the first failure was enough to send nobody to a peer, and who had failed waited as all others did."""
    config = small_config(weight_delivery=ONE_UPLOAD)
    run = Driver(config)
    run.scheduler = Scheduler(config, rules=rules)
    publish(run, 0)
    for name in "abcd":
        run.join(name)
    publish(run, 1)
    assert sources(run) == {"a": "trainer", "b": "a", "c": "b", "d": "c"}
    run.tell(e.WeightsFailed(WorkerName("b"), run.lives[WorkerName("b")], Version(1), "a bad chunk"))
    run.wait(2.5)
    assert sources(run) == after
