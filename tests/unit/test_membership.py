"""Workers and their weights, told to a whole scheduler: what pure rules alone cannot show."""

from tests.unit.driver import Driver, only, small_config

from polyrl.ids import Version, WorkerName
from polyrl.scheduling import commands as c
from polyrl.scheduling import events as e
from polyrl.scheduling.parameters import FleetRules, WeightDeliveryConfig

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
    run.scheduler.desk.seats[1].bad_source = True
    publish(run, 1)
    assert not run.scheduler.desk.seats[1].bad_source


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
