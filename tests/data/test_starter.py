"""The model that the arithmetic recipe starts from: what it is taught, and what comes out."""

import random

import pytest
import torch
from tests.full_disk import files_of_at_most
from transformers import AutoModelForCausalLM, AutoTokenizer

from polyrl.config.recipe import ArithmeticTask
from polyrl.data import characters
from polyrl.data.arithmetic import Problem, draw_problem, is_correct
from polyrl.errors import UserError
from polyrl.starters import arithmetic, teaching

TASK = ArithmeticTask()
PROBLEM = Problem((3, 5, 4, 2))


def text_of(demonstration: teaching.Demonstration) -> str:
    tokens, num_given = demonstration.tokens, demonstration.drawn.index(True)
    assert tokens[:num_given] == characters.encode(PROBLEM.prompt)
    assert all(demonstration.drawn[num_given:])
    assert tokens[-1] == characters.END_ID
    return characters.decode(tokens[num_given:])


def test_the_patient_teacher_shows_the_solution():
    assert text_of(arithmetic.demonstrate(PROBLEM, 0.0, random.Random(0))) == PROBLEM.solution


def test_the_impatient_teacher_works_right_up_to_a_guess():
    guessed = [text_of(arithmetic.demonstrate(PROBLEM, 1.0, random.Random(seed))) for seed in range(40)]
    assert all(text.startswith("=") and text[1:].isdecimal() for text in guessed)
    assert sum(is_correct(text, PROBLEM.answer) for text in guessed) < 10
    for seed in range(200):
        text = text_of(arithmetic.demonstrate(PROBLEM, 0.4, random.Random(seed)))
        worked, _, _ = text.rpartition("=")
        assert text == PROBLEM.solution or PROBLEM.solution.startswith(worked)


def test_the_directory_loads_as_any_other_and_the_same_seed_gives_the_same_weights(tmp_path):
    for name in ("one", "two"):
        arithmetic.make_model(tmp_path / name, seed=3, task=TASK, num_steps=10)
    one = AutoModelForCausalLM.from_pretrained(tmp_path / "one", local_files_only=True)
    two = AutoModelForCausalLM.from_pretrained(tmp_path / "two", local_files_only=True)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert one.config.eos_token_id == characters.END_ID
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "one", local_files_only=True)
    assert tokenizer(PROBLEM.prompt)["input_ids"] == characters.encode(PROBLEM.prompt)
    assert sum(weight.numel() for weight in one.parameters()) < 1_000_000


@pytest.mark.parametrize("num_bytes", [10_000, 1000], ids=["weights", "configuration"])
def test_a_disk_that_is_full_is_one_line_and_leaves_no_file(tmp_path, monkeypatch, num_bytes):
    if num_bytes == 1000:
        monkeypatch.setattr(teaching, "save_file", lambda *given, **named: None)
    with files_of_at_most(num_bytes), pytest.raises(UserError, match=rf"^{tmp_path}: cannot be written: .*too large"):
        arithmetic.make_model(tmp_path, seed=3, task=TASK, num_steps=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(5))
def test_it_is_right_in_about_three_answers_of_ten(tmp_path, seed):
    arithmetic.make_model(tmp_path, seed=seed, task=TASK)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    problems = [draw_problem(TASK, seed, "validation", index) for index in range(400)]
    torch.manual_seed(seed)
    assert 0.18 <= share_right(model, problems) <= 0.38


def share_right(model, problems) -> float:
    longest = max(len(problem.prompt) for problem in problems)
    padded = [[characters.PAD_ID] * (longest - len(one.prompt)) + characters.encode(one.prompt) for one in problems]
    prompts = torch.tensor(padded)
    out = model.generate(
        prompts, attention_mask=(prompts != characters.PAD_ID).long(), do_sample=True, top_k=0, max_new_tokens=64
    )
    answers = [characters.decode(row[longest:].tolist()) for row in out]
    return sum(is_correct(text, one.answer) for text, one in zip(answers, problems, strict=True)) / len(problems)
