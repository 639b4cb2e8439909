"""Names that join and leave without end: what is kept of them is bounded, and no sum loses any of it."""

from tests.unit.driver import Driver, small_config

from polyrl.ids import WorkerName
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.fleet import MAX_DEPARTED
from polyrl.scheduling.core.ledger import OTHERS

NUM = MAX_DEPARTED + 300


def come_and_go(run: Driver, names: range) -> None:
    for number in names:
        name = WorkerName(f"w{number}")
        run.tell(e.WorkerJoined(name, 1, slots=1, price_usd_per_hour=3.6, starting_s=10.0))  # type: ignore[arg-type]
        run.now += 1.0
        run.tell(e.WorkerLeft(name, 1, "it goes"))  # type: ignore[arg-type]


def test_what_is_kept_of_names_that_went_is_bounded_and_their_sums_are_not_lost():
    run = Driver(small_config(trainer_usd_per_hour=0.0))
    come_and_go(run, range(NUM))
    fleet, ledger = run.scheduler.desk.state.fleet, run.ledger
    assert len(ledger.workers) == MAX_DEPARTED + 1
    assert len(fleet.last_incarnations) == len(fleet.departed) == MAX_DEPARTED
    assert sum(line.num_joins for line in ledger.workers.values()) == NUM
    assert ledger.workers[OTHERS].num_joins == NUM - MAX_DEPARTED
    assert abs(ledger.usd(run.now) - NUM * 11 * 0.001) < 1e-6
    assert abs(sum(line.paid_s for line in ledger.workers.values()) - NUM * 11) < 1e-6


def test_a_saved_state_does_not_grow_with_names_that_went():
    run = Driver()
    come_and_go(run, range(NUM))
    before = len(run.scheduler.save())
    come_and_go(run, range(NUM, 2 * NUM))
    assert len(run.scheduler.save()) < 1.02 * before + 200


def test_whoever_comes_back_is_known_as_long_as_it_is_among_the_last():
    run = Driver()
    come_and_go(run, range(1))
    run.tell(e.WorkerJoined(WorkerName("w0"), 2, slots=1))  # type: ignore[arg-type]
    come_and_go(run, range(1, NUM))
    assert run.ledger.workers[WorkerName("w0")].num_joins == 2, "it is there all the while"
    late = run.ledger.late_news
    run.tell(e.WorkerJoined(WorkerName(f"w{NUM - 1}"), 1, slots=1))  # type: ignore[arg-type]
    assert run.ledger.late_news == late + 1, "a join that is repeated late is known"
    run.tell(e.WorkerJoined(WorkerName("w1"), 1, slots=1))  # type: ignore[arg-type]
    assert run.ledger.workers[WorkerName("w1")].num_joins == 1, "it went so long ago that it is new"
