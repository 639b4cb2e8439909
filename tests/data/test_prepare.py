"""Public layouts, as they are published, to JSON lines: `polyrl data prepare`."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from polyrl.cli.main import main


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def save_openr1(folder: Path) -> Path:
    """Two shards with the columns that OpenR1-Math has."""
    (folder / "data").mkdir(parents=True)
    columns = {
        "problem": ["What is $1+1$?", "Solve."],
        "solution": ["It is 2."] * 2,
        "answer": ["2", None],
        "problem_type": ["Algebra", "Geometry"],
        "source": ["olympiads", "aops"],
        "uuid": ["u1", "u2"],
        "generations": [["<think>..."], []],
        "correctness_math_verify": [[True], []],
    }
    pq.write_table(pa.table(columns), folder / "data" / "train-00000-of-00002.parquet")
    columns["problem"], columns["answer"] = ["Third?", "Fourth?"], [r"\frac{1}{2}", "x"]
    pq.write_table(pa.table(columns), folder / "data" / "train-00001-of-00002.parquet")
    return folder


def test_openr1_is_read_from_its_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "math.jsonl"
    source = save_openr1(tmp_path / "openr1")
    assert main(["data", "prepare", "openr1", "--source", str(source), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: 3 rows, 1 left out: no prompt or no answer\n"
    first, second, _ = read(out)
    about = {"problem_type": "Algebra", "source": "olympiads", "uuid": "u1"}
    assert first == {"prompt": "What is $1+1$?", "answer": "2", **about}
    assert second["answer"] == r"\frac{1}{2}"


def test_gsm8k_keeps_what_follows_the_mark(tmp_path: Path):
    source = tmp_path / "train.jsonl"
    rows = [
        {"question": "How many?", "answer": "3*4=<<3*4=12>>12\n#### 12"},
        {"question": "How much?", "answer": "...\n#### 1,200"},
        {"question": "No mark", "answer": "12"},
    ]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "gsm8k.jsonl"
    assert main(["data", "prepare", "gsm8k", "--source", str(source), "--out", str(out)]) == 0
    assert read(out) == [{"prompt": "How many?", "answer": "12"}, {"prompt": "How much?", "answer": "1200"}]


def test_of_a_directory_of_parquet_files_only_those_for_training_are_read(tmp_path: Path):
    for name, question in (("train-00000-of-00001", "q"), ("test-00000-of-00001", "held out")):
        table = pa.table({"question": [question], "answer": ["#### 3"]})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    out = tmp_path / "gsm8k.jsonl"
    assert main(["data", "prepare", "gsm8k", "--source", str(tmp_path), "--out", str(out)]) == 0
    assert read(out) == [{"prompt": "q", "answer": "3"}]


def test_any_file_is_taken_by_the_names_of_its_columns(tmp_path: Path):
    source, out = tmp_path / "own.parquet", tmp_path / "own.jsonl"
    pq.write_table(pa.table({"question": ["a", "b"], "answer": ["1", "2"], "level": [3, 4]}), source)
    assert main(["data", "prepare", str(source), "--out", str(out)]) == 0
    assert read(out)[1] == {"prompt": "b", "answer": "2", "level": 4}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gsm8k"], "--source: missing, expected where gsm8k was downloaded to"),
        (["gsm8k", "--source", "gone.jsonl"], "gone.jsonl: no such file"),
        (["gone.jsonl"], "gone.jsonl: no such file"),
        (["gone.jsonl", "--source", "x"], "expected openr1 or gsm8k with it"),
        (
            ["gsm8k", "--source", "other.jsonl"],
            "other.jsonl: none of its 1 rows can be used; expected texts in the columns question and answer, with ####",
        ),
        (["other.jsonl"], "none of its 1 rows can be used; expected one of the columns prompt, problem, question"),
    ],
)
def test_what_cannot_be_prepared_is_one_line_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments, message: str
):
    monkeypatch.chdir(tmp_path)
    Path("other.jsonl").write_text('{"text": "x"}\n')
    assert main(["data", "prepare", *arguments, "--out", "out.jsonl"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["other.jsonl"]


def test_folders_that_are_missing_are_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source, out = tmp_path / "own.jsonl", tmp_path / "new/sub/own.jsonl"
    source.write_text('{"question": "a", "answer": "1"}\n')
    assert main(["data", "prepare", str(source), "--out", str(out)]) == 0
    assert read(out) == [{"prompt": "a", "answer": "1"}]
    assert main(["data", "prepare", str(source), "--out", str(source / "sub/own.jsonl")]) == 2
    assert "own.jsonl: cannot be written: Not a directory\n" in capsys.readouterr().err


def test_nothing_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out.jsonl"
    out.write_text("mine")
    assert main(["data", "prepare", str(out), "--out", str(out)]) == 2
    assert out.read_text() == "mine" and "is there already" in capsys.readouterr().err
