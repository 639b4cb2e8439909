"""The models that recipes with an environment start from: what their teachers play, and what comes out."""

import random
from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from polyrl.data import characters
from polyrl.starters import agents, frozenlake
from polyrl.starters.environments import Calculator, Treasure
from polyrl.starters.teaching import Demonstration


def spans(one: Demonstration) -> list[tuple[bool, str]]:
    """Given and drawn texts in turn; `.` is the end token."""
    found: list[tuple[bool, str]] = []
    for token, drawn in zip(one.tokens, one.drawn, strict=True):
        text = "." if token == characters.END_ID else characters.decode([token])
        if found and found[-1][0] == drawn:
            found[-1] = drawn, found[-1][1] + text
        else:
            found.append((drawn, text))
    return found


def played(name: str, num: int) -> list[list[tuple[bool, str]]]:
    draws = random.Random(0)
    return [spans(agents.play(agents.STARTERS[name], index, draws)) for index in range(num)]


def test_the_teacher_of_the_calculator_calls_it_now_and_then_and_is_mostly_wrong():
    episodes = played("calculator", 400)
    rewards = []
    for number, episode in enumerate(episodes):
        environment = Calculator(style="letters")
        assert episode[0] == (False, environment.begin({"index": number}, agents._LESSON_SEED))
        turns = [environment.step(text.removesuffix(".")) for drawn, text in episode if drawn]
        assert [turn.done for turn in turns] == [False] * (len(turns) - 1) + [True]
        rewards.append(turns[-1].reward)
    assert 0.15 < sum(len(one) == 4 for one in episodes) / 400 < 0.35
    assert 0.1 < sum(rewards) / 400 < 0.35


def test_the_teacher_of_the_treasure_rarely_listens():
    episodes = played("treasure", 400)
    assert all(text in ("l.", "r.") for one in episodes for drawn, text in one if drawn)
    moves = Counter((one[at][1] == one[at - 2][1], one[at - 1][1]) for one in episodes for at in range(3, len(one), 2))
    assert 0.55 < moves[True, "w"] / (moves[True, "w"] + moves[False, "w"]) < 0.75
    assert 0.55 < moves[False, "c"] / (moves[True, "c"] + moves[False, "c"]) < 0.75


@pytest.mark.parametrize("name", ["calculator", "treasure"])
def test_the_same_seed_gives_the_same_weights(tmp_path, name):
    for folder in ("one", "two"):
        agents.make_model(name, tmp_path / folder, seed=3, num_steps=5)
    one, two = (
        AutoModelForCausalLM.from_pretrained(tmp_path / folder, local_files_only=True) for folder in ("one", "two")
    )
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert sum(weight.numel() for weight in one.parameters()) < 1_000_000


def test_an_episode_of_the_treasure_ends_with_its_reward():
    assert len(played("treasure", 1)[0]) <= 2 * Treasure().max_turns


def test_the_lake_is_read_alike_by_the_lessons_and_by_the_tokenizer_that_is_saved(tmp_path):
    frozenlake.save_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    board = "+-----+-----+\n|  P  |     |\n+-----+-----+\n|  H  |  G  |\n+-----+-----+"
    for text in (f"Welcome!\nCurrent Board:\n\n{board}\n\nAvailable", board, "down"):
        assert tokenizer(text)["input_ids"] == frozenlake.encode(text)
    assert [frozenlake.VOCABULARY[one] for one in frozenlake.encode(board)][1:3] == ["|  P  ", "|     "]
    assert tokenizer.decode(frozenlake.encode("down")) == "down"


def test_the_teacher_of_the_lake_looks_for_holes_now_and_then():
    board = "|  P  |     |\n|  H  |  G  |\n"
    draws = random.Random(0)
    moves = Counter(frozenlake.teach([board], draws) for _ in range(1000))
    assert 400 < moves["right"] < 560 and 100 < moves["down"] < 250


def test_a_lesson_on_the_lake_is_an_episode_of_the_game():
    pytest.importorskip("textarena")
    one = agents.play(agents.STARTERS["frozenlake"], 0, random.Random(0))
    assert one.drawn.index(True) == 16 + 5, "a board of 16 cells, and what is before, between and after its rows"
    assert one.tokens[-1] == characters.END_ID and one.drawn[-2:] == [True, True]
