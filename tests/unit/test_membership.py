"""Workers and their weights, told to a whole scheduler: what pure rules alone cannot show."""

from tests.unit.driver import Driver, leased, only, small_config

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
