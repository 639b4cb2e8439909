"""Several rewards for one answer: how scores and parts are put together, and which functions a recipe chooses."""

import pytest
from tests.unit.test_recipe import recipe

from polyrl.config.rewards import WeightedReward
from polyrl.errors import ConfigError
from polyrl.rewards.reward import Reward, RewardFailed
from polyrl.rewards.weighing import weigh

RIGHT = WeightedReward(name="right", function="math")
STYLE = WeightedReward(name="style", function="mine:style", weight=-0.5)


def test_scores_are_weighted_and_added_and_each_is_a_part_before_it_is_weighted():
    found = weigh([RIGHT, STYLE], [Reward(1.0), Reward(0.4, {"tone": 0.1})], is_only=False)
    assert found == Reward(0.8, {"right": 1.0, "style": 0.4, "style/tone": 0.1})


def test_the_only_function_is_the_reward_and_its_parts_keep_their_names():
    assert weigh([WeightedReward(function="mine:f")], [Reward(2.0, {"a": 1.0})], is_only=True) == Reward(
        2.0, {"a": 1.0}
    )


def test_one_that_has_a_name_is_told_by_it():
    assert weigh([RIGHT], [Reward(1.0)], is_only=True) == Reward(1.0, {"right": 1.0})


def test_a_sum_that_is_too_large_is_no_reward():
    with pytest.raises(RewardFailed, match=r"adds up to -1.5e\+09, expected a number of at most 1e\+09"):
        weigh([WeightedReward(function="mine:f", weight=1e9)], [Reward(-1.5)], is_only=True)


def chosen(*overrides: str) -> list[tuple[str, float]]:
    one = recipe(*overrides)
    return [(function.title, function.weight) for function in one.rewards_of(one.data.all_domains[0])]


TWO = 'rewards.functions=[{name="right",function="math"},{function="mine:style",weight=0.5}]'


def test_a_domain_without_a_reward_has_all_functions_and_one_may_name_some():
    assert chosen(TWO) == [("right", 1.0), ("style", 0.5)]
    assert chosen(TWO, 'data.reward=["style","right","mine:third"]') == [("style", 0.5), ("right", 1.0), ("third", 1.0)]
    assert chosen() == [("arithmetic", 1.0)]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [TWO, "data.reward=right"],
            "rewards.functions: no domain uses style; name it in data.reward, or leave it out",
        ),
        (['data.reward=["a:f","b:f"]'], r"data.reward: 'f' is there twice; \[\[rewards.functions\]\] gives functions"),
        (['rewards.functions=[{function="a:f"},{function="b:f"}]'], "rewards.functions.1.name: 'f' is there twice"),
        (['rewards.functions=[{function="a:f",name="x y"}]'], "rewards.functions.0.name: got 'x y', expected up to 64"),
        (['rewards.functions=[{function="a:f",wieght=2}]'], "rewards.functions.0.wieght: unknown key"),
        (
            ["data.reward=[]"],
            "data.reward: got none, expected arithmetic, math, code, judge, reward_model or module",
        ),
        (["rewards.memory_gb=0"], "rewards.memory_gb: got 0"),
        (['rewards.functions=[{function="a:f",weight=1e200}]'], r"rewards.functions.0.weight: got 1e\+200, expected"),
    ],
)
def test_what_cannot_be_meant_is_one_line(overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=f"^{message}"):
        recipe(*overrides)
