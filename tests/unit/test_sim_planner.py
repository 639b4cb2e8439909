"""The planner: what it plays, how it prices it, and why it recommends what it does."""

import pytest
from msgspec.structs import replace
from tests.unit.tiny import write_tiny

from polyrl.config.supply_trace import SupplyEvent
from polyrl.sim.library import load_scenario
from polyrl.sim.planner import (
    Choice,
    PlanRow,
    apply_choice,
    choices,
    make_plan,
    marginal_usd_per_mtok,
    num_warmup,
    play_all,
    price,
    steps_in_period,
)


@pytest.fixture
def tiny(tmp_path):
    return load_scenario(str(write_tiny(tmp_path)))


def played(workers, tok_s, *, factor=1.0, staleness=0, bias=1.0, problem=None):
    return PlanRow(
        staleness=staleness,
        factor=factor,
        workers=workers,
        throughput_tok_s=tok_s,
        step_time_s=100.0,
        usd_per_hour=float(workers),
        useful_workers=3.5,
        bias=bias,
        problem=problem,
    )


def plan_of(tiny, outcomes, prices=(10.0,)):
    scenario = replace(tiny, trainer=replace(tiny.trainer, price_usd_per_hour=100.0))
    return make_plan(scenario, outcomes, prices, seed=0, steps=14)


def test_every_combination_is_played_once_in_the_order_of_the_table():
    assert choices([1, 0, 1], [1.25, 1.0], [0]) == [
        Choice(0, 1.0, 0),
        Choice(0, 1.0, 1),
        Choice(0, 1.25, 0),
        Choice(0, 1.25, 1),
    ]


@pytest.mark.parametrize(("factor", "period"), [(1.0, 1), (1.125, 9), (1.25, 5), (1.5, 3), (2.0, 2), (3.0, 2)])
def test_short_and_long_rounds_alternate_in_periods(factor, period):
    assert steps_in_period(factor) == period


@pytest.mark.parametrize("steps", [1, 2, 5, 14, 20])
@pytest.mark.parametrize("factor", [1.0, 1.125, 1.25, 1.5])
def test_whole_periods_are_measured_where_they_fit(steps, factor):
    measured = steps - num_warmup(steps, factor)
    assert measured >= 1
    assert measured % steps_in_period(factor) == 0 or measured < steps_in_period(factor)


def test_a_choice_without_a_factor_has_no_tail_batching(tiny):
    scenario = apply_choice(tiny, Choice(1, 1.0, 5), 14)
    assert (scenario.rounds.tail_batching, scenario.fleet.workers, scenario.run.max_staleness) == ("off", 5, 1)
    assert (scenario.run.steps, scenario.run.warmup_steps) == (14, 4)


def test_a_factor_is_a_race_over_prompts_and_samples(tiny):
    rounds = apply_choice(tiny, Choice(0, 1.5, 0), 14).rounds
    assert (rounds.tail_batching, rounds.prompt_factor, rounds.sample_factor) == ("race", 1.5, 1.5)


def test_a_supply_is_cut_at_the_number_of_workers(tiny):
    levels = [SupplyEvent(at_s=10.0, workers=5), SupplyEvent(at_s=20.0, workers=1)]
    with_events = replace(tiny, supply=replace(tiny.supply, events=levels))
    cut = apply_choice(with_events, Choice(0, 1.0, 3), 4)
    assert [level.workers for level in cut.supply.events] == [3, 1]
    assert cut.fleet.workers == 2
    with_trace = replace(tiny, supply=replace(tiny.supply, trace="spot.csv"))
    cut = apply_choice(with_trace, Choice(0, 1.0, 3), 4, supply=levels)
    assert ([level.workers for level in cut.supply.events], cut.supply.trace) == ([3, 1], None)


