"""Rows from every kind of file, with their places, and one line for whatever is wrong with a file."""

import datetime
import json
from decimal import Decimal
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from polyrl.data.rows import DataError, read_rows


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def save_dataset(folder: Path, *tables: pa.Table) -> Path:
    """As `Dataset.save_to_disk` lays it out."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(tables):05d}.arrow" for number in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_json_lines_keep_their_line_numbers_across_empty_lines(tmp_path: Path):
    path = write_lines(tmp_path / "a.jsonl", '{"prompt": "é", "n": 1}', "", '{"prompt": "b"}')
    assert [(row.place, row.fields) for row in read_rows(path)] == [
        (f"{path}:1", {"prompt": "é", "n": 1}),
        (f"{path}:3", {"prompt": "b"}),
    ]


def test_the_mark_that_some_editors_put_before_utf_8_is_no_part_of_the_first_row(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes('{"prompt": "a"}\n{"prompt": "b"}\n'.encode("utf-8-sig"))
    assert [row.fields["prompt"] for row in read_rows(path)] == ["a", "b"]


def test_only_the_first_rows_are_read_when_so_many_are_wanted(tmp_path: Path):
    path = write_lines(tmp_path / "a.jsonl", '{"a": 1}', '{"a": 2}', "not json")
    assert [row.fields["a"] for row in read_rows(path, 2)] == [1, 2]


def test_parquet_rows_are_plain_data(tmp_path: Path):
    when = datetime.datetime(2026, 1, 2, 3, 4, 5)
    table = pa.table({"prompt": ["a", "b"], "list": [[1, 2], []], "when": [when] * 2, "cost": [Decimal("1.50")] * 2})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1)
    rows = list(read_rows(tmp_path / "a.parquet"))
    assert rows[1].place == f"{tmp_path / 'a.parquet'}: row 2"
    assert rows[0].fields == {"prompt": "a", "list": [1, 2], "when": "2026-01-02T03:04:05", "cost": "1.50"}


def test_a_saved_dataset_is_read_file_after_file(tmp_path: Path):
    folder = save_dataset(tmp_path / "set", pa.table({"prompt": ["a", "b"]}), pa.table({"prompt": ["c"]}))
    assert [row.fields["prompt"] for row in read_rows(folder)] == ["a", "b", "c"]


def test_of_several_splits_the_training_split_is_read(tmp_path: Path):
    save_dataset(tmp_path / "train", pa.table({"prompt": ["a"]}))
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert [row.fields["prompt"] for row in read_rows(tmp_path)] == ["a"]
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["test"]}')
    with pytest.raises(DataError, match=r"no split 'train' there; expected .*#test"):
        list(read_rows(tmp_path))


def test_what_the_datasets_library_saves_is_read(tmp_path: Path):
    whole = datasets.Dataset.from_dict({"prompt": ["a", "b", "c"], "n": [1, 2, 3]})
    whole.select([2, 0]).save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": whole}).save_to_disk(str(tmp_path / "dict"))
    assert [row.fields for row in read_rows(tmp_path / "one")] == [{"prompt": "c", "n": 3}, {"prompt": "a", "n": 1}]
    assert [row.fields["n"] for row in read_rows(tmp_path / "dict")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', "a.jsonl:2: not JSON"),
        ("a.jsonl", b'{"a": 1}\n[1, 2]\n', "a.jsonl:2: got a list of 2, expected an object"),
        ("a.jsonl", b'{"a": "\xff"}\n', "a.jsonl:1: not JSON"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl:1: not JSON"),
        ("a.parquet", b"nonsense", "a.parquet: cannot be read as Parquet"),
        ("a.txt", b"a,b", r"a.txt: expected a .jsonl, .json, .csv or .parquet file"),
        ("d/state.json", b"{}", "names no data files"),
        ("d/state.json", b"[]", "got a list of 0, expected an object"),
        ("d/state.json", b'{"_data_files": [{"filename": "x.arrow"}]}', "x.arrow: cannot be read as Arrow"),
        ("d/other", b"", "no state.json there"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line_with_its_place(tmp_path: Path, name: str, content: bytes, message: str):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as wrong:
        list(read_rows(tmp_path / name.partition("/")[0]))
    assert "\n" not in str(wrong.value)


def test_a_missing_file_is_one_line(tmp_path: Path):
    with pytest.raises(DataError, match=r"gone\.jsonl: no such file"):
        list(read_rows(tmp_path / "gone.jsonl"))


def test_the_same_rows_come_from_json_csv_and_json_lines(tmp_path: Path):
    rows = [{"prompt": "a, b", "answer": "1"}, {"prompt": 'say "x"\nand y', "answer": ""}]
    (tmp_path / "rows.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "lines.json").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "rows.csv").write_text('\ufeffprompt,answer\n"a, b",1\n\n"say ""x""\nand y",\n', encoding="utf-8")
    for name in ("rows.json", "lines.json", "rows.csv"):
        assert [row.fields for row in read_rows(tmp_path / name)] == rows, name
    assert [row.place for row in read_rows(tmp_path / "rows.json")] == [
        f"{tmp_path}/rows.json: row {n}" for n in (1, 2)
    ]
    assert [row.place for row in read_rows(tmp_path / "rows.csv")] == [f"{tmp_path}/rows.csv:{n}" for n in (2, 5)]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "", "a.csv:1: got nothing, expected the names of the columns"),
        ("a.csv", "prompt,prompt\n", "a.csv:1: got 'prompt' twice, expected the names"),
        ("a.csv", "prompt,\n1,2\n", "a.csv:1: got a column without a name, expected"),
        ("a.csv", "prompt,answer\n1\n", "a.csv:2: got 1 cells, expected 2: prompt, answer"),
        ("a.csv", 'prompt\n"open', "a.csv: cannot be read as CSV: "),
        ("a.csv", "prompt\n\udcff\n", "a.csv: cannot be read as CSV: "),
        ("a.json", "[1]", "a.json: row 1: got 1, expected an object"),
        ("a.json", "[{", "a.json: not JSON"),
        ("a.json", "7", "a.json:1: got 7, expected an object"),
    ],
)
def test_what_is_wrong_with_json_or_csv_is_one_line(tmp_path: Path, name: str, text: str, said: str):
    (tmp_path / name).write_text(text, errors="surrogateescape")
    with pytest.raises(DataError) as error:
        list(read_rows(tmp_path / name))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_split_of_a_saved_dataset_can_be_named(tmp_path: Path):
    save_dataset(tmp_path / "d/train", pa.table({"a": [1]}))
    save_dataset(tmp_path / "d/test", pa.table({"a": [2]}))
    (tmp_path / "d/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    found = {split: [row.fields["a"] for row in read_rows(f"{tmp_path}/d{split}")] for split in ("", "#train", "#test")}
    assert found == {"": [1], "#train": [1], "#test": [2]}
    for place, said in (
        ("d#dev", f"no split 'dev' there; expected {tmp_path}/d#train, {tmp_path}/d#test"),
        ("d/test#test", "is one set, without splits; leave #test out"),
    ):
        with pytest.raises(DataError, match=said):
            list(read_rows(tmp_path / place))


def test_a_directory_of_files_as_the_hub_has_them_has_its_splits_in_their_names(tmp_path: Path):
    for number in range(2):
        (tmp_path / "d/main").mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"a": [number]}), tmp_path / f"d/main/train-0000{number}-of-00002.parquet")
    write_lines(tmp_path / "d/main/test.jsonl", '{"a": 7}')
    assert [row.fields["a"] for row in read_rows(tmp_path / "d")] == [0, 1]
    assert [row.fields["a"] for row in read_rows(f"{tmp_path}/d/main#test")] == [7]
    with pytest.raises(DataError, match="no file of a split 'dev', only test, train; expected"):
        list(read_rows(f"{tmp_path}/d#dev"))
    (tmp_path / "d/other").mkdir()
    write_lines(tmp_path / "d/other/train.jsonl", '{"a": 9}')
    with pytest.raises(
        DataError, match=f"several sets there; expected one of {tmp_path}/d/main#train, {tmp_path}/d/ot"
    ):
        list(read_rows(tmp_path / "d"))
