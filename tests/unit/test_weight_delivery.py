"""Who pulls from whom: the trainer sends a version a constant number of times, nobody waits in a circle."""

import pytest
from tests.unit.driver import Driver, only, small_config
from tests.unit.workers import worker

from polyrl.ids import Version, WorkerName
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.fleet import Worker
from polyrl.scheduling.core.parameters import WeightDeliveryConfig
from polyrl.scheduling.core.samples import NO_VERSION
from polyrl.scheduling.rules.weight_delivery import TRAINER, plan_pulls, retry_after_s

NEW = Version(1)


def outdated(num: int) -> list[Worker]:
    return [worker(seat, version=0, state="waiting") for seat in range(1, num + 1)]


def start(fleet: list[Worker], config: WeightDeliveryConfig) -> int:
    """Start all pulls that can start now. Returns how many go to the trainer."""
    wanting = [one for one in fleet if one.version < NEW and one.pulling == NO_VERSION]
    pulls = plan_pulls(wanting, fleet, NEW, config)
    by_seat = {one.seat: one for one in fleet}
    for pull in pulls:
        by_seat[pull.worker].pulling, by_seat[pull.worker].source = NEW, pull.source
    return sum(pull.source == TRAINER for pull in pulls)


def finish_whose_source_has_it(fleet: list[Worker]) -> None:
    have = {TRAINER} | {one.seat for one in fleet if one.version == NEW}
    for one in [one for one in fleet if one.pulling == NEW and one.source in have]:
        one.version, one.pulling, one.source = NEW, NO_VERSION, TRAINER


def chain_to_trainer(fleet: list[Worker], one: Worker) -> int:
    by_seat = {other.seat: other for other in fleet}
    length = 0
    while one.pulling == NEW and one.source != TRAINER:
        one = by_seat[one.source]
        length += 1
        assert length <= len(fleet), "a circle"
    return length


@pytest.mark.parametrize("num_workers", [4, 16, 64])
def test_the_trainer_sends_a_version_four_times_however_large_the_fleet(num_workers):
    config = WeightDeliveryConfig(trainer_uploads=4, peer_uploads=2)
    fleet = outdated(num_workers)
    from_trainer = start(fleet, config)
    assert from_trainer == 4
    assert all(one.pulling == NEW for one in fleet), "relays pass on what they receive: nobody waits"
    assert all(chain_to_trainer(fleet, one) < num_workers for one in fleet)
    while any(one.version < NEW for one in fleet):
        finish_whose_source_has_it(fleet)
        from_trainer += start(fleet, config)
    assert from_trainer == 4


def test_no_peer_serves_more_than_its_uploads():
    config = WeightDeliveryConfig(trainer_uploads=1, peer_uploads=2)
    fleet = [worker(1, version=1), *(worker(seat, version=0, accused_by=["x", "y"]) for seat in range(2, 20))]
    start(fleet, config)
    sources = [one.source for one in fleet if one.pulling == NEW]
    assert sorted(sources) == [TRAINER, 1, 1]


def test_without_relay_the_trainer_serves_all_of_them_four_at_a_time():
    config = WeightDeliveryConfig(relay=False, trainer_uploads=4)
    fleet = outdated(10)
    assert start(fleet, config) == 4
    assert start(fleet, config) == 0
    finish_whose_source_has_it(fleet)
    assert start(fleet, config) == 4


def test_who_passes_nothing_on_does_not_hold_up_who_does():
    fleet = [worker(1, version=0, relays=False), worker(2, version=0, relays=False), *outdated(6)[2:]]
    assert start(fleet, WeightDeliveryConfig(trainer_uploads=1, peer_uploads=2)) == 1
    assert all(one.pulling == NEW for one in fleet)


def test_a_bad_peer_is_not_asked_again():
    config = WeightDeliveryConfig(trainer_uploads=1, peer_uploads=8)
    fleet = [worker(1, version=1, accused_by=["x", "y"]), worker(2, version=1), *outdated(9)[2:]]
    start(fleet, config)
    assert {one.source for one in fleet if one.pulling == NEW} <= {TRAINER, 2, 3, 4, 5, 6, 7, 8, 9}


def in_regions(num: int, *regions: str) -> list[Worker]:
    return [worker(seat, version=0, region=regions[seat % len(regions)]) for seat in range(1, num + 1)]


def crossings(fleet: list[Worker]) -> list[str]:
    """The regions of the workers that pull from outside of them."""
    by_seat = {one.seat: one.region for one in fleet}
    pulling = [one for one in fleet if one.pulling == NEW and one.region]
    return sorted(one.region for one in pulling if one.source == TRAINER or by_seat[one.source] != one.region)


@pytest.mark.parametrize("trainer_uploads", [1, 2, 4])
@pytest.mark.parametrize("regions", [("eu", "us"), ("", "eu", "us"), ("", "eu", "us", "asia")])
def test_a_version_enters_each_region_once(regions, trainer_uploads):
    fleet = in_regions(24, *regions)
    config = WeightDeliveryConfig(trainer_uploads=trainer_uploads)
    crossed: list[str] = []
    while any(one.version < NEW for one in fleet):
        before = {one.seat for one in fleet if one.pulling == NEW}
        start(fleet, config)
        crossed += crossings([one for one in fleet if one.seat not in before or one.pulling != NEW])
        finish_whose_source_has_it(fleet)
    assert sorted(crossed) == sorted(region for region in regions if region)


def test_a_worker_of_a_region_waits_for_its_peer_rather_than_pull_over_the_long_link():
    fleet = [worker(1, version=1, region="eu"), *(worker(n, version=0, region="eu", relays=False) for n in (2, 3, 4))]
    assert start(fleet, WeightDeliveryConfig(peer_uploads=2)) == 0
    assert [one.source for one in fleet if one.pulling == NEW] == [1, 1]


