"""Programming exercises, and the model that the code recipe starts from: what is asked, taught and tested."""

import random
from collections import Counter
from itertools import islice
from typing import Any

import pytest
from transformers import AutoTokenizer

from polyrl.data.exercises import KINDS, RESULTS, Exercise, ExerciseStep, cases_of, draw_exercise, rows
from polyrl.rewards.reward import RewardInput
from polyrl.rewards.sandbox.program import CallCase
from polyrl.rewards.sandbox.scoring import read_cases
from polyrl.starters import programs

EVEN, ADD, REVERSE = KINDS[0], KINDS[3], KINDS[6]
SHOWN = Exercise((ExerciseStep(EVEN, 0), ExerciseStep(ADD, 3), ExerciseStep(REVERSE, 0)), RESULTS[0])
FIRST = ["a: keep even; b: keep above 5; c: reverse; return the list\n", "a: add 4; b: keep above 5; return the sum\n"]
"""The first prompts of validation."""
SOLUTION = """\
def f(x):
    a = [n for n in x if n % 2 == 0]
    b = [n + 3 for n in a]
    c = b[::-1]
    return sum(c)"""


def values(source: str, exercise: Exercise) -> list[Any]:
    """Run a program of ours on the lists of the tests. None: it raises."""
    names: dict[str, Any] = {}
    exec(source, names)
    found = []
    for case in cases_of(exercise):
        try:
            found.append(names["f"](*case["args"]))
        except NameError:
            found.append(None)
    return found


def is_right(source: str, exercise: Exercise) -> bool:
    return values(source, exercise) == [case["value"] for case in cases_of(exercise)]


def test_an_exercise_reads_as_the_page_shows_it():
    assert SHOWN.prompt == "a: keep even; b: add 3; c: reverse; return the sum\n"
    assert SHOWN.solution == SOLUTION


def test_solutions_pass_the_tests_and_need_every_step():
    for index in range(300):
        exercise = draw_exercise("train", index)
        assert is_right(exercise.solution, exercise)
        for place in range(len(exercise.steps)):
            shorter = exercise._replace(steps=exercise.steps[:place] + exercise.steps[place + 1 :])
            assert not is_right(shorter.solution, exercise)


def test_the_splits_never_meet_and_are_the_same_everywhere():
    training = {draw_exercise("train", index).key for index in range(1000)}
    validation = {draw_exercise("validation", index).key for index in range(500)}
    assert not training & validation and len(training) > 700
    assert [row["prompt"] for row in islice(rows("validation"), 2)] == FIRST


def test_a_row_holds_what_the_code_reward_reads():
    row = next(rows())
    cases = read_cases(RewardInput(row["prompt"], "", "", row, "stop", 1), "tests")
    assert len(cases) == 2 and all(isinstance(one, CallCase) and one.function == "f" for one in cases)


def test_the_lessons_and_the_saved_tokenizer_read_alike_and_know_every_word(tmp_path):
    programs.save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    for index in range(100):
        exercise = draw_exercise("train", index)
        for text in (exercise.prompt, exercise.solution):
            tokens = programs.encode(text)
            assert tokenizer(text)["input_ids"] == tokens and tokenizer.unk_token_id not in tokens
            assert tokenizer.decode(tokens) == text


def test_the_careful_teacher_shows_the_solution_and_the_careless_one_is_mostly_wrong():
    assert programs.write(SHOWN, 0.0, random.Random(0)) == SOLUTION
    draws = random.Random(0)
    exercises = [draw_exercise("train", index) for index in range(400)]
    written = [(programs.write(one, programs.CARELESSNESS, draws), one) for one in exercises]
    kinds = Counter("right" if is_right(*one) else "raises" if None in values(*one) else "wrong" for one in written)
    assert 0.25 < kinds["right"] / 400 < 0.45
    assert kinds["raises"] > 20 and kinds["wrong"] > 100


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_lesson_is_the_prompt_which_is_given_and_a_program_which_is_drawn(split):
    exercise = draw_exercise(split, 0)
    one = programs.demonstrate(exercise, 0.0, random.Random(0))
    num_given = one.drawn.index(True)
    assert one.tokens[:num_given] == programs.encode(exercise.prompt)
    assert one.tokens[num_given:-1] == programs.encode(exercise.solution) and all(one.drawn[num_given:])
