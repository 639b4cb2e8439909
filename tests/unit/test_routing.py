"""A sample goes to the least loaded worker with credit, or to its siblings while that costs little."""

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.workers import worker

from polyrl.ids import LeaseId, SampleId, Version
from polyrl.scheduling.core.fleet import Worker
from polyrl.scheduling.core.parameters import RoutingConfig
from polyrl.scheduling.rules.routing import Router

V0 = Version(0)
NOBODY = -1


def router(*workers: Worker) -> Router:
    return Router(RoutingConfig(prefix_imbalance=0.1), {one.seat: one for one in workers})


def chosen(found: Worker | None) -> int | None:
    return None if found is None else found.seat


def test_the_least_loaded_worker_gets_the_sample():
    found = router(worker(1, num_leases=3), worker(2, num_leases=1), worker(3, num_leases=2)).choose(V0, NOBODY)
    assert chosen(found) == 2


def test_load_is_the_share_of_the_slots_not_the_number_of_samples():
    found = router(worker(1, num_leases=2, plateau=4), worker(2, num_leases=6, plateau=32)).choose(V0, NOBODY)
    assert chosen(found) == 2


def test_of_equals_the_reserved_one_is_chosen_and_then_the_one_that_came_first():
    assert chosen(router(worker(1, spot=True), worker(2), worker(3)).choose(V0, NOBODY)) == 2


def test_a_worker_at_its_plateau_gets_nothing():
    full = router(worker(1, num_leases=8))
    assert full.choose(V0, NOBODY) is None
    assert not full.has_room(V0)


def test_a_worker_that_drains_pulls_or_trains_gets_nothing():
    others = worker(1, state="draining"), worker(2, state="pulling"), worker(3, duty="training")
    assert router(*others).choose(V0, NOBODY) is None


def test_a_sample_follows_its_siblings_within_a_tenth_of_the_load():
    near = router(worker(1, num_leases=1, plateau=10), worker(2, num_leases=2, plateau=10))
    assert chosen(near.choose(V0, 2)) == 2
    far = router(worker(1, num_leases=1, plateau=10), worker(2, num_leases=3, plateau=10))
    assert chosen(far.choose(V0, 2)) == 1


def test_a_worker_with_an_older_version_is_passed_over_but_not_forgotten():
    fleet = router(worker(1, version=0), worker(2, version=1, num_leases=4))
    assert chosen(fleet.choose(Version(1), NOBODY)) == 2
    assert chosen(fleet.choose(Version(1), 1)) == 2
    assert chosen(fleet.choose(V0, NOBODY)) == 1


def test_a_worker_that_others_are_preferred_to_leaves_nothing_behind_in_round_after_round():
    idle, busy = worker(1, plateau=32), worker(2, plateau=32)
    fleet = router(idle, busy)
    for _ in range(100):
        for num in (*range(1, 21), *range(20, -1, -1)):
            busy.leases = {LeaseId(one): SampleId(one) for one in range(num)}
            fleet.update(busy)
            assert chosen(fleet.choose(V0, NOBODY)) == 1
    assert len(fleet._heap) < 100
    idle.leases = {LeaseId(100): SampleId(100)}
    fleet.update(idle)
    assert chosen(fleet.choose(V0, NOBODY)) == 2


def test_a_worker_that_is_gone_is_not_chosen():
    seats = {1: worker(1), 2: worker(2)}
    fleet = Router(RoutingConfig(), seats)
    gone = seats.pop(1)
    fleet.update(gone)
    assert chosen(fleet.choose(V0, NOBODY)) == 2


@given(
    st.lists(st.tuples(st.integers(1, 5), st.booleans()), max_size=60),
    st.lists(st.integers(1, 6), min_size=5, max_size=5),
)
def test_a_rebuilt_router_chooses_as_the_old_one_whatever_happened(changes, plateaus):
    seats = {seat: worker(seat, plateau=plateaus[seat - 1], spot=seat % 2 == 0) for seat in range(1, 6)}
    fleet = Router(RoutingConfig(), seats)
    for number, (seat, add) in enumerate(changes):
        one = seats[seat]
        if add and one.credit > 0:
            one.leases[LeaseId(number)] = SampleId(number)
        elif not add and one.leases:
            del one.leases[next(iter(one.leases))]
        fleet.update(one)
        least = min(
            (w for w in seats.values() if w.credit > 0),
            key=lambda w: (len(w.leases) / w.slots, w.spot, w.seat),
            default=None,
        )
        rebuilt = Router(RoutingConfig(), seats)
        assert chosen(fleet.choose(V0, NOBODY)) == chosen(rebuilt.choose(V0, NOBODY)) == chosen(least)
        assert chosen(fleet.choose(V0, 3)) == chosen(rebuilt.choose(V0, 3))


def test_a_worker_that_balancing_chose_is_taken_only_while_it_could_be_chosen():
    workers = [worker(1, num_leases=2), worker(2, num_leases=8), worker(3, version=4)]
    router = Router(RoutingConfig(), {one.seat: one for one in workers})
    assert router.take(1, Version(0)) is workers[0]
    assert router.take(2, Version(0)) is None, "it is full"
    assert router.take(3, Version(5)) is None, "its weights are too old"
    assert router.take(9, Version(0)) is None, "nobody sits there"
