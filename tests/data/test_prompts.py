"""From rows to prompts: columns, templates, chats, answers; and file and line for a row that has none."""

import json
from pathlib import Path
from typing import Any

import pytest

from polyrl.config.recipe import DomainFields
from polyrl.data.prompts import Task, read_tasks
from polyrl.data.rows import DataError
from polyrl.errors import ConfigError


def tasks_of(tmp_path: Path, *rows: dict[str, Any], needs_answer: bool | str = False, **settings: Any) -> list[Task]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(read_tasks(str(path), DomainFields(**settings), needs_answer=needs_answer))


def test_a_plain_prompt_is_its_column(tmp_path: Path):
    assert tasks_of(tmp_path, {"prompt": "1+1=", "answer": "2"}) == [
        Task("1+1=", "2", {"prompt": "1+1=", "answer": "2"})
    ]


def test_columns_have_the_names_that_the_recipe_says(tmp_path: Path):
    (task,) = tasks_of(tmp_path, {"q": "why", "a": 3}, prompt_key="q", answer_key="a")
    assert (task.prompt, task.expected) == ("why", "3")


def test_a_template_may_name_any_column_and_braces_in_the_data_are_text(tmp_path: Path):
    row = {"prompt": "f{x}", "level": 3}
    (task,) = tasks_of(tmp_path, row, template="[{level}] {prompt} {{ok}}")
    assert task.prompt == "[3] f{x} {ok}"


def test_a_chat_is_a_users_message_after_the_systems(tmp_path: Path):
    (task,) = tasks_of(tmp_path, {"prompt": "hi"}, chat=True, system="be short", template="{prompt}!")
    assert task.prompt == [{"role": "system", "content": "be short"}, {"role": "user", "content": "hi!"}]


def test_a_list_of_messages_is_taken_as_it_is(tmp_path: Path):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    (task,) = tasks_of(tmp_path, {"prompt": messages})
    assert task.prompt == messages


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("x", "x"), (3, "3"), (3.0, "3"), (12345678.0, "12345678"), (2.5, "2.5"), (None, ""), ([1, "a"], '[1,"a"]')],
)
def test_an_expected_answer_is_text(tmp_path: Path, answer: Any, expected: str):
    (task,) = tasks_of(tmp_path, {"prompt": "p", "answer": answer})
    assert task.expected == expected


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "p"}, "rows.jsonl:2: no column 'prompt', which data.prompt_key names; the row has question"),
        ({"prompt": 3}, "rows.jsonl:2: prompt: got 3, expected a text or a list of messages"),
        ({"prompt": None}, "rows.jsonl:2: prompt: got null, expected"),
        ({"prompt": " "}, "rows.jsonl:2: prompt: got an empty text, expected"),
        ({"prompt": []}, "rows.jsonl:2: prompt: got a list of 0, expected"),
        ({"prompt": [{"role": "user"}]}, "rows.jsonl:2: prompt.0: expected a message"),
        ({"prompt": "p"}, "rows.jsonl:2: answer: got nothing, expected the answer"),
        ({"prompt": "p", "answer": {"a": 1}}, "rows.jsonl:2: answer: got an object, expected the answer"),
        ({"prompt": "p", "answer": ""}, "rows.jsonl:2: answer: got an empty text, expected the answer"),
    ],
)
def test_a_row_that_cannot_be_used_is_one_line_with_file_and_line(tmp_path: Path, row: dict[str, Any], message: str):
    with pytest.raises(DataError) as wrong:
        tasks_of(tmp_path, {"prompt": "good", "answer": "1"}, row, needs_answer=True)
    assert message in str(wrong.value)


def test_a_column_that_a_template_names_and_a_row_lacks_is_named(tmp_path: Path):
    with pytest.raises(DataError, match=r"rows\.jsonl:1: no column 'level', which data.template names"):
        tasks_of(tmp_path, {"prompt": "p"}, template="{level}{prompt}")


def test_another_column_may_stand_for_the_answer_and_a_row_without_either_is_an_error(tmp_path: Path):
    rows = [{"prompt": "good", "answer": "1"}, {"prompt": "good", "tests": [1]}]
    assert [task.expected for task in tasks_of(tmp_path, *rows, needs_answer="tests")] == ["1", ""]
    for bad in ({"prompt": "bad"}, {"prompt": "bad", "tests": None, "answer": " "}):
        with pytest.raises(DataError, match=r"rows.jsonl:3: answer: got .* or a column 'tests'"):
            tasks_of(tmp_path, *rows, bad, needs_answer="tests")


@pytest.mark.parametrize("needs_answer", [False, True])
def test_a_column_for_answers_that_is_named_and_that_no_row_has_is_an_error(tmp_path: Path, *, needs_answer: bool):
    rows = [{"prompt": "p", "total": 3}, {"prompt": "q", "total": 4}]
    with pytest.raises(DataError) as wrong:
        tasks_of(tmp_path, *rows, answer_key="totl", needs_answer=needs_answer)
    words = "rows.jsonl:1: no column 'totl', which data.answer_key names; the row has prompt, total; did you mean"
    assert f"{words} 'total'?" in str(wrong.value)


def test_a_reward_of_ones_own_may_do_without_an_answer_in_some_rows_or_in_all(tmp_path: Path):
    some = tasks_of(tmp_path, {"prompt": "p"}, {"prompt": "q", "total": 4}, answer_key="total")
    assert [task.expected for task in some] == ["", "4"]
    assert [task.expected for task in tasks_of(tmp_path, {"prompt": "p"})] == [""]
    assert tasks_of(tmp_path, answer_key="total") == []


def test_a_template_that_cannot_be_filled_is_the_templates_fault(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"data\.template: "):
        tasks_of(tmp_path, {"prompt": "p"}, template="{prompt:d}")


VERL = {
    "prompt": [{"role": "user", "content": "1+1"}],
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra.level": 3,
    "extra_info": {"hints": ["a", "b"]},
}


def test_a_column_within_a_column_is_reached_by_the_way_to_it(tmp_path: Path):
    (task,) = tasks_of(tmp_path, VERL, answer_key="reward_model.ground_truth", needs_answer=True)
    assert (task.prompt, task.expected) == (VERL["prompt"], "2")
    settings: dict[str, Any] = {"prompt_key": "prompt.0.content", "answer_key": "extra.level"}
    (task,) = tasks_of(tmp_path, VERL, template="{extra_info.hints.1}: {prompt} {extra.level:02d}", **settings)
    assert (task.prompt, task.expected) == ("b: 1+1 03", "3")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"answer_key": "reward_model.truth"}, "no column 'reward_model.truth', which data.answer_key names"),
        ({"answer_key": "prompt.7.content"}, "no column 'prompt.7.content', which data.answer_key names"),
        ({"prompt_key": "reward_model.style.x"}, "no column 'reward_model.style.x', which data.prompt_key names"),
        (
            {"prompt_key": "reward_model.style", "template": "{prompt} {extra_info.none}"},
            "no column 'extra_info.none', which data.template names",
        ),
    ],
)
def test_a_way_that_leads_nowhere_is_named(tmp_path: Path, settings: dict[str, Any], said: str):
    with pytest.raises(DataError, match=said):
        tasks_of(tmp_path, VERL, **settings)


def test_no_template_reaches_into_python(tmp_path: Path):
    with pytest.raises(DataError, match=r"no column 'prompt\.__class__'"):
        tasks_of(tmp_path, {"prompt": "x"}, template="{prompt} {prompt.__class__}")
