"""pass@k against counting all subsets; mean rewards."""

from itertools import combinations

import pytest

from polyrl.trainer.validation import pass_at, report


@pytest.mark.parametrize("num_right", range(7))
@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_attempt(k: int, num_right: int):
    attempts = [place < num_right for place in range(6)]
    subsets = list(combinations(attempts, k))
    assert pass_at(k, 6, num_right) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_an_attempt_without_a_reward_is_none_and_a_prompt_with_too_few_is_left_out():
    told = report([[1.0, None, 0.0], [None, None, 1.0], [None, None, None]], (1, 2), 0.5)
    assert told == {"reward/mean": 0.75, "pass@1": pytest.approx(0.75), "pass@2": pytest.approx(1.0)}


def test_what_counts_as_right_is_a_key_and_the_mean_reward_needs_none():
    rewards = [[0.1, 0.4], [0.0, 0.1]]
    assert report(rewards, (1,), 0.5) == {"reward/mean": pytest.approx(0.15), "pass@1": 0.0}
    assert report(rewards, (1,), 0.3) == {"reward/mean": pytest.approx(0.15), "pass@1": 0.25}
    assert report(rewards, (1,), -1.0)["pass@1"] == 1.0


def test_more_than_there_are_attempts_cannot_be_asked():
    with pytest.raises(ValueError, match="at least 3 attempts"):
        pass_at(3, 2, 1)
    assert report([[1.0]], (4,), 0.5) == {"reward/mean": 1.0}
