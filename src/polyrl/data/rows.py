"""Rows of a data file: JSON lines, Parquet, or a directory that the `datasets` library saved.

Rules kept here: a row is plain data (texts, numbers, lists, tables), and knows its place, so that whoever finds fault
with it can say where: `file:line` in JSON lines, `file: row N`, counted from 1, elsewhere. Files are read as they are
asked for, and never changed.
Left out: what the columns mean (prompts.py), and downloading.
"""

import base64
import importlib
import json
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from datetime import date, datetime, time
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from polyrl.errors import UserError

Fields = dict[str, Any]
KINDS = "a .jsonl or .parquet file, or a directory saved by `datasets`"

_BATCH_ROWS = 1024
_SPLIT = "train"


class Row(NamedTuple):
    place: str
    fields: Fields


class DataError(UserError):
    """A file or a row that cannot be used. The message starts with its place."""


def read_rows(source: str | Path, limit: int | None = None) -> Iterator[Row]:
    """The rows in order, the first `limit` of them. Raises DataError."""
    path = Path(source)
    if path.is_dir():
        rows = _read_directory(path)
    elif not path.exists():
        raise DataError(f"{path}: no such file; expected {KINDS}")
    elif path.suffix == ".jsonl":
        rows = _read_lines(path)
    elif path.suffix == ".parquet":
        rows = _numbered(path, _parquet_rows(path))
    else:
        raise DataError(f"{path}: expected {KINDS}")
    yield from islice(rows, limit)


def _read_lines(path: Path) -> Iterator[Row]:
    """Empty lines are counted, and skipped; so is the mark that some editors put before UTF-8."""
    decoder = msgspec.json.Decoder()
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                place = f"{path}:{number}"
                try:
                    fields = decoder.decode(line.removeprefix(BOM_UTF8) if number == 1 else line)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    raise DataError(f"{place}: not JSON: {error}") from error
                if not isinstance(fields, dict):
                    raise DataError(f"{place}: got {kind_of(fields)}, expected an object with a prompt")
                yield Row(place, fields)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _read_directory(path: Path) -> Iterator[Row]:
    """`Dataset.save_to_disk` writes state.json, which names its Arrow files; a DatasetDict has one such for a split."""
    if (path / "dataset_dict.json").is_file():
        splits = _read_json(path / "dataset_dict.json").get("splits", [])
        if _SPLIT not in splits:
            named = ", ".join(map(str, splits)) or "none"
            raise DataError(f"{path}: no split {_SPLIT!r} there, only {named}; name the directory of one of them")
        path = path / _SPLIT
    state = path / "state.json"
    if not state.is_file():
        raise DataError(f"{path}: no state.json there; expected {KINDS}")
    listed = _read_json(state)
    if listed.get("_indices_data_files") or listed.get("_indices_files"):
        raise DataError(f"{path}: saved by an old `datasets` with its rows in another order; save it again")
    try:
        files = [path / str(one["filename"]) for one in listed["_data_files"]]
    except (KeyError, TypeError) as error:
        raise DataError(f"{state}: names no data files; expected {KINDS}") from error
    return _numbered(path, (row for file in files for row in _arrow_rows(file)))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: got {kind_of(value)}, expected an object")
    return value


def _numbered(path: Path, rows: Iterable[Fields]) -> Iterator[Row]:
    for number, fields in enumerate(rows, start=1):
        yield Row(f"{path}: row {number}", fields)


def _parquet_rows(path: Path) -> Iterator[Fields]:
    arrow = _pyarrow(path)
    parquet = importlib.import_module("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                yield from map(_plain, batch.to_pylist())
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {_line(error)}") from error


def _arrow_rows(path: Path) -> Iterator[Fields]:
    arrow = _pyarrow(path)
    try:
        with arrow.memory_map(str(path)) as file, arrow.ipc.open_stream(file) as batches:
            for batch in batches:
                yield from map(_plain, batch.to_pylist())
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as Arrow: {_line(error)}") from error


def _pyarrow(path: Path) -> Any:
    try:
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise DataError(f"{path}: reading it needs pyarrow: pip install 'polyrl[data]'") from error


def _plain(value: Any) -> Any:
    match value:
        case dict():
            return {str(key): _plain(one) for key, one in value.items()}
        case list() | tuple():
            return [_plain(one) for one in value]
        case datetime() | date() | time():
            return value.isoformat()
        case Decimal():
            return str(value)
        case bytes():
            return base64.b64encode(value).decode()
        case None | str() | bool() | int() | float():
            return value
        case _:
            return str(value)


def kind_of(value: Any) -> str:
    """A value as a message names it."""
    match value:
        case None:
            return "null"
        case dict():
            return "an object"
        case list():
            return f"a list of {len(value)}"
        case str():
            return "an empty text" if not value.strip() else "a text"
        case _:
            return str(value)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
