"""Which prompts a round starts: the laws of an epoch, in every mode, played on the planner alone."""

import math
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrl.ids import PromptId, Step
from polyrl.scheduling.core.parameters import DomainData, RoundsConfig
from polyrl.scheduling.rules.tail_batching import (
    PlannedPrompt,
    Planner,
    RoundPlan,
    TailBatching,
    in_force,
    start,
    watch_bias,
)

Mode = Literal["off", "race", "prompts", "designated", "predicted"]
MODES: tuple[Mode, ...] = ("off", "race", "prompts", "designated", "predicted")


def planner(
    mode: Mode = "race", *, quotas=(128,), sizes=(10_000,), factor: float = 1.25, num_epochs: int | None = None
) -> tuple[Planner, TailBatching]:
    config = RoundsConfig(tail_batching=mode, samples_per_prompt=8, prompt_factor=factor, sample_factor=1.25)
    domains = tuple(
        DomainData(name=f"d{i}", prompts_per_step=quota, num_prompts=size)
        for i, (quota, size) in enumerate(zip(quotas, sizes, strict=True))
    )
    return Planner(config, domains, seed=7, num_epochs=num_epochs), start(config, len(domains))


def length(choice: PlannedPrompt) -> int:
    """A prompt's own length: the same in every turn and epoch, as `predicted` hopes."""
    return 100 + (choice.prompt * 7919 + choice.domain) % 997


def race(plan: Planner, state: TailBatching, round_: RoundPlan, step: int) -> list[PlannedPrompt]:
    """The shortest of each domain win their places; the others are deferred. Returns the trained."""
    trained: list[PlannedPrompt] = []
    for domain, quota in enumerate(round_.quotas):
        order = sorted((one for one in round_.choices if one.domain == domain), key=length)
        trained += order[:quota]
        for loser in order[quota:]:
            plan.defer(state, loser, Step(step))
    for one in trained:
        plan.remember(state, one.domain, one.prompt, length(one))
    return trained


def play(plan: Planner, state: TailBatching, num_rounds: int = 10_000) -> list[tuple[RoundPlan, list[PlannedPrompt]]]:
    played = []
    for step in range(num_rounds):
        round_ = plan.plan_round(state, Step(step))
        if round_ is None:
            break
        played.append((round_, race(plan, state, round_, step)))
        for domain, waiting in enumerate(state.deferred):
            quota = plan.domains[domain].prompts_per_step
            most = quota + math.ceil(plan.config.prompt_factor * quota) - quota
            assert len(waiting) < most or not waiting
            assert all(one.times_deferred == 1 for one in waiting)
    return played


def test_with_a_factor_of_a_quarter_four_short_rounds_are_followed_by_a_long_one():
    plan, state = planner()
    played = play(plan, state, 20)
    assert "".join(round_.kind[0] for round_, _ in played) == "ssssl" * 4
    short, long = played[0][0], played[4][0]
    assert (len(short.choices), short.quotas, short.num_samples) == (160, (128,), 10)
    assert (len(long.choices), long.quotas, long.num_samples) == (128, (128,), 8)
    assert all(one.times_deferred == 1 for one in long.choices)


def test_a_long_round_takes_the_oldest_first():
    plan, state = planner()
    played = play(plan, state, 5)
    steps = [one.first_deferred_step for one in played[4][0].choices]
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == (0, 3)


def test_off_takes_what_the_step_needs():
    plan, state = planner("off")
    played = play(plan, state, 5)
    assert {(one.kind, len(one.choices), one.num_samples) for one, _ in played} == {("short", 128, 8)}


def test_only_prompts_race_in_mode_prompts():
    plan, state = planner("prompts")
    round_ = plan.plan_round(state, Step(0))
    assert round_ is not None
    assert (len(round_.choices), round_.num_samples) == (160, 8)


def test_extras_run_in_mode_designated():
    plan, state = planner("designated")
    round_ = plan.plan_round(state, Step(0))
    assert round_ is not None
    assert (len(round_.choices), round_.num_samples) == (160, 10)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sizes", [(1000,), (7,), (128,), (161,)])
def test_every_prompt_is_trained_exactly_once_an_epoch(mode, sizes):
    plan, state = planner(mode, sizes=sizes, num_epochs=3)
    played = play(plan, state)
    trained = [(one.epoch, one.prompt) for _, groups in played for one in groups]
    assert sorted(trained) == [(epoch, prompt) for epoch in range(3) for prompt in range(sizes[0])]
    assert state.deferred == [[]]


@pytest.mark.parametrize("mode", MODES)
def test_every_domain_has_its_share_of_every_step_while_it_has_prompts(mode):
    plan, state = planner(mode, quotas=(96, 32), sizes=(5000, 5000))
    for round_, trained in play(plan, state, 30):
        assert round_.quotas == (96, 32)
        assert [sum(one.domain == d for one in trained) for d in (0, 1)] == [96, 32]


@pytest.mark.parametrize("mode", MODES)
def test_domains_of_unlike_sizes_are_each_trained_once_an_epoch(mode):
    plan, state = planner(mode, quotas=(6, 3), sizes=(40, 25), num_epochs=2)
    trained = [(one.domain, one.epoch, one.prompt) for _, groups in play(plan, state) for one in groups]
    assert sorted(trained) == [(d, e, p) for d, size in ((0, 40), (1, 25)) for e in range(2) for p in range(size)]


