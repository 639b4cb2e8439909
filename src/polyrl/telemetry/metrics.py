"""A run's metrics: `metrics.jsonl`, one line a step; the same as a line of text; what the scheduler says of a step.

    metrics = with_aliases({**from_step_line(line, before), **others})
    file.log(line.step, metrics)
    print(step_line(line.step, metrics))

Rules kept here: a line is written in one go and is with the operating system when `log` returns; a line that was cut
short by a kill is cut off when the run goes on. No step is in the file twice: a run that goes on at step t takes the
lines from t on out of the file, into `metrics.cut.jsonl`, for they are trained again. A number that JSON cannot say
(nan, inf) is null.

Left out: what names mean (metric_names.py), other places for them (trackers.py).
"""

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, get_args

import msgspec

from polyrl.errors import UserError
from polyrl.ids import Step
from polyrl.scheduling.core.ledger import DiscardCause, StepLine
from polyrl.telemetry.metric_names import ALIASES, HEADLINES, IMPOSED_LENGTHS

FILE_NAME = "metrics.jsonl"
CUT_FILE_NAME = "metrics.cut.jsonl"

MetricValue = float | int | str | None
Metrics = Mapping[str, MetricValue]

LINE_WIDTH = 80
"""Columns of a step's line where no terminal says otherwise."""
_STEP, _VALIDATION = "step", "validation/"
_MILLION = 1e6
_line_decoder = msgspec.json.Decoder(dict[str, float | int | str | None])


class MetricsFile:
    """The file, open to be appended to. Keeps the contract of a tracker (trackers.py)."""

    name = FILE_NAME

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        """Go on at `first_step`, 0 for a new run. Raises UserError if the file is not one of ours, or cannot be had."""
        self.path = path
        self.where = str(path)
        try:
            self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(f"{path}: cannot be written: {error.strerror}") from error
        try:
            self._last_step = self._cut(first_step)
        except UserError:
            os.close(self._file)
            raise

    def _cut(self, first_step: int) -> int:
        """Leave whole lines of earlier steps only; returns the last of these, -1 if there is none."""
        data = self.path.read_bytes()
        kept_bytes = whole_bytes = 0
        last_step = -1
        for end, line in _lines(data, str(self.path)):
            step = int(line[_STEP] or 0)
            if step < first_step and kept_bytes == whole_bytes:
                kept_bytes, last_step = end, step
            whole_bytes = end
        if kept_bytes < whole_bytes:
            _append(self.path.with_name(CUT_FILE_NAME), data[kept_bytes:whole_bytes])
        if kept_bytes < len(data):
            os.truncate(self._file, kept_bytes)
        return last_step

    def log(self, step: int, metrics: Metrics) -> None:
        """Write a step's line. Raises OSError if it cannot be; then nothing of it is in the file."""
        if step <= self._last_step:
            raise ValueError(f"step {step} was written already, or is older than step {self._last_step}")
        line = msgspec.json.encode({_STEP: step, **{name: value for name, value in metrics.items() if name != _STEP}})
        size_before = os.fstat(self._file).st_size
        try:
            _write_all(self._file, line + b"\n")
        except OSError:
            os.ftruncate(self._file, size_before)
            raise
        self._last_step = step

    def close(self) -> None:
        os.close(self._file)


def read_metrics(path: Path) -> list[dict[str, MetricValue]]:
    """Return all whole lines of a file, also of one that is being written. Raises UserError with file and line."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    return [line for _, line in _lines(data, str(path))]


def read_steps(path: Path) -> list[dict[str, MetricValue]]:
    """Return the lines of steps. A line with nothing but validation is that of the last version, which no step starts
    from."""
    return [line for line in read_metrics(path) if _is_of_a_step(line)]


def _is_of_a_step(line: Metrics) -> bool:
    return not all(name == _STEP or name.startswith(_VALIDATION) for name in line)


class NewLines(NamedTuple):
    anew: bool
    """Whether the file became shorter, because the run went on from an earlier step: these are all its lines."""
    lines: list[dict[str, MetricValue]]


class GrowingMetrics:
    """The lines of steps of a file that another process writes; each is read once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read_new(self) -> NewLines:
        """Return what came since the last time. A line that is no metrics is skipped; one cut short is read later."""
        if not self._path.is_file():
            return NewLines(False, [])
        with self._path.open("rb") as file:
            anew = file.seek(0, os.SEEK_END) < self._offset
            if anew:
                self._offset = 0
            file.seek(self._offset)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        return NewLines(anew, [line for raw in data[:whole].splitlines() if (line := _decode_step(raw)) is not None])


def _decode_step(raw: bytes) -> dict[str, MetricValue] | None:
    try:
        line = _line_decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return line if isinstance(line.get(_STEP), int) and _is_of_a_step(line) else None


def read_validation(path: Path, version: int) -> dict[str, float]:
    """Return the file's validation of a version; empty if it has none, or there is no file. Raises UserError."""
    lines = [line for line in read_metrics(path) if line[_STEP] == version] if path.exists() else []
    told = lines[-1] if lines else {}
    return {
        name: value for name, value in told.items() if name.startswith(_VALIDATION) and isinstance(value, int | float)
    }


