"""A step's clock, told to a whole scheduler: it stands still while the trainer validates, or nobody is there."""

import pytest
from tests.unit.driver import Driver, only, small_config

from polyrl.ids import Step, Version, WorkerName
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.ledger import StepLine
from polyrl.scheduling.core.parameters import SeedingConfig


def small(**others) -> Driver:
    return Driver(small_config(prompts=1, samples=1, seeding=SeedingConfig(mode="whole_round"), **others))


def train(run: Driver, group: int, *, step: int, train_s: float = 2.0) -> StepLine:
    """The group is there: it is trained on, and the step ends."""
    run.take(step, group)
    run.now += train_s
    run.tell(e.MicroBatchTrained(Step(step)))
    (report,) = only(run.tell(e.StepTrained(Step(step))), c.ReportStep)
    return report.line


def publish(run: Driver, version: int, *, after_s: float = 0.0) -> None:
    run.now += after_s
    run.tell(e.VersionPublished(Version(version)))


def validate(run: Driver, seconds: float) -> None:
    run.tell(e.ValidationBegan())
    run.now += seconds
    run.tell(e.ValidationEnded())


def seed(run: Driver, group: int, *, step: int, generate_s: float = 5.0) -> StepLine:
    """The trainer's own worker generates a round, and the step is trained."""
    run.turn("t", "generating")
    run.request(step)
    run.now += generate_s
    run.complete(group, samples=1)
    run.turn("t", "training")
    return train(run, group, step=step)


@pytest.mark.parametrize("validation_s", [0.0, 100.0])
def test_validation_is_neither_seeding_nor_a_part_of_the_step(validation_s: float):
    run = small()
    publish(run, 0)
    run.join("t", local=True, ready=False)
    if validation_s:
        validate(run, validation_s)
    first = seed(run, 1, step=0)
    publish(run, 1, after_s=0.5)
    if validation_s:
        validate(run, validation_s)
    second = seed(run, 2, step=1)
    assert (first.seed_window_s, first.step_s) == pytest.approx((5.0, 7.0))
    assert (second.seed_window_s, second.step_s) == pytest.approx((5.0, 7.5))
    run.leave("t")
    assert run.ledger.workers[WorkerName("t")].seconds.get("validating", 0.0) == 2 * validation_s


def test_a_trainer_that_publishes_or_validates_does_not_wait_for_samples():
    run = small(max_staleness=1)
    run.begin(steps=2)
    run.join("a")
    run.complete(1, samples=1)
    train(run, 1, step=0)
    publish(run, 1, after_s=7.0)
    run.now += 0.25
    validate(run, 20.0)
    run.now += 3.0
    run.complete(2, samples=1)
    line = train(run, 2, step=1)
    assert line.wait_train_s == pytest.approx(3.25)
    assert line.step_s == pytest.approx(7.0 + 0.25 + 3.0 + 2.0)


def test_a_step_takes_no_longer_because_the_driver_was_away():
    run = small()
    run.begin()
    run.join("a")
    run.now += 4.0
    run.now += 1000.0
    run.tell(e.DriverResumed(1000.0, 10.0))
    run.now += 1.0
    run.complete(1, samples=1)
    line = train(run, 1, step=0)
    assert (line.step_s, line.wait_train_s, line.train_s) == pytest.approx((7.0, 5.0, 2.0))
    assert line.mean_workers == pytest.approx(1.0)


def test_a_step_that_another_process_begins_anew_has_not_trained_or_waited_before():
    run = small()
    run.begin()
    run.join("a")
    run.now += 4.0
    run.complete(1, samples=1)
    run.take(0, 1)
    run.now += 1.0
    run.tell(e.TrainerLeft())
    run.now += 500.0
    run.tell(e.TrainerReplaced())
    run.tell(e.TrainerReturned())
    run.tell(e.StepRestarted(Step(0)))
    run.now += 0.5
    line = train(run, 1, step=0)
    assert (line.wait_train_s, line.train_s) == pytest.approx((0.5, 2.0))
    assert line.step_s == pytest.approx(7.5)


def test_who_was_killed_while_it_validated_does_not_validate_any_longer():
    run = small()
    publish(run, 0)
    run.join("t", local=True)
    run.tell(e.ValidationBegan())
    run.now += 5.0
    run.tell(e.TrainerLeft())
    run.now += 1.0
    run.tell(e.TrainerReplaced())
    run.join("t", local=True, ready=False)
    line = seed(run, 1, step=0)
    assert (line.seed_window_s, line.step_s) == pytest.approx((5.0, 7.0))
    assert run.ledger.workers[WorkerName("t")].seconds["validating"] == 6.0


@pytest.mark.parametrize("replaced_at", [(12.0,), (10.0, 12.0), (3.0, 5.0, 9.0, 12.0)])
@pytest.mark.parametrize("resumed_at", [(), (4.0,), (1.0, 11.0)])
def test_no_second_of_an_absence_is_left_out_twice(replaced_at: tuple[float, ...], resumed_at: tuple[float, ...]):
    """However often the trainer is replaced, and whatever the driver misses of it meanwhile."""
    run = small()
    run.join("a")
    publish(run, 0)
    run.install("a")
    run.request(0)
    run.complete(1, samples=1)
    run.now = began = 100.0
    run.tell(e.TrainerLeft())
    for at, event in sorted(
        [(at, e.TrainerReplaced()) for at in replaced_at] + [(at, e.DriverResumed(0.5, 3.0)) for at in resumed_at],
        key=lambda one: one[0],
    ):
        run.now = began + at
        run.tell(event)
    run.tell(e.TrainerReturned())
    assert train(run, 1, step=0, train_s=2.0).step_s == pytest.approx(100.0 + 2.0)