def test_at_the_end_of_an_epoch_the_deferred_are_drained_by_a_smaller_long_round():
    plan, state = planner(quotas=(8,), sizes=(25,), num_epochs=1)
    played = play(plan, state)
    shape = [(round_.kind, len(round_.choices), round_.quotas[0]) for round_, _ in played]
    assert shape == [("short", 10, 8), ("short", 10, 8), ("short", 5, 5), ("long", 4, 4)]
    assert played[-1][0].kind == "long"
    assert "drained" in played[-1][0].why


def test_the_data_ends_after_the_last_epoch_and_never_without_one():
    plan, state = planner(quotas=(4,), sizes=(10,), num_epochs=1)
    play(plan, state)
    assert plan.plan_round(state, Step(99)) is None
    plan, state = planner(quotas=(4,), sizes=(10,), num_epochs=None)
    assert len(play(plan, state, 50)) == 50


def test_deferred_prompts_do_not_starve_when_no_more_will_come():
    """With factors that have come down to 1 nothing is deferred any more: what waits is drained by a smaller round."""
    plan, state = planner(quotas=(4,))
    state.factors.prompts = 1.0
    plan.defer(state, PlannedPrompt(0, PromptId(1), 0, 0, -1), Step(1))
    round_ = plan.plan_round(state, Step(2))
    assert round_ is not None
    assert round_.kind == "long"
    assert round_.choices[0].prompt == 1
    assert len(round_.choices) == 4, "filled with fresh prompts"


def test_predicted_rounds_race_nothing_and_pass_over_what_was_long_before():
    plan, state = planner("predicted", quotas=(8,), sizes=(80,), num_epochs=2)
    played = play(plan, state)
    first = [round_ for round_, trained in played if trained[0].epoch == 0]
    assert {(one.kind, one.num_passed_over) for one in first} == {("short", 0)}, "nothing is known yet"
    second = [(round_, trained) for round_, trained in played if trained[0].epoch == 1]
    assert sum(round_.num_passed_over for round_, _ in second) > 0
    assert all(len(round_.choices) == sum(round_.quotas) for round_, _ in second), "nobody races"
    short = [length(one) for round_, trained in second if round_.kind == "short" for one in trained]
    long = [length(one) for round_, trained in second if round_.kind == "long" for one in trained]
    assert sum(long) / len(long) > sum(short) / len(short)


@given(
    mode=st.sampled_from(MODES),
    quotas=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    size=st.integers(1, 40),
    factor=st.sampled_from([1.0, 1.125, 1.25, 1.5, 2.0]),
)
def test_the_laws_of_an_epoch_hold_for_any_shape(mode, quotas, size, factor):
    sizes = tuple(size + i for i in range(len(quotas)))
    plan, state = planner(mode, quotas=tuple(quotas), sizes=sizes, factor=factor, num_epochs=2)
    trained = [(one.domain, one.epoch, one.prompt) for _, groups in play(plan, state) for one in groups]
    assert sorted(trained) == [(d, e, p) for d in range(len(sizes)) for e in range(2) for p in range(sizes[d])]


def guarded(mode: Mode, max_bias: float = 0.2) -> tuple[RoundsConfig, TailBatching]:
    config = RoundsConfig(tail_batching=mode, bias_guard=True, max_bias=max_bias)
    return config, start(config, 1)


def period(config: RoundsConfig, state: TailBatching, trained_mean: int, num_samples: int = 1024) -> str:
    """Train a short and a long round, of answers whose mean should be 1000."""
    assert not watch_bias(config, state, "short", trained_mean * num_samples, num_samples, 1000.0)
    return watch_bias(config, state, "long", trained_mean * num_samples, num_samples, 1000.0)


def test_the_guard_leaves_a_mode_for_milder_ones_until_what_is_trained_is_long_enough():
    config, state = guarded("race")
    assert period(config, state, 820) == ""
    assert "from race to prompts: the answers that it trains are 30% shorter" in period(config, state, 700)
    assert in_force(config, state).tail_batching == "prompts"
    assert "from prompts to off" in period(config, state, 790)
    assert period(config, state, 500) == "", "there is no milder mode than off"


def test_the_guard_judges_whole_periods_of_many_samples():
    config, state = guarded("designated")
    assert period(config, state, 100, num_samples=100) == ""
    assert "from designated to off" in period(config, state, 100, num_samples=100), "400 samples since"
    assert not watch_bias(RoundsConfig(tail_batching="race"), start(config, 1), "long", 1, 1000, 1000.0)


def test_deferred_prompts_are_drained_once_the_guard_has_left_the_race():
    config = RoundsConfig(tail_batching="race", bias_guard=True)
    plan = Planner(config, (DomainData(name="d", prompts_per_step=4, num_prompts=100),), seed=7, num_epochs=1)
    state = start(config, 1)
    short = plan.plan_round(state, Step(0))
    assert short is not None
    race(plan, state, short, 0)
    state.milder = "off"
    second, third = plan.plan_round(state, Step(1)), plan.plan_round(state, Step(2))
    assert second is not None and third is not None
    assert (second.kind, second.num_samples, [one.times_deferred for one in second.choices]) == (
        "long",
        8,
        [1, 0, 0, 0],
    )
    assert (third.kind, third.num_samples, len(third.choices)) == ("short", 8, 4)


@pytest.mark.parametrize("mode", ["off", "predicted"])
def test_a_guard_where_there_is_no_milder_mode_is_refused(mode):
    with pytest.raises(ValueError, match="bias_guard: there is no milder mode"):
        RoundsConfig(tail_batching=mode, bias_guard=True)
