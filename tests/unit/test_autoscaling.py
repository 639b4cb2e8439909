"""The autoscaler's rule: what pays off, limits, hysteresis, and who goes first."""

import math

import pytest

from polyrl.ids import WorkerName
from polyrl.scheduling.rules import autoscaling, scaling
from polyrl.scheduling.rules.autoscaling import Aim, Prices, ScaledWorker, ScalingLimits, StepModel
from polyrl.scheduling.rules.scaling import ScalingConfig, ScalingFacts, ScalingState
from polyrl.scheduling.rules.seeding import StepTimes

MODEL = StepModel(worker_s=1200.0, train_s=150.0, other_s=10.0, num_reserved=4, share=1.0)


def held(*prices: float) -> tuple[ScaledWorker, ...]:
    return tuple(ScaledWorker(WorkerName(f"w{seat}"), seat, price, 100.0) for seat, price in enumerate(prices))


def choose(
    prices: Prices,
    now: int = 0,
    *,
    aim: Aim = "cheapest",
    usd_h: float | None = None,
    usd: float | None = None,
    least: int = 0,
) -> autoscaling.FleetChoice:
    limits = ScalingLimits(least, 16, usd_h, usd)
    return autoscaling.choose(MODEL, held(*[prices.offered] * now), prices, limits, now, aim=aim, min_gain=0.02)


def test_a_cheap_worker_is_taken_up_to_the_useful_number_and_a_dear_one_is_not():
    cheap = choose(Prices(trainer=84.0, offered=2.0, spent=0.0))
    assert cheap.num_workers == pytest.approx(MODEL.useful, abs=1.0)
    assert choose(Prices(trainer=84.0, offered=25.0, spent=0.0)).num_workers == 0
    assert choose(Prices(trainer=84.0, offered=25.0, spent=0.0), aim="fastest").num_workers >= 7


def test_the_choice_is_the_least_cost_of_a_step_by_trying_every_number():
    for offered in (1.0, 5.32, 9.0, 14.0, 20.0):
        prices = Prices(trainer=84.0, offered=offered, spent=0.0)
        costs = [(84.0 + number * offered) * MODEL.step_s(number) for number in range(17)]
        assert costs[choose(prices).num_workers] <= min(costs) * 1.021


def test_a_trainer_without_a_price_is_worth_everything():
    assert choose(Prices(trainer=0.0, offered=3.0, spent=0.0)).num_workers >= 7


def test_budgets_bind_at_once_and_never_below_the_minimum():
    within = choose(Prices(trainer=84.0, offered=5.0, spent=0.0), now=8, usd_h=16.0)
    assert (within.num_workers, within.at_once) == (3, True)
    spent = choose(Prices(trainer=84.0, offered=5.0, spent=99.9), now=8, usd=100.0, least=2)
    assert (spent.num_workers, spent.at_once) == (2, True)
    assert "of the $100.00 for workers are spent" in spent.why
    assert choose(Prices(trainer=84.0, offered=99.0, spent=0.0), least=3).num_workers == 3
    assert choose(Prices(trainer=84.0, offered=9.0, spent=0.0), now=5, usd_h=1.0, least=2).num_workers == 2


def test_losses_and_the_time_to_prepare_make_a_worker_worth_less():
    assert autoscaling.share_of_time(autoscaling.losses_per_hour(0, 0.0), 120.0) > 0.99
    often = autoscaling.losses_per_hour(40, 4 * 3600.0)
    assert often == pytest.approx(40.1 / 4.5)
    share = autoscaling.share_of_time(often, 600.0)
    assert share == pytest.approx(1 / (1 + often * 600 / 3600))
    lossy = StepModel(1200.0, 150.0, 10.0, 4, share)
    assert lossy.step_s(4) > MODEL.step_s(4)


def test_steps_that_were_seen_beat_the_model():
    seen = StepModel(1200.0, 150.0, 10.0, 4, 1.0, {4: 300.0, 8: 290.0})
    assert seen.step_s(4) == pytest.approx(300.0)
    assert seen.step_s(8) == pytest.approx(290.0)
    assert seen.step_s(5) == pytest.approx(MODEL.step_s(5) * 300.0 / MODEL.step_s(4))


def test_nobody_generates_without_workers_and_devices():
    assert StepModel(1200.0, 150.0, 10.0, 0, 1.0).step_s(0) == math.inf


def test_the_least_useful_go_first():
    fleet = (
        ScaledWorker(WorkerName("old"), 1, 5.0, 100.0),
        ScaledWorker(WorkerName("dear"), 2, 9.0, 100.0),
        ScaledWorker(WorkerName("slow"), 3, 5.0, 50.0),
        ScaledWorker(WorkerName("new"), 4, 5.0, 100.0),
        ScaledWorker(WorkerName("leaving"), 5, 1.0, 100.0, leaves=True),
    )
    assert autoscaling.least_useful(fleet, 4) == ("leaving", "slow", "dear", "new")
    assert autoscaling.least_useful(fleet, 0) == ()


def advise(state: ScalingState, config: ScalingConfig, now: int, price: float, step: int) -> scaling.Advice | None:
    state.offered_usd_per_hour = price
    times = StepTimes(0.0, 0.0, 200.0, 150.0, float(now), now, 4)
    facts = ScalingFacts(held(*[price] * now), step, "short", 300.0, 1_000_000, 1.0, 84.0, 0.0)
    return scaling.autoscale(state, config, times, 60.0, facts)


def test_what_is_measured_must_be_so_for_two_steps_and_a_price_acts_at_once():
    config, state = ScalingConfig(enabled=True), ScalingState()
    assert advise(state, config, 4, 3.0, 0) is None
    first = advise(state, config, 4, 3.0, 1)
    assert first is not None
    assert first.num_workers > 4
    assert advise(state, config, first.num_workers, 3.0, 2) is None, "it stays"
    less = advise(state, config, first.num_workers, 60.0, 3)
    assert less is not None
    assert less.num_workers < first.num_workers
    assert len(less.let_go) == first.num_workers - less.num_workers
    assert "another costs $60.00 an hour" in less.why


def test_a_step_that_trained_nothing_advises_nothing():
    times = StepTimes(0.0, 0.0, 0.0, 0.0, 0.0, 0, 4)
    facts = ScalingFacts((), 0, "short", 1.0, 0, 1.0, 84.0, 0.0)
    assert scaling.autoscale(ScalingState(), ScalingConfig(enabled=True, min_workers=1), times, 0.0, facts) is None