def test_a_ramp_and_a_market_are_cut_at_the_number_of_workers(tiny):
    ramp = replace(tiny, fleet=replace(tiny.fleet, workers=1, join_at_s=[5.0, 6.0, 7.0]))
    assert apply_choice(ramp, Choice(0, 1.0, 2), 4).fleet.join_at_s == [5.0]
    market = replace(tiny, supply=replace(tiny.supply, market_mean_s=60.0, market_min=1, market_max=6))
    cut = apply_choice(market, Choice(0, 1.0, 0), 4)
    assert (cut.supply.market_min, cut.supply.market_max, cut.fleet.workers) == (0, 0, 0)


def test_prices_are_put_on_what_was_played():
    row = price(played(4, 10_000.0), worker_price=5.0, trainer_price=80.0)
    assert row.usd_per_hour == 100.0
    assert row.usd_per_mtok == pytest.approx(100.0 / 36.0)


def test_an_extra_token_costs_the_extra_dollars():
    fewer = price(played(1, 1000.0), 10.0, 100.0)
    more = price(played(2, 1500.0), 10.0, 100.0)
    assert marginal_usd_per_mtok(fewer, more) == pytest.approx(10.0 / 1.8)
    assert marginal_usd_per_mtok(more, fewer) is None


def test_the_cheapest_is_the_lowest_price_of_a_token_and_says_what_the_next_worker_brings(tiny):
    plan = plan_of(tiny, [played(0, 1000.0), played(1, 1300.0), played(2, 1350.0)])
    assert plan.cheapest is not None
    assert plan.cheapest.row.workers == 1
    assert "15% less than with 0" in plan.cheapest.why
    assert "the tokens that a fleet of 2 would add cost $55.56 a million" in plan.cheapest.why
    assert plan.useful_workers == 3.5


def test_the_fastest_makes_most_tokens_and_says_what_that_costs(tiny):
    plan = plan_of(tiny, [played(0, 1000.0), played(1, 1300.0), played(2, 1350.0), played(3, 1340.0)])
    assert plan.fastest is not None
    assert plan.fastest.row.workers == 2
    assert "4% more than the cheapest, each extra million tokens for $55.56" in plan.fastest.why
    assert "a fleet of 3 brings nothing more" in plan.fastest.why


def test_what_figures_do_not_show_is_said(tiny):
    plan = plan_of(tiny, [played(1, 1000.0), played(1, 2000.0, factor=1.25, staleness=1, bias=0.8)])
    assert plan.cheapest is not None
    assert "racing trains answers 20% shorter than without it" in plan.cheapest.why
    assert "up to 1 version old" in plan.cheapest.why
    assert "strictly on-policy, 1 worker, no over-provisioning is the cheapest" in plan.cheapest.why


def test_another_price_of_workers_is_another_recommendation(tiny):
    plan = plan_of(tiny, [played(0, 1000.0), played(1, 1300.0)], prices=[50.0, 10.0])
    assert [one.cheapest.row.workers for one in plan.by_price] == [1, 0]
    assert [one.fastest.row.workers for one in plan.by_price] == [1, 1]
    assert len(plan.rows) == 4


def test_what_failed_is_shown_and_never_recommended(tiny):
    plan = plan_of(tiny, [played(0, 1000.0), played(1, 9000.0, problem="a law does not hold")])
    assert plan.fastest is not None
    assert plan.fastest.row.workers == 0
    assert [row.problem for row in plan.rows] == [None, "a law does not hold"]
    assert plan_of(tiny, [played(1, 9.0, problem="stuck")]).cheapest is None


def test_a_run_that_gets_stuck_is_an_outcome(tiny):
    scenario = replace(tiny, run=replace(tiny.run, max_time_s=1.0))
    (one,) = play_all(scenario, [Choice(0, 1.0, 1)], 2, 0, num_processes=1)
    assert one.problem is not None
    assert one.problem.startswith("stuck: ")


def test_processes_do_not_change_what_comes_out(tiny):
    wanted = choices([0, 2], [1.0], [0])
    seen = []
    alone = play_all(tiny, wanted, 3, 0, num_processes=1, on_done=seen.append)
    together = play_all(tiny, wanted, 3, 0, num_processes=2)
    assert alone == together
    assert [one.choice for one in alone] == wanted
    assert seen == [1, 2]
    assert alone[1].usd_per_hour == pytest.approx(2.0)
