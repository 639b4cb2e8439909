"""The row that a prompt was made of, beside its answers."""

import json
from pathlib import Path

from tests.web.models import character_model

from polyrl.dashboard.rows import TaskRows


def run_with(folder: Path, data: str) -> Path:
    model = character_model(folder / "model")
    run_dir = folder / "run"
    run_dir.mkdir()
    recipe = f'name = "x"\n[model]\npath = "{model}"\n[rollout]\nmax_new_tokens = 8\n[data]\n{data}\nreward = "math"\n'
    (run_dir / "recipe.toml").write_text(recipe)
    return run_dir


def test_a_row_has_its_expected_answer_and_all_its_columns(tmp_path: Path):
    rows = [{"prompt": f"{n}+1", "answer": str(n + 1), "level": n, "tags": ["a", {"b": None}]} for n in range(3)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = TaskRows(run_with(tmp_path, f'source = "{tmp_path}/data.jsonl"'), patience_s=60.0)
    row = found.of(0, 2)
    assert (row.expected, row.trouble) == ("3", "")
    assert row.fields == {"prompt": "2+1", "answer": "3", "level": "2", "tags": '["a",{"b":null}]'}
    assert "no such row" in found.of(0, 3).trouble and "no such row" in found.of(1, 0).trouble


def test_data_that_is_gone_is_a_line_and_a_long_text_is_cut(tmp_path: Path):
    gone = TaskRows(run_with(tmp_path, f'source = "{tmp_path}/gone.jsonl"'), patience_s=60.0).of(0, 0)
    assert gone.trouble.startswith("the data cannot be read: ") and "gone.jsonl" in gone.trouble
    (tmp_path / "gone.jsonl").write_text(json.dumps({"prompt": "1", "answer": "1", "essay": "x" * 50_000}) + "\n")
    row = TaskRows(tmp_path / "run", patience_s=60.0).of(0, 0)
    assert len(row.fields["essay"]) < 5_000


def test_a_run_without_a_recipe_says_so(tmp_path: Path):
    assert "the data cannot be read" in TaskRows(tmp_path, patience_s=60.0).of(0, 0).trouble
