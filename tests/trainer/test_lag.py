"""The lag of asynchronous training: lowered by alarms, raised again after calm steps."""

import math

import pytest

from polyrl.config.recipe import TrainSection
from polyrl.trainer.lag import CALM_STEPS, Lag


def metrics(size: float = 1.0, norm: float = 1.0) -> dict[str, float]:
    return {"actor/effective_sample_size": size, "actor/grad_norm": norm}


def test_without_bounds_the_lag_stays_and_nothing_is_told():
    lag = Lag(TrainSection(mode="async", max_staleness=4), 4)
    assert lag.after(0, metrics(0.0, math.nan)) == {}
    assert lag.now == 4


def test_few_effective_samples_halve_the_lag_and_the_rounds_on_their_way_do_not_again():
    lag = Lag(TrainSection(mode="async", max_staleness=4, min_sample_size=0.5), 4)
    assert lag.after(0, metrics(0.5)) == {"staleness/allowed": 4.0, "staleness/alarm": 0.0}
    assert lag.after(1, metrics(0.4)) == {"staleness/allowed": 2.0, "staleness/alarm": 1.0}
    for step in range(2, 6):  # the rounds of these steps were requested at the old lag
        assert lag.after(step, metrics(0.4))["staleness/allowed"] == 2.0
    assert lag.after(6, metrics(0.4))["staleness/allowed"] == 1.0
    for step in (7, 8):
        assert lag.after(step, metrics(0.4))["staleness/allowed"] == 1.0
    assert lag.after(9, metrics(0.4))["staleness/allowed"] == 0.0
    assert lag.after(20, metrics(0.4))["staleness/allowed"] == 0.0


def test_calm_steps_raise_the_lag_by_one_up_to_what_the_recipe_allows():
    lag = Lag(TrainSection(mode="async", max_staleness=2, min_sample_size=0.5), 2)
    lag.after(0, metrics(0.1))
    seen = [lag.after(step, metrics())["staleness/allowed"] for step in range(1, 3 * CALM_STEPS)]
    assert seen == [1.0] * (CALM_STEPS - 1) + [2.0] * (2 * CALM_STEPS)


@pytest.mark.parametrize("norm", [10.1, math.inf, math.nan])
def test_a_gradient_far_above_the_usual_is_an_alarm_once_the_usual_is_known(norm):
    train = TrainSection(mode="async", max_staleness=2, max_norm_growth=10.0)
    lag = Lag(train, 2)
    lag.after(0, metrics(norm=50.0))  # the first steps may have any norm
    assert lag.now == 2
    for step in range(1, 6):
        lag.after(step, metrics(norm=1.0))
    assert lag.after(6, metrics(norm=9.9))["staleness/alarm"] == 0.0
    assert lag.after(7, metrics(norm=norm)) == {"staleness/allowed": 1.0, "staleness/alarm": 1.0}


def test_steps_that_trained_nothing_make_no_later_gradient_look_large():
    lag = Lag(TrainSection(mode="async", max_staleness=2, max_norm_growth=10.0), 2)
    for step in range(20):
        assert lag.after(step, metrics(norm=0.0))["staleness/alarm"] == 0.0
    for step in range(20, 30):
        assert lag.after(step, metrics(norm=1.0))["staleness/alarm"] == 0.0
    assert lag.after(30, metrics(norm=20.0))["staleness/alarm"] == 1.0
