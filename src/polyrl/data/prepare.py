"""Convert published data sets to our JSON lines: {"prompt": ..., "answer": ...}, and other columns worth keeping.

| layout | what is read | prompt | answer |
|---|---|---|---|
| openr1 | OpenR1-Math: a Parquet file, or a directory of them | `problem` | `answer` |
| gsm8k | GSM8K: JSON lines, or a directory of Parquet files | `question` | the text after `####` in `answer` |
| FILE | anything that the loaders read | the first column of `prompt`, `problem`, `question` | `answer` |

Rules kept here: nothing is downloaded. Rows without the needed columns are left out and counted; a source without any
usable row is an error. The output file appears only when it is complete.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from polyrl.data.rows import DataError, Fields, Row, read_rows
from polyrl.errors import UserError

PROMPT_COLUMNS = ("prompt", "problem", "question")
_MARK = "####"
_KEPT = ("problem_type", "source", "uuid")
"""The columns of OpenR1-Math that are useful later. Most of its bytes are generated solutions, which are dropped."""
ANY_FILE = "FILE"
_EXPECTED = {
    "openr1": "texts in the columns problem and answer",
    "gsm8k": f"texts in the columns question and answer, with {_MARK} before the result",
    ANY_FILE: f"one of the columns {', '.join(PROMPT_COLUMNS)}",
}


class Prepared(NamedTuple):
    num_rows: int
    num_left_out: int


def prepare(layout: str, source: Path, out: Path) -> Prepared:
    """Convert `source` into `out`. `layout` is one of LAYOUTS, or ANY_FILE. Raises UserError."""
    if out.exists():
        raise UserError(f"{out}: is there already, expected a new file")
    if out.suffix != ".jsonl":
        raise UserError(f"{out}: expected a name that ends in .jsonl")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        return _write(layout, source, out)
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error.strerror or error}") from error


def _write(layout: str, source: Path, out: Path) -> Prepared:
    convert = LAYOUTS.get(layout, _any)
    part = out.with_name(f"{out.name}.part")
    num_rows = num_left_out = 0
    try:
        with part.open("wb") as file:
            for row in _rows(source):
                fields = convert(row)
                if fields is None:
                    num_left_out += 1
                    continue
                num_rows += 1
                file.write(msgspec.json.encode(fields) + b"\n")
        if not num_rows:
            raise DataError(f"{source}: none of its {num_left_out} rows can be used; expected {_EXPECTED[layout]}")
        os.replace(part, out)
    finally:
        part.unlink(missing_ok=True)
    return Prepared(num_rows, num_left_out)


def _rows(source: Path) -> Iterator[Row]:
    for one in _shards(source) or [source]:
        yield from read_rows(one)


def _shards(source: Path) -> list[Path]:
    """Return the Parquet files of a directory, or of `data` in it, by name: only the training split, if it is named."""
    for folder in (source, source / "data"):
        found = sorted(folder.glob("*.parquet")) if folder.is_dir() else []
        if found:
            return [one for one in found if one.name.startswith("train")] or found
    return []


def _openr1(row: Row) -> Fields | None:
    prompt, answer = _text(row, "problem"), _text(row, "answer")
    if prompt is None or answer is None:
        return None
    return {"prompt": prompt, "answer": answer, **{key: row.fields[key] for key in _KEPT if row.fields.get(key)}}


def _gsm8k(row: Row) -> Fields | None:
    prompt, solution = _text(row, "question"), _text(row, "answer")
    if prompt is None or solution is None or _MARK not in solution:
        return None
    answer = solution.rpartition(_MARK)[2].strip().replace(",", "")
    return {"prompt": prompt, "answer": answer} if answer else None


def _any(row: Row) -> Fields | None:
    name = next((one for one in PROMPT_COLUMNS if row.fields.get(one)), None)
    if name is None:
        return None
    rest = {key: value for key, value in row.fields.items() if key != name}
    return {"prompt": row.fields[name], **rest}


def _text(row: Row, name: str) -> str | None:
    value = row.fields.get(name)
    return value.strip() if isinstance(value, str) and value.strip() else None


LAYOUTS: dict[str, Callable[[Row], Fields | None]] = {"openr1": _openr1, "gsm8k": _gsm8k}