def test_a_region_whose_workers_pass_nothing_on_gets_it_from_the_trainer():
    fleet = [worker(n, version=0, region="eu", relays=False) for n in (1, 2, 3)]
    assert start(fleet, WeightDeliveryConfig()) == 3


def test_when_the_worker_that_pulls_for_its_region_dies_another_one_pulls():
    run = Driver(small_config(prompts=1, samples=1))
    run.begin()
    assert sources(run.join("a", ready=False, region="eu")) == {"a": None}
    assert sources(run.join("b", ready=False, region="eu")) == {"b": "a"}
    assert sources(run.join("c", ready=False, region="us")) == {"c": None}
    assert sources(run.leave("a")) == {"b": None}


def test_a_worker_that_failed_with_its_regions_peer_gets_the_version_from_the_trainer():
    run = Driver(small_config(prompts=1, samples=1))
    run.begin()
    run.join("a", ready=False, region="eu")
    run.join("b", ready=False, region="eu")
    assert sources(fail(run, "b")) == {"b": None}


def test_a_draining_or_local_worker_is_no_source():
    config = WeightDeliveryConfig(trainer_uploads=1, peer_uploads=8)
    holders = [worker(1, version=1, state="draining"), worker(2, version=1, local=True)]
    fleet = [*holders, worker(3, version=0), worker(4, version=0)]
    start(fleet[:2] + fleet[2:], config)
    assert [one.source for one in fleet[2:]] == [TRAINER, 3]


def test_the_pause_before_another_try_doubles_up_to_a_minute():
    config = WeightDeliveryConfig(retry_s=2.0, max_retry_s=60.0)
    assert [retry_after_s(num, config) for num in (1, 2, 3, 6, 30)] == [2.0, 4.0, 8.0, 60.0, 60.0]


def test_a_failed_pull_leaves_the_worker_alive_at_its_old_version_and_is_tried_again():
    run = Driver(small_config(prompts=1, samples=1))
    run.begin()
    run.join("a", ready=False)
    worker_a = run.scheduler.desk.seats[1]
    assert run.tell(e.WeightsFailed(worker_a.name, worker_a.incarnation, Version(0), "a bad chunk")) == []
    assert (run.state("a"), worker_a.version) == ("waiting", NO_VERSION)
    assert not only(run.wait(1.5), c.PullWeights)
    assert [one.worker for one in only(run.wait(1.0), c.PullWeights)] == ["a"]


def test_whoever_pulls_from_a_worker_that_dies_gets_another_source():
    run = Driver(small_config(prompts=1, samples=1, weight_delivery=WeightDeliveryConfig(trainer_uploads=1)))
    run.begin()
    run.join("a", ready=False)
    (pull,) = only(run.join("b", ready=False), c.PullWeights)
    assert pull.source == "a"
    (pull,) = only(run.leave("a"), c.PullWeights)
    assert (pull.worker, pull.source) == ("b", None)


def fail(run: Driver, name: str) -> list[c.Command]:
    """The worker says that its pull of the newest version failed; and what came of it within three seconds."""
    fleet = run.scheduler.desk.state.fleet
    seat = fleet.seats[fleet.by_name[WorkerName(name)]]
    return run.tell(e.WeightsFailed(seat.name, seat.incarnation, seat.pulling, "a digest is wrong")) + run.wait(3.0)


def relayed() -> Driver:
    """`a` has the version, `b` gets it from the trainer, which serves one at a time; whoever is next goes to `a`."""
    run = Driver(small_config(prompts=1, samples=1, weight_delivery=WeightDeliveryConfig(trainer_uploads=1)))
    run.begin()
    run.join("a")
    run.join("b", ready=False)
    return run


def sources(commands: list[c.Command]) -> dict[str, str | None]:
    return {pull.worker: pull.source for pull in only(commands, c.PullWeights)}


def is_bad(run: Driver, name: str) -> bool:
    fleet = run.scheduler.desk.state.fleet
    return not fleet.seats[fleet.by_name[WorkerName(name)]].may_relay


def test_who_failed_with_a_peer_gets_the_version_from_the_trainer_however_busy_that_is():
    run = relayed()
    assert sources(run.join("c", ready=False)) == {"c": "a"}
    assert sources(fail(run, "c")) == {"c": None}


def test_one_workers_word_makes_no_peer_bad_and_a_second_ones_does():
    run = relayed()
    run.join("c", ready=False)
    fail(run, "c")
    assert not is_bad(run, "a")
    assert sources(run.join("d", ready=False)) == {"d": "a"}
    fail(run, "d")
    assert is_bad(run, "a")
    assert sources(run.join("e", ready=False))["e"] != "a"


def test_who_fails_with_the_trainer_too_accuses_nobody():
    run = relayed()
    run.join("c", ready=False)
    fail(run, "c")
    fail(run, "c")
    run.join("d", ready=False)
    fail(run, "d")
    assert not is_bad(run, "a")


def test_the_same_worker_accuses_once_however_often_it_joins_under_one_name():
    run = relayed()
    for _ in range(3):
        run.join("c", ready=False)
        fail(run, "c")
    assert run.scheduler.desk.seats[1].accused_by == ["c"]
    assert not is_bad(run, "a")


def test_a_pull_that_takes_fifteen_minutes_has_failed():
    run = Driver(small_config(prompts=1, samples=1))
    run.begin()
    run.join("a", ready=False)
    assert [one.worker for one in only(run.wait(905.0), c.PullWeights)] == ["a"]
