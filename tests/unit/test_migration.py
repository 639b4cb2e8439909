"""What moves although nobody died: only what saves more time than it costs, and not for ever to and fro."""

from tests.unit.driver import Driver, only, small_config
from tests.unit.workers import know_speed, worker

from polyrl.ids import LeaseId, WorkerName
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.fleet import Worker
from polyrl.scheduling.core.parameters import FleetRules, RoutingConfig
from polyrl.scheduling.rules.migration import Candidate, plan_moves, plan_rescues, relieve_waiting

CONFIG = RoutingConfig(move_every_tokens=512, move_gain_s=2.0, prefill_tokens_per_s=20_000.0)


def candidates(*, remaining: float = 4000.0, num_tokens: int = 1000, moved_at: int = 0):
    def of(one: Worker) -> list[Candidate]:
        return [Candidate(lease, num_tokens, moved_at, remaining) for lease in one.leases]

    return of


def moves(*workers: Worker, of=None):
    return plan_moves(workers, CONFIG, 512, of or candidates())


def test_a_crowded_worker_gives_to_an_empty_one_while_every_move_pays():
    """A step costs 20 ms and 1 ms a sample: at 16 and 0 samples a move of 4,000 tokens saves 4000 * 15 ms = 60 s."""
    planned = moves(know_speed(worker(1, num_leases=16, plateau=32)), know_speed(worker(2, plateau=32)))
    assert 6 <= len(planned) <= 8
    assert {one.target for one in planned} == {2}
    assert "saves about 60 s" in planned[0].why


def test_a_short_rest_does_not_pay_for_its_prefill():
    crowded, empty = know_speed(worker(1, num_leases=16, plateau=32)), know_speed(worker(2, plateau=32))
    assert moves(crowded, empty, of=candidates(remaining=150.0)) == []


def test_a_fleet_whose_speeds_are_not_known_moves_nothing():
    assert moves(worker(1, num_leases=16, plateau=32), worker(2, plateau=32)) == []


def test_a_balanced_fleet_moves_nothing():
    assert moves(know_speed(worker(1, num_leases=8)), know_speed(worker(2, num_leases=7))) == []


def test_a_sample_that_moved_less_than_512_tokens_ago_stays():
    crowded, empty = know_speed(worker(1, num_leases=16, plateau=32)), know_speed(worker(2, plateau=32))
    assert moves(crowded, empty, of=candidates(num_tokens=1000, moved_at=600)) == []
    assert moves(crowded, empty, of=candidates(num_tokens=1112, moved_at=600)) != []


def test_the_longest_rest_moves_first():
    def of(one: Worker) -> list[Candidate]:
        return [Candidate(lease, 100, 0, 1000.0 + lease) for lease in one.leases]

    planned = moves(know_speed(worker(1, num_leases=16, plateau=32)), know_speed(worker(2, plateau=32)), of=of)
    leases = [one.lease for one in planned]
    assert leases == sorted(leases, reverse=True)
    assert leases[0] == LeaseId(115)


def test_stragglers_spread_out_to_reserved_workers_before_spot():
    source = know_speed(worker(1, num_leases=3, plateau=32), per_sample_s=0.01)
    spot = know_speed(worker(2, spot=True, plateau=32), per_sample_s=0.01)
    reserved = know_speed(worker(3, plateau=32), per_sample_s=0.01)
    assert [one.target for one in moves(source, spot, reserved)] == [3, 2]


def test_a_worker_that_does_not_generate_gets_nothing_and_gives_nothing():
    crowded = know_speed(worker(1, num_leases=16, plateau=32))
    assert moves(crowded, know_speed(worker(2, plateau=32, state="pulling"))) == []
    assert moves(know_speed(worker(1, num_leases=16, plateau=32, duty="stopping")), know_speed(worker(2))) == []


def test_an_engine_that_holds_samples_back_gives_no_more_than_others_have_credit_for():
    full = worker(1, num_leases=8, num_waiting=5)
    (given,) = relieve_waiting([full, worker(2, num_leases=6)])
    assert (given[0].seat, given[1]) == (1, 2)


def test_an_engine_that_holds_samples_back_keeps_at_least_one():
    (given,) = relieve_waiting([worker(1, num_leases=2, num_waiting=2), worker(2)])
    assert given[1] == 1


def test_nothing_is_relieved_when_everybody_is_full():
    assert relieve_waiting([worker(1, num_leases=8, num_waiting=5), worker(2, num_leases=8)]) == []


def test_a_look_that_relieves_a_full_engine_moves_nothing_else():
    """What was asked back still counts as its load, and not as anybody else's: moves would be planned for a past."""
    config = small_config(prompts=1, samples=12, balance=True, fleet_rules=FleetRules(heartbeat_timeout_s=60.0))
    run = Driver(config)
    run.begin()
    run.join("a", slots=16)
    run.join("b", slots=16)
    for seat in run.scheduler.desk.seats.values():
        know_speed(seat, per_sample_s=0.1)
    for num_tokens in (100, 200):
        run.bring("a", s1_0=num_tokens)
        run.tell(e.WorkerReported(WorkerName("a"), run.lives[WorkerName("a")], num_waiting=4))
    run.beating.clear()
    said = run.wait(config.routing.balance_interval_s)
    assert [one.why for one in only(said, c.HandOver)] == ["its engine holds it back, another worker has room"] * 4


# Rescues

SLOWEST_S = 15.0


def rescues(*workers: Worker, of=None):
    return plan_rescues(workers, CONFIG, 512, of or candidates(moved_at=999), SLOWEST_S)


def proven(one: Worker) -> Worker:
    one.has_answered = True
    return one


def test_the_last_sample_of_a_far_slower_worker_moves_however_lately_it_did():
    slow, good = know_speed(worker(1, num_leases=1), fixed_s=2.0), proven(know_speed(worker(2)))
    (move,) = rescues(slow, good)
    assert (move.target, move.lease) == (2, next(iter(slow.leases)))
    assert "takes 2 s a token, w2 0.021 s" in move.why


def test_nothing_is_rescued_from_a_worker_that_is_not_far_slower_nor_to_one_without_an_answer():
    slow = know_speed(worker(1, num_leases=1), fixed_s=2.0)
    assert rescues(slow, proven(know_speed(worker(2), fixed_s=0.5))) == []
    assert rescues(slow, know_speed(worker(2))) == []


def test_rescues_fill_a_worker_up_to_its_room_and_then_the_next():
    slow = know_speed(worker(1, num_leases=6), fixed_s=2.0)
    good, better = (
        proven(know_speed(worker(2, num_leases=6))),
        proven(know_speed(worker(3, num_leases=5), fixed_s=0.01)),
    )
    assert [one.target for one in rescues(slow, good, better)] == [3, 3, 3, 2, 2]


def test_a_worker_of_unknown_speed_that_has_answered_rescues_from_those_that_hardly_bring_a_token():
    unknown = proven(worker(2))
    assert rescues(know_speed(worker(1, num_leases=1), fixed_s=2.0), unknown) == []
    assert len(rescues(know_speed(worker(1, num_leases=1), fixed_s=20.0), unknown)) == 1
