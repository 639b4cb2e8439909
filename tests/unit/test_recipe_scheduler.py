"""What a recipe says to the scheduler."""

import pytest
from tests.unit.test_recipe import TWO_DOMAINS, recipe

from polyrl.rewards.line import START_TIMEOUT_S
from polyrl.run.settings import scheduler_config


def test_domains_and_their_sizes_become_the_scheduler_s():
    config = scheduler_config(recipe("train.seed=5", tree=TWO_DOMAINS), [100, 200], prompt_tokens=40)
    assert [(one.name, one.prompts_per_step, one.num_prompts) for one in config.domains] == [
        ("math", 24, 100),
        ("sums", 8, 200),
    ]
    assert (config.seed, config.prompt_tokens, config.streaming) == (5, 40, True)


def test_only_an_async_run_is_written_by_older_versions():
    assert scheduler_config(recipe(), [1]).max_staleness == 0
    assert scheduler_config(recipe("train.mode=async"), [1]).max_staleness == 1
    config = scheduler_config(recipe("train.mode=async", "train.max_staleness=3"), [1])
    assert (config.max_staleness, config.streaming) == (3, True)


def test_the_data_may_have_a_seed_of_its_own():
    assert scheduler_config(recipe("train.seed=5", "data.shuffle_seed=0"), [1]).seed == 0


def test_a_domain_without_a_prompt_is_named():
    with pytest.raises(ValueError, match=r"math\.jsonl: domain 'math' has no prompt"):
        scheduler_config(recipe(tree=TWO_DOMAINS), [0, 5])


def test_a_synchronous_run_scores_and_trains_when_all_is_generated():
    config = scheduler_config(recipe("train.mode=synchronous"), [10])
    assert not config.streaming
    assert not config.rewards.as_finished


def test_the_scheduler_waits_longer_for_a_reward_than_the_pool_lets_it_start_run_and_queue():
    config = scheduler_config(recipe("rewards.processes=2", "rewards.timeout_s=3"), [10])
    assert config.rewards.slots == 16
    assert config.rewards.t_max_s >= (START_TIMEOUT_S + 3) * (16 / 2)
    assert not config.rewards.adaptive


def test_the_scheduler_waits_for_all_functions_that_score_a_domain_however_they_are_named():
    one = scheduler_config(recipe("data.reward=math"), [10]).rewards.t_max_s
    assert scheduler_config(recipe("data.reward=['math', 'own:style']"), [10]).rewards.t_max_s == 2 * one
    both = "rewards.functions=[{function = 'math'}, {function = 'own:style'}]"
    assert scheduler_config(recipe(both), [10]).rewards.t_max_s == 2 * one
    assert scheduler_config(recipe(both, "data.reward=['math', 'style', 'own:more']"), [10]).rewards.t_max_s == 3 * one


def test_learned_limits_are_the_schedulers_and_the_wall_time_behind_them_is_longer_than_any_queue():
    made = recipe("rewards.adaptive=true", "rewards.t_min_s=1", "rewards.t_max_s=10", "rewards.timeout_s=3")
    rules = scheduler_config(made, [100]).rewards
    assert (rules.adaptive, rules.t_min_s, rules.t_max_s, rules.max_attempts) == (True, 1.0, 10.0, 3)
    assert made.rewards.wall_s == 22.0 and rules.wall_s >= (START_TIMEOUT_S + 22.0) * (16 / 2)
    plain = scheduler_config(recipe(), [100]).rewards
    assert not plain.adaptive and plain.wall_s == 0.0
