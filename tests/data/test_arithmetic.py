"""The arithmetic task: same problems everywhere, splits that never meet, answers of many lengths, an exact check."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrl.config.recipe import ArithmeticTask
from polyrl.data.arithmetic import LETTERS, Problem, draw_problem, is_correct, split_of
from polyrl.errors import UserError

TASK = ArithmeticTask()
TASKS = st.builds(
    lambda low, more, top: ArithmeticTask(min_terms=low, max_terms=low + more, max_term=top),
    st.integers(3, 10),
    st.integers(0, 10),
    st.integers(3, 99),
)


def test_a_problem_reads_as_the_page_shows_it():
    problem = Problem((3, 5, 4, 2))
    assert problem.prompt == "a3b5c4d2="
    assert problem.solution == "b5=8c4=12d2=14"
    assert problem.answer == "14"
    assert problem.as_written == "3 + 5 + 4 + 2"


@given(TASKS, st.integers(0, 1000), st.integers(0, 10**9), st.sampled_from(["train", "validation"]))
def test_a_problem_is_of_its_task_and_split_and_its_solution_is_right(task, seed, index, split):
    problem = draw_problem(task, seed, split, index)
    assert problem == draw_problem(task, seed, split, index)
    assert task.min_terms <= len(problem.terms) <= task.max_terms
    assert all(1 <= term <= task.max_term for term in problem.terms)
    assert split_of(problem.terms) == split
    assert is_correct(problem.solution, problem.answer)


def test_the_draws_are_the_same_on_every_machine_and_in_every_release():
    assert [draw_problem(TASK, 0, "train", index).prompt for index in range(3)] == EXPECTED


def test_training_and_validation_never_share_a_problem():
    train = {draw_problem(TASK, seed, "train", index) for seed in (0, 1) for index in range(1500)}
    validation = {draw_problem(TASK, seed, "validation", index) for seed in (0, 1) for index in range(500)}
    assert train.isdisjoint(validation)


def test_most_answers_are_short_and_some_are_long():
    lengths = sorted(len(draw_problem(TASK, 0, "train", index).solution) for index in range(1000))
    median, longest = lengths[500], lengths[-1]
    assert 8 <= median <= 20
    assert longest >= 2 * median


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("b5=8c4=12", True),
        ("12", True),
        ("=12", True),
        ("b5=8", False),
        ("b5=8c4=012", False),
        ("", False),
        ("b5=8c4=12=", False),
        ("b5=8c4=12 ", True),
        ("3 + 9 = 12.", True),
        ("3 + 9 = 12..", False),
        ("3 + 9 = 12 apples", False),
        ("c4=-12", False),
    ],
)
def test_only_the_number_after_the_last_equals_sign_counts_and_it_must_be_exact(text, right):
    assert is_correct(text, "12") is right


def test_a_task_with_next_to_no_problems_says_so():
    task = ArithmeticTask(min_terms=2, max_terms=2, max_term=1)
    empty = "validation" if split_of((1, 1)) == "train" else "train"
    with pytest.raises(UserError, match="larger max_term"):
        draw_problem(task, 0, empty, 0)


def test_there_is_a_letter_for_every_term():
    assert len(LETTERS) == 26
    with pytest.raises(ValueError, match="below min_terms"):
        ArithmeticTask(min_terms=5, max_terms=4)


EXPECTED = ["a3b3c5=", "a5b5c3=", "a5b5c2d2e1="]