def _lines(data: bytes, name: str) -> Iterator[tuple[int, dict[str, MetricValue]]]:
    """Yield every line with the byte behind it; the last one may be cut short, and is skipped then."""
    end = 0
    for number, raw in enumerate(data.splitlines(keepends=True), start=1):
        end += len(raw)
        try:
            line = _line_decoder.decode(raw)
            if not isinstance(line.get(_STEP), int):
                raise msgspec.DecodeError("it has no `step`")
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if end == len(data):
                return
            raise UserError(f"{name}:{number}: not a line of metrics: {error}") from error
        if raw.endswith(b"\n"):
            yield end, line


def _append(path: Path, data: bytes) -> None:
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            _write_all(file, data)
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {error.strerror}") from error


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


# What is in a line


def from_step_line(
    line: StepLine, before: StepLine | None = None, *, step_s: float | None = None
) -> dict[str, MetricValue]:
    """Return the scheduler's figures of a step.

    `before` is its line of the step before, None if it is not known; `step_s` is how long the step took by the
    trainer's own clock, of which shares are told then.
    """
    step_s = line.step_s if step_s is None else step_s
    usd_before = 0.0 if line.step == 0 else None if before is None else before.usd
    usd = None if usd_before is None else line.usd - usd_before
    return {
        "rounds/kind": line.kind,
        "rounds/long": int(line.kind == "long"),
        "rounds/groups": line.num_groups,
        "rounds/samples": line.num_samples,
        **_factors(line),
        "token/response_length/mean": line.trained_mean,
        "token/response_length/max": line.longest,
        "time/step_total": step_s,
        "time/step_generate": line.closed_at - line.opened_at,
        "time/step_train": line.train_s,
        "idle/trainer_share": _share(line.wait_train_s, step_s),
        "idle/fleet_share": _share(line.wait_remote_s, step_s),
        "seeding/t_seed_s": line.seed_window_s,
        "fleet/workers": line.mean_workers,
        "fleet/migrations": line.num_moves,
        "tokens/kept": line.tokens_trained,
        **{f"tokens/discarded/{cause}": line.tokens_discarded.get(cause, 0) for cause in get_args(DiscardCause)},
        "cost/usd_step": usd,
        "cost/usd_total": line.usd,
        "cost/usd_per_mtok": None if usd is None or not line.tokens_trained else usd / line.tokens_trained * _MILLION,
        "bias/trained_mean_length": line.trained_mean,
        "bias/generated_mean_length": line.generated_mean,
        "bias/expected_mean_length": line.expected_mean or None,
        **{f"bias/inclusion_by_bin/{b}": trained / ended for b, ended, trained in line.inclusion_by_length},
        "weights/version": Step(line.step + 1),
    }


def _factors(line: StepLine) -> dict[str, MetricValue]:
    if not line.prompt_factor:
        return {}
    return {"rounds/prompt_factor": line.prompt_factor, "rounds/sample_factor": line.sample_factor}


def factors_changed(line: StepLine, before: StepLine | None) -> str:
    """Return what adaptive factors became with the step before; empty: they did not change."""
    if before is None or not before.prompt_factor:
        return ""
    was, now = ((one.prompt_factor, one.sample_factor) for one in (before, line))
    if was == now:
        return ""
    changed = zip(("rounds.prompt_factor", "rounds.sample_factor"), was, now, strict=True)
    shown = ", ".join(f"{key} from {old:g} to {new:g}" for key, old, new in changed if old != new)
    return f"{shown}: the fastest for the lengths seen, within rounds.max_waste and rounds.max_bias"


def _share(seconds: float, whole_s: float) -> float:
    return min(1.0, max(0.0, seconds / whole_s)) if whole_s > 0 else 0.0


def with_aliases(metrics: Metrics) -> dict[str, MetricValue]:
    """Return the same, and what users know from elsewhere under the names that they know."""
    return {**metrics, **{alias: metrics[name] for alias, name in ALIASES.items() if name in metrics}}


def step_fields(step: int, metrics: Metrics, width: int) -> list[tuple[str, str]]:
    """Return (label, figure) of the headlines that fit into `width` columns; figures of one label are equally wide."""
    fields = [("step", f"{step:4}")]
    room = width - len("step    0")
    if metrics.get("rollout/imposed_lengths"):
        room -= len(IMPOSED_LENGTHS) + 4
    for label, name in HEADLINES.items():
        figure = f"{show_value(metrics.get(name), digits=3):>6}"
        needed = len(f"  {label} {figure}")
        if name in metrics and needed <= room:
            fields.append((label, figure))
            room -= needed
    return fields


def step_line(step: int, metrics: Metrics, width: int = LINE_WIDTH) -> str:
    """Return `step    1  reward  0.412  len   16.2  time   12.3`, with as many headlines as fit."""
    line = "  ".join(f"{label} {figure}" for label, figure in step_fields(step, metrics, width))
    return f"{line}  ({IMPOSED_LENGTHS})" if metrics.get("rollout/imposed_lengths") else line


def show_value(value: MetricValue, digits: int = 4) -> str:
    """Return so many significant digits, and no exponent where a person would not use one; `-` where there is none."""
    match value:
        case None:
            return "-"
        case str() | int():
            return str(value)
        case float() if math.isfinite(value) and abs(value) >= 1000:
            return f"{value:.0f}"
        case float():
            return f"{value:.{digits}g}"
