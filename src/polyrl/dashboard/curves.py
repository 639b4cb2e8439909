"""A run's metrics as columns, read from `metrics.jsonl` as it grows; of a simulation, from the steps of its journal.

Rules kept here: a line that is still being written is read later. A file that became shorter, because the run went on
from an earlier step, is read anew. Names are bounded in number and length: a recipe's own metrics may have any.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path

from polyrl.scheduling.core.ledger import StepLine
from polyrl.telemetry.metrics import FILE_NAME, GrowingMetrics, MetricValue, from_step_line

Column = list[float | None]
_MAX_NAMES, _MAX_NAME = 2_000, 200


class Curves:
    """The metrics of a run. `refresh` first, then ask."""

    def __init__(self, path: Path, lines: Callable[[], Sequence[StepLine]]) -> None:
        """`path` is a run's directory, or a journal; `lines` gives the steps that the journal knows."""
        self._file = path / FILE_NAME
        self._lines = lines
        self._growing, self._is_of_file = GrowingMetrics(self._file), False
        self.steps: list[int] = []
        self._columns: dict[str, Column] = {}

    def refresh(self) -> int:
        """Read what is new, and return the number of steps."""
        if self._file.is_file():
            anew, lines = self._growing.read_new()
            if anew or not self._is_of_file:  # the journal may have told the first steps before the file was there
                self.steps, self._columns, self._is_of_file = [], {}, True
            for line in lines:
                self._add(line)
        else:
            known = len(self.steps)
            for before, line in list(pairwise([None, *self._lines()]))[known:]:
                assert line is not None
                self._add({"step": line.step, **from_step_line(line, before)})
        return len(self.steps)

    def _add(self, line: Mapping[str, MetricValue]) -> None:
        num = len(self.steps)
        self.steps.append(int(line["step"] or 0))
        for name, value in line.items():
            if (
                isinstance(value, str)
                or len(name) > _MAX_NAME
                or (name not in self._columns and len(self._columns) >= _MAX_NAMES)
            ):
                continue
            column = self._columns.setdefault(name, [])
            column += [None] * (num - len(column))
            column.append(value)

    @property
    def names(self) -> list[str]:
        return sorted(name for name in self._columns if name != "step")

    def column(self, name: str) -> Column:
        """Return a metric, one value a step; None where it was not told."""
        column = self._columns.get(name, [])
        return column + [None] * (len(self.steps) - len(column))

    def tail(self, name: str, num: int) -> list[float]:
        """Return the last `num` values that were told."""
        first = max(0, len(self.steps) - num)
        return [value for value in self._columns.get(name, [])[first:] if value is not None]

    def last(self, name: str) -> float | None:
        """Return the value of the last step; None if it was not told."""
        column = self._columns.get(name, [])
        return column[-1] if self.steps and len(column) == len(self.steps) else None

    def axis(self, of: str) -> Column:
        """Return the x axis: `step`, `seconds` since the run began, without validation, or `dollars`."""
        if of == "seconds":
            return list(accumulate(value or 0.0 for value in self.column("time/step_total")))
        return self.column("cost/usd_total") if of == "dollars" else [float(step) for step in self.steps]
