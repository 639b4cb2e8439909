"""Rows of a data file (JSON lines, JSON, CSV, Parquet), or of a directory of them or saved by `datasets`.

    rows.jsonl  rows.json  rows.csv  rows.parquet     a file
    data/gsm8k                                        a directory: its split `train`
    data/gsm8k#test                                   another split of it
    my_module:problems                                a user's own function, which returns dicts

Rules kept here: a row is plain data (texts, numbers, lists, tables) and knows its place, so that errors can name it:
`file:line` in JSON lines and CSV, `file: row N`, counted from 1, elsewhere. Files are read lazily, and never changed.
Left out: the meaning of the columns (prompts.py), and downloading (config/places.py).
"""

import base64
import csv
import importlib
import json
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from polyrl.config.plugins import find, is_own, with_arguments
from polyrl.errors import UserError, one_line
from polyrl.not_data import NOT_DATA

Fields = dict[str, Any]
KINDS = "a .jsonl, .json, .csv or .parquet file, or a directory of them or saved by `datasets`"

_BATCH_ROWS = 1024
_SPLIT = "train"
_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
_MAX_CELL = 1 << 26
"""The most characters in a cell of CSV: the csv module's own limit is too low for a long prompt."""


class Row(NamedTuple):
    place: str
    fields: Fields


class DataError(UserError):
    """A file or a row that cannot be used. The message starts with its place."""


def read_rows(
    source: str | Path, limit: int | None = None, args: Mapping[str, Any] | None = None, key: str = "data.source"
) -> Iterator[Row]:
    """Yield the rows in order, at most `limit` of them. Raises DataError.

    `args` are keyword arguments for a user's own function, and `key` is the setting that names it.
    """
    if is_own(str(source)):
        yield from islice(_own_rows(str(source), args or {}, key), limit)
        return
    path, split = _split_of(str(source))
    if path.is_dir():
        rows = _read_directory(path, split)
    elif not path.exists():
        raise DataError(f"{path}: no such file; expected {KINDS}")
    elif split is not None:
        raise DataError(f"{source}: {path.name} is a file, and has no split {split!r}; expected {KINDS}")
    else:
        rows = _read_file(path)
    yield from islice(rows, limit)


def _own_rows(name: str, args: Mapping[str, Any], key: str) -> Iterator[Row]:
    rows = with_arguments(find(name, key, {}), args, f"{key}_args", 0)
    try:
        for number, fields in enumerate(rows(), start=1):
            if not isinstance(fields, dict):
                raise DataError(f"{name}: row {number}: got {kind_of(fields)}, expected a dict with a prompt")
            yield Row(f"{name}: row {number}", fields)
    except UserError:
        raise
    except Exception as error:
        raise DataError(f"{key}: {name}: {one_line(error)}") from error


def _split_of(source: str) -> tuple[Path, str | None]:
    """Split `DIR#SPLIT`. If a file of the whole name exists, the `#` is part of its name."""
    place, sign, split = source.rpartition("#")
    return (Path(place), split) if sign and not Path(source).exists() else (Path(source), None)


def _read_file(path: Path) -> Iterator[Row]:
    match path.suffix:
        case ".jsonl":
            return _read_lines(path)
        case ".json":
            return _read_array(path)
        case ".csv":
            return _read_csv(path)
        case ".parquet":
            return _numbered(path, _parquet_rows(path))
        case _:
            raise DataError(f"{path}: expected {KINDS}")


def _read_array(path: Path) -> Iterator[Row]:
    """Read a list of objects, or JSON lines in a file that is called .json."""
    try:
        data = path.read_bytes().removeprefix(BOM_UTF8)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not data.lstrip().startswith(b"["):
        yield from _read_lines(path)
        return
    try:
        rows = msgspec.json.decode(data)
    except NOT_DATA as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    for number, fields in enumerate(rows, start=1):
        place = f"{path}: row {number}"
        if not isinstance(fields, dict):
            raise DataError(f"{place}: got {kind_of(fields)}, expected an object with a prompt")
        yield Row(place, fields)


