"""`polyrl rewards RECIPE FILE`: answers of a file scored as a run would score them."""

import json
from pathlib import Path

import pytest
from tests.integration.desks import bare_desk, model

from polyrl.cli.main import main
from polyrl.cli.rewards import histogram

__all__ = ["bare_desk", "model"]  # fixtures
RECIPE = """
name = "tiny"
model.path = "model"
train.steps = 1
rollout.max_new_tokens = 16
data = { source = "rows.jsonl", prompts_per_step = 2, reward = "scores_of_mine:score" }
"""
MINE = """
from polyrl import Reward

def score(given):
    if given.answer == "a":
        raise ValueError("not this one")
    outcome = "crashed" if given.answer == "b" else "scored"
    return Reward(given.row["number"], {"length": len(given.answer)}, outcome, 0.5)
"""


@pytest.fixture
def desk(bare_desk: Path) -> Path:
    (bare_desk / "scores_of_mine.py").write_text(MINE)
    (bare_desk / "recipe.toml").write_text(RECIPE)
    return bare_desk


def write(*lines: object) -> None:
    Path("answers.jsonl").write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines))


def test_answers_are_scored_by_the_number_of_their_prompt_or_by_a_row_of_their_own(
    desk: Path, capsys: pytest.CaptureFixture[str]
):
    write(
        {"prompt": 3, "answer": "cd"}, "", {"row": {"prompt": "x", "number": 7.5}, "answer": "b"},
        {"prompt": 0, "answer": "a"},
    )  # fmt: skip
    assert main(["rewards", "recipe.toml", "answers.jsonl", "--json"]) == 1
    first, second, third = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first == {
        "line": 1, "domain": first["domain"], "reward": 3.0, "parts": {"length": 2.0}, "outcome": "scored",
        "cpu_s": 0.5, "correct": True,
    }  # fmt: skip
    assert (second["line"], second["reward"], second["outcome"]) == (3, 7.5, "crashed")
    assert third["reward"] is None and "ValueError: not this one" in third["why"]
    assert main(["rewards", "recipe.toml", "answers.jsonl", "--limit", "1"]) == 1
    shown = capsys.readouterr().out
    assert "2 further answers; --limit shows more" in shown and "mean 5.25 of 2 answers" in shown
    assert "1 answers have no reward" in shown and "█" in shown


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "answers.jsonl: has no answers, expected lines such as"),
        (["{"], "answers.jsonl:1: "),
        ([{"prompt": 0, "answer": "x"}, {"answer": "x"}], "answers.jsonl:2: expected either `prompt`, a number, or"),
        ([{"prompt": 20, "answer": "x"}], "answers.jsonl:1: prompt: got 20, expected a number from 0 to 19"),
        ([{"prompt": 0, "answer": "x", "domain": "no"}], "answers.jsonl:1: domain: got 'no', expected one of"),
        ([{"prompt": 0, "answer": 5}], "answers.jsonl:1: Expected `str | null`, got `int`"),
        (['{"row": {"deep": ' + "[" * 5000 + "]" * 5000 + '}, "answer": "x"}'], "answers.jsonl:1: maximum recursion"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(
    desk: Path, capsys: pytest.CaptureFixture[str], lines: list[object], message: str
):
    write(*lines)
    assert main(["rewards", "recipe.toml", "answers.jsonl"]) == 2
    said = capsys.readouterr().err
    assert message in said and len(said.splitlines()) == 1
    assert main(["rewards", "recipe.toml", "nothing.jsonl"]) == 2


GROUPS = """
[[rewards.functions]]
function = "scores_of_mine:score"

[[rewards.functions]]
function = "ranks_of_mine:rank"
weight = 10
whole_group = true
"""
RANKS = """
from polyrl import Reward, RewardGroup

def rank(given: RewardGroup):
    answers = [one.answer for one in given.answers]
    if "odd" in answers:
        return [1.0]
    away = Reward(outcome="infrastructure_failed")
    return [away if one == "away" else {"num": len(answers), "score": sorted(answers).index(one)} for one in answers]
"""


def test_answers_to_the_same_prompt_form_a_group(desk: Path, capsys: pytest.CaptureFixture[str]):
    (desk / "recipe.toml").write_text(RECIPE.replace(', reward = "scores_of_mine:score"', "") + GROUPS)
    (desk / "ranks_of_mine.py").write_text(RANKS)
    row = {"prompt": "x", "number": 7.5}
    write(
        {"prompt": 3, "answer": "z"}, {"row": row, "answer": "y"}, {"prompt": 3, "answer": "c"},
        {"prompt": 3, "answer": "a"}, {"row": row, "answer": "x"}, {"prompt": 4, "answer": "odd"},
        {"prompt": 4, "answer": "d"}, {"prompt": 5, "answer": "away"}, {"prompt": 5, "answer": "e"},
    )  # fmt: skip
    assert main(["rewards", "recipe.toml", "answers.jsonl", "--json"]) == 1
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["line"] for one in found] == list(range(1, 10))
    assert [one["reward"] for one in found] == [3 + 10, 7.5 + 10, 3.0, None, 7.5, None, None, None, 5 + 10]
    assert found[0]["parts"] == {"score": 3.0, "score/length": 1.0, "rank": 1.0, "rank/num": 2.0}
    assert "not this one" in found[3]["why"], "it has no reward of its own, and is in no group"
    assert (
        found[5]["why"] == found[6]["why"] == "ranks_of_mine:rank: returned 1 rewards, expected 2, one for each answer"
    )
    assert "infrastructure_failed" in found[7]["why"]


def test_rows_with_integers_of_any_size_form_groups(desk: Path, capsys: pytest.CaptureFixture[str]):
    only_groups = GROUPS.replace('[[rewards.functions]]\nfunction = "scores_of_mine:score"', "")
    (desk / "recipe.toml").write_text(RECIPE.replace(', reward = "scores_of_mine:score"', "") + only_groups)
    (desk / "ranks_of_mine.py").write_text(RANKS)
    rows = [{"prompt": "x", "number": 10**30 + at} for at in (0, 1, 0)]
    write(*({"row": row, "answer": answer} for row, answer in zip(rows, "yxz", strict=True)))
    assert main(["rewards", "recipe.toml", "answers.jsonl", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["parts"]["num"] for one in found] == [2.0, 1.0, 2.0]
    assert [one["reward"] for one in found] == [0.0, 0.0, 10.0]


def test_a_histogram_has_a_bin_for_each_of_few_scores_and_ten_for_many():
    assert histogram([0.0, 1.0, 1.0]) == [("0", 1), ("1", 2)]
    many = histogram([float(number) for number in range(100)])
    assert len(many) == 10 and sum(num for _, num in many) == 100 and many[0] == ("0 to 9.9", 10)
