"""The rows that prompts were made of: the expected answer, and whatever else a person's data says of them.

They are read from the recipe's data when the page asks for the first one, in a thread of their own: data may be large.

Rules kept here: data that is no longer there, or that a person's own code fails to give, is a line in place of the row,
and harms nothing else. The shown part of a row is bounded.
"""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from polyrl.data.sources import Source
from polyrl.errors import one_line

_PATIENCE_S = 3.0
_MOST_FIELDS = 64
_MOST_CHARACTERS = 4_000


class TaskRow(NamedTuple):
    expected: str = ""
    """The expected answer; empty: the row has none."""
    fields: Mapping[str, str] = MappingProxyType({})
    """The row's columns as text."""
    trouble: str = ""
    """Why the row is not there; empty: it is."""
    is_coming: bool = False
    """Whether the data is being read: it may be asked for again."""


class TaskRows:
    """The rows of a run's training data, by domain and prompt number."""

    def __init__(self, run_dir: Path, patience_s: float = _PATIENCE_S) -> None:
        self._run_dir, self._patience_s = run_dir, patience_s
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._sources: Sequence[Source] = ()
        self._trouble = ""

    def of(self, domain: int, prompt: int) -> TaskRow:
        """Return a row. The first call reads the data."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._read, name="rows", daemon=True)
                self._thread.start()
        self._thread.join(self._patience_s)
        if self._thread.is_alive():
            return TaskRow(trouble="the data is being read …", is_coming=True)
        if self._trouble:
            return TaskRow(trouble=self._trouble)
        if domain >= len(self._sources) or prompt >= self._sources[domain].num_prompts:
            return TaskRow(trouble="the data has no such row any more")
        task = self._sources[domain].task(prompt)
        shown = list(task.fields.items())[:_MOST_FIELDS]
        return TaskRow(_cut(task.expected), {_cut(str(name)): _cut(_as_text(value)) for name, value in shown})

    def _read(self) -> None:
        try:
            from polyrl.run.checkpoints import read_recipe
            from polyrl.run.training_rows import open_rows

            self._sources = open_rows(read_recipe(self._run_dir, [])[0])
        except Exception as error:  # noqa: BLE001  files that are gone, and a person's own code: others are shown
            self._trouble = f"the data cannot be read: {one_line(error)}"


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError):
        return repr(value)


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} …"