def _read_csv(path: Path) -> Iterator[Row]:
    """Read a CSV file. The first line names the columns; every cell is a text."""
    csv.field_size_limit(_MAX_CELL)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file, strict=True)
            names = next(lines, [])
            twice = [name for name in names if names.count(name) > 1]
            if not names or twice or not all(names):
                found = f"{twice[0]!r} twice" if twice else "a column without a name" if names else "nothing"
                raise DataError(f"{path}:1: got {found}, expected the names of the columns")
            for cells in lines:
                place = f"{path}:{lines.line_num}"
                if cells and len(cells) != len(names):
                    raise DataError(f"{place}: got {len(cells)} cells, expected {len(names)}: {', '.join(names)}")
                if cells:
                    yield Row(place, dict(zip(names, cells, strict=True)))
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as CSV: {_line(error)}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _read_lines(path: Path) -> Iterator[Row]:
    """Read JSON lines. Empty lines are counted but skipped, and so is a UTF-8 byte order mark."""
    decoder = msgspec.json.Decoder()
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                place = f"{path}:{number}"
                try:
                    fields = decoder.decode(line.removeprefix(BOM_UTF8) if number == 1 else line)
                except NOT_DATA as error:
                    raise DataError(f"{place}: not JSON: {error}") from error
                if not isinstance(fields, dict):
                    raise DataError(f"{place}: got {kind_of(fields)}, expected an object with a prompt")
                yield Row(place, fields)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _read_directory(path: Path, split: str | None) -> Iterator[Row]:
    """Read a directory saved by `datasets`, or a directory of files.

    `Dataset.save_to_disk` writes state.json, which names its Arrow files; a DatasetDict has one directory per split.
    A directory of files, as on the hub, has the splits in the file names.
    """
    wanted = _SPLIT if split is None else split
    if (path / "dataset_dict.json").is_file():
        splits = _read_json(path / "dataset_dict.json").get("splits", [])
        if wanted not in splits:
            named = ", ".join(f"{path}#{one}" for one in splits) or "none"
            raise DataError(f"{path}: no split {wanted!r} there; expected {named}")
        path = path / wanted
    elif not (path / "state.json").is_file():
        return _read_files(path, wanted)
    elif split is not None:
        raise DataError(f"{path}: is one set, without splits; leave #{split} out")
    state = path / "state.json"
    listed = _read_json(state)
    if listed.get("_indices_data_files") or listed.get("_indices_files"):
        raise DataError(f"{path}: saved by an old `datasets` with its rows in another order; save it again")
    try:
        files = [path / str(one["filename"]) for one in listed["_data_files"]]
    except (KeyError, TypeError) as error:
        raise DataError(f"{state}: names no data files; expected {KINDS}") from error
    return _numbered(path, (row for file in files for row in _arrow_rows(file)))


def _read_files(path: Path, split: str) -> Iterator[Row]:
    """Read `train.jsonl`, or `train-00000-of-00002.parquet` and so on, from one folder, `path` or any below it."""
    found = sorted(one for suffix in _SUFFIXES for one in path.rglob(f"*{suffix}"))
    files = [one for one in found if one.stem == split or one.stem.startswith(f"{split}-")]
    if not files:
        splits = dict.fromkeys(one.stem.partition("-")[0] for one in found)
        named = f", only {', '.join(splits)}" if splits else ""
        raise DataError(f"{path}: no state.json there, and no file of a split {split!r}{named}; expected {KINDS}")
    folders = list(dict.fromkeys(one.parent for one in files))
    if len(folders) > 1:
        raise DataError(f"{path}: several sets there; expected one of {', '.join(f'{one}#{split}' for one in folders)}")
    return (row for one in files for row in _read_file(one))


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
    """Describe a value for an error message."""
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
