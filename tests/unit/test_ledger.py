"""What became of every second and dollar, through a real scheduler: nothing is lost when workers come and go."""

import pytest
from tests.unit.driver import Driver, only, small_config

from polyrl.ids import WorkerName
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.ledger import Ledger, length_bin


def seconds(run: Driver, name: str) -> dict[str, float]:
    return run.ledger.workers[WorkerName(name)].seconds


def test_a_workers_seconds_are_those_of_what_it_did():
    run = Driver(small_config(prompts=1, samples=1))
    run.begin()
    run.join("a", ready=False, starting_s=40.0)
    run.wait(5.0)
    run.install("a")
    run.wait(12.0)
    run.complete(1, samples=1)
    run.wait(3.0)
    run.drain("a")
    run.wait(2.0)
    run.leave("a")
    assert seconds(run, "a") == pytest.approx(
        {"starting": 40.0, "pulling": 5.0, "generating": 12.0, "idle": 3.0, "draining": 2.0}
    )


def test_a_local_workers_seconds_at_the_trainer_are_training():
    run = Driver(small_config(prompts=1, samples=1))
    run.begin()
    run.join("t", local=True)
    run.wait(10.0)
    run.complete(1, samples=1)
    run.turn("t", "training")
    run.wait(6.0)
    run.leave("t")
    assert seconds(run, "t") == pytest.approx({"starting": 0.0, "generating": 10.0, "training": 6.0})


def test_seconds_add_up_to_the_time_in_the_fleet_over_joins_losses_and_restarts():
    run = Driver(small_config(prompts=2, samples=4))
    run.begin()
    run.join("a", price_usd_per_hour=5.32)
    run.wait(7.0)
    run.join("b", price_usd_per_hour=2.0)
    run.wait(4.0)
    run.join("a", price_usd_per_hour=5.32)  # it restarts before it is missed
    run.wait(10.0)
    run.silence("b")
    run.wait(30.0)  # b is missed three seconds after its last heartbeat
    run.drain("a")
    run.wait(40.0)  # nobody answers: the drain ends after 30 s
    a, b = run.ledger.workers[WorkerName("a")], run.ledger.workers[WorkerName("b")]
    assert a.paid_s == pytest.approx(7 + 4 + 10 + 30 + 30)
    assert b.paid_s == pytest.approx(4 + 10 + 3, abs=1.0)
    assert a.usd == pytest.approx(a.paid_s * 5.32 / 3600)
    assert (a.num_joins, a.num_losses, b.num_losses) == (2, 1, 1), "who was drained and owed nothing is no loss"


def test_all_dollars_are_the_trainers_and_the_workers():
    run = Driver(small_config(prompts=1, samples=1, trainer_usd_per_hour=83.79))
    run.begin()
    run.join("a", price_usd_per_hour=5.32)
    run.wait(90.0)
    run.leave("a")
    run.wait(90.0)
    assert run.ledger.trainer_usd(run.now) == pytest.approx(83.79 / 20)
    assert run.ledger.usd(run.now) == pytest.approx(83.79 / 20 + 5.32 / 40)


def test_a_new_price_in_a_new_life_leaves_the_old_dollars_as_they_were():
    ledger = Ledger()
    ledger.worker_line(WorkerName("a"), 10.0)
    ledger.pay(WorkerName("a"), "idle", 3600.0)
    line = ledger.worker_line(WorkerName("a"), 1.0)
    assert line.usd == 10.0
    ledger.pay(WorkerName("a"), "idle", 3600.0)
    assert line.usd == 11.0


def test_a_step_line_holds_what_the_step_was_made_of():
    run = Driver(small_config(prompts=1, samples=2))
    run.begin()
    run.join("a")
    run.wait(20.0)
    run.complete(1, at=64)
    run.take(0, 1)
    run.wait(9.0)
    (report,) = only(run.trained(0), c.ReportStep)
    line = report.line
    assert (line.kind, line.num_groups, line.tokens_trained, line.trained_mean) == ("short", 1, 128, 64.0)
    assert (line.closed_at, line.trained_at) == (20.0, 29.0)
    assert line.wait_train_s == pytest.approx(20.0)
    assert line.mean_workers == pytest.approx(1.0)


@pytest.mark.parametrize(("num_tokens", "bin_"), [(0, 0), (1, 1), (2, 2), (3, 2), (4, 3), (1023, 10), (2**30, 23)])
def test_lengths_are_counted_by_doublings(num_tokens, bin_):
    assert length_bin(num_tokens) == bin_


def test_a_trainer_that_was_gone_until_another_process_took_its_place_is_not_paid_for_that():
    run = Driver(small_config(trainer_usd_per_hour=3600.0))
    run.begin()
    run.now = 100.0
    run.tell(e.TrainerLeft(away_s=60.0))
    assert run.ledger.trainer_usd(run.now) == pytest.approx(40.0)
    run.now = 150.0
    run.tell(e.TrainerReplaced())
    run.tell(e.TrainerReturned())
    run.now = 155.0
    assert run.ledger.trainer_usd(run.now) == pytest.approx(45.0)


def test_a_trainer_that_was_only_out_of_reach_is_paid_all_along():
    run = Driver(small_config(trainer_usd_per_hour=3600.0))
    run.begin()
    run.now = 100.0
    run.tell(e.TrainerLeft(away_s=60.0))
    run.now = 150.0
    run.tell(e.TrainerReturned())
    assert run.ledger.trainer_usd(run.now) == pytest.approx(150.0)
