"""Breaks in a run's curve: settings that were changed when it went on.

    RUN/breaks.jsonl        {"step": 40, "key": "optimizer.lr", "before": 1e-06, "after": 5e-07}

The step is the first that is trained with the new value. metrics.jsonl says it too, with that step.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from polyrl.disk import write_whole
from polyrl.errors import UserError

FILE_NAME = "breaks.jsonl"


class Break(msgspec.Struct, frozen=True):
    step: int
    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key} {_shown(self.before)} -> {_shown(self.after)}"


def note(run_dir: Path, new: Sequence[Break]) -> None:
    """Add to what is there. Raises UserError if the disk does not take it; the file is as it was then."""
    path = run_dir / FILE_NAME
    kept = {(one.step, one.key): one for one in (*read(run_dir), *new)}  # who is killed here notes it again
    try:
        write_whole(path, b"".join(msgspec.json.encode(one) + b"\n" for one in kept.values()))
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror or error}; make room, and --resume") from error


def read(run_dir: Path, step: int | None = None) -> list[Break]:
    """Read all breaks, or those at one step; none where there is no file. Raises UserError."""
    path = run_dir / FILE_NAME
    try:
        lines = path.read_bytes().splitlines()
        found = [msgspec.json.decode(line, type=Break) for line in lines]
    except FileNotFoundError:
        return []
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    return [one for one in found if step in (None, one.step)]


def _shown(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
