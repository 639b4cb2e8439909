"""The rewards that ship with the package."""

import pytest

from polyrl.rewards import arithmetic, math_answers
from polyrl.rewards.reward import RewardFailed, RewardInput


def given(answer: str, expected: str) -> RewardInput:
    return RewardInput("", answer, expected, {}, "stop", 1)


@pytest.mark.parametrize(
    ("answer", "reward"), [("8+2=10", 1.0), ("10", 1.0), ("10=11", 0.0), ("8+2=1", 0.0), ("", 0.0), ("10=", 0.0)]
)
def test_arithmetic_looks_at_the_number_after_the_last_equals_sign(answer: str, reward: float):
    assert arithmetic.score(given(answer, "10")) == reward


@pytest.mark.parametrize(
    ("answer", "expected", "reward"),
    [
        (r"Hence $\boxed{42}$.", "42", 1.0),
        ("The answer is 42.", "42", 1.0),
        (r"So \boxed{\frac12}", "0.5", 1.0),
        ("0.5", r"\frac{1}{2}", 1.0),
        (r"\boxed{\frac{2}{4}}", r"$\frac{1}{2}$", 1.0),
        (r"\boxed{(1, 2]}", "(1,2]", 1.0),
        ("43", "42", 0.0),
        ("I do not know", "3", 0.0),
        ("", "3", 0.0),
        (r"\boxed{\frac{", "3", 0.0),
    ],
)
def test_math_compares_what_the_answers_mean(answer: str, expected: str, reward: float):
    assert math_answers.score(given(answer, expected)) == reward


def test_math_fails_where_the_data_has_no_answer_to_compare_with():
    with pytest.raises(RewardFailed, match="cannot be read as mathematics"):
        math_answers.score(given("3", " "))
