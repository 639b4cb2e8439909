"""A run as it is drawn: its steps and its fleet, from its journal (account.py) and its metrics (metrics.py).

Either may be missing; what only it knows is then not known. A simulated run knows all at once (sim/pictures.py).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from polyrl.errors import JournalError, UserError
from polyrl.ids import Seconds
from polyrl.journal.files import find_journals
from polyrl.telemetry.account import Account, read_account
from polyrl.telemetry.metric_names import IMPOSED_LENGTHS
from polyrl.telemetry.metrics import FILE_NAME, MetricValue, from_step_line, read_steps
from polyrl.telemetry.timeline import Span


class DrawnStep(NamedTuple):
    """A step, in the figures that are drawn; None is not known."""

    step: int
    kind: str
    ended_s: float | None
    """Since the run began."""
    step_s: float | None
    train_s: float | None
    longest: float | None
    tok_s: float | None
    workers: float | None
    usd: float | None
    """Dollars of the run so far."""
    reward: float | None = None
    rollout_s: float | None = None
    is_warmup: bool = False


class DrawnFleet(NamedTuple):
    """The activities of every worker, in the order of the rows. Moments are since the run began."""

    rows: Mapping[str, Sequence[Span]]
    ends: Sequence[tuple[str, str, Seconds]]
    """(how: lost, left or gone; worker; when)."""
    until: Seconds
    away: Sequence[tuple[Seconds, Seconds]] = ()
    """From when to when there was no manager."""


class DrawnRun(NamedTuple):
    name: str
    steps: list[DrawnStep]
    fleet: DrawnFleet | None
    has_prompts_in_tok_s: bool
    """Tokens a second count prompts too: metrics know them, a journal does not."""
    caveat: str = ""
    """A warning that belongs to every picture of it; mostly empty."""
    max_new_tokens: int | None = None

    @property
    def title(self) -> str:
        return f"{self.name}, {self.caveat}" if self.caveat else self.name


def make_run(name: str, account: Account | None, metrics: Sequence[dict[str, MetricValue]]) -> DrawnRun:
    """Make a run from both of its sources; where they say the same, metrics are believed."""
    by_step: dict[int, dict[str, MetricValue]] = {}
    if account is not None:
        before = None
        for line in account.lines:
            told = from_step_line(line, before)
            step_s = _number(told, "time/step_total") or 0.0
            tok_s = line.tokens_trained / step_s if step_s > 0 else None
            by_step[line.step] = {**told, "tok_s": tok_s, "ended_s": line.trained_at - account.started_at}
            before = line
    for values in metrics:
        known = by_step.setdefault(int(_number(values, "step") or 0), {})
        known |= {key: value for key, value in values.items() if value is not None}
    has_prompts = bool(metrics) and all("perf/throughput_all_gpus" in values for values in metrics)
    steps = [*_steps(by_step, "perf/throughput_all_gpus" if has_prompts else "tok_s")]
    cap = None if account is None else account.config.max_new_tokens
    return DrawnRun(name, steps, _fleet(account), has_prompts, _caveat(account, metrics), cap)


def _fleet(account: Account | None) -> DrawnFleet | None:
    if account is None or not account.timeline.rows:
        return None
    began = account.started_at
    rows = {
        name: [Span(span.start_s - began, span.end_s - began, span.activity) for span in account.timeline.rows[name]]
        for name in row_order(account)
    }
    ends = [(one.ending, one.worker, one.ended_at - began) for one in account.lives if one.ended_at is not None]
    away = [(since - began, until - began) for since, until in account.away]
    return DrawnFleet(rows, ends, account.now - began, away)


def _caveat(account: Account | None, metrics: Sequence[dict[str, MetricValue]]) -> str:
    if account is not None and account.caveat:
        return account.caveat
    is_imposed = any(values.get("rollout/imposed_lengths") for values in metrics)
    return IMPOSED_LENGTHS if is_imposed else ""


def _steps(by_step: dict[int, dict[str, MetricValue]], tok_s: str) -> Iterator[DrawnStep]:
    elapsed_s: float | None = 0.0
    for step, values in sorted(by_step.items()):
        step_s = _number(values, "time/step_total")
        elapsed_s = None if elapsed_s is None or step_s is None else elapsed_s + step_s
        ended_s = _number(values, "ended_s")
        yield DrawnStep(
            step=step,
            kind=str(values.get("rounds/kind", "short")),
            ended_s=elapsed_s if ended_s is None else ended_s,
            step_s=step_s,
            train_s=_number(values, "time/step_train"),
            reward=_number(values, "reward/mean"),
            longest=_number(values, "token/response_length/max"),
            tok_s=_number(values, tok_s),
            workers=_number(values, "fleet/workers"),
            usd=_number(values, "cost/usd_total"),
        )


def _number(values: dict[str, MetricValue], name: str) -> float | None:
    value = values.get(name)
    return float(value) if isinstance(value, int | float) else None


def row_order(account: Account) -> list[str]:
    """Order workers: the trainer's own first, then as they came."""
    local = {life.worker for life in account.lives if life.local}
    came = {life.worker: number for number, life in reversed([*enumerate(account.lives)])}
    return sorted(account.timeline.rows, key=lambda name: (name not in local, came.get(name, -1)))  # type: ignore[arg-type]


# From files

Say = Callable[[str], None]
"""Gets a line about what cannot be drawn, and why."""


def read_runs(paths: Sequence[Path], say: Say) -> list[DrawnRun]:
    """Read runs, each by its directory or its journal. Raises UserError and JournalError."""
    return [_read(path, name, say) for path, name in zip(paths, short_names(paths), strict=True)]


def _read(path: Path, name: str, say: Say) -> DrawnRun:
    if not path.exists():
        raise UserError(f"{path}: there is no such file")
    if not (path / FILE_NAME).is_file():
        say(f"{path}: no {FILE_NAME}: reward is not drawn, the rest is from the journal")
        return make_run(name, _account(path, say), [])
    metrics = read_steps(path / FILE_NAME)
    if not find_journals(path)[0].exists():
        say(f"{path}: no journal: no timeline is drawn, the rest is from the metrics")
        return make_run(name, None, metrics)
    try:
        return make_run(name, _account(path, say), metrics)
    except JournalError as error:
        say(f"{error}; no timeline is drawn, the rest is from the metrics")
        return make_run(name, None, metrics)


def _account(path: Path, say: Say) -> Account:
    account = read_account(path)
    if account.difference:
        say(f"{account.difference}; it is drawn up to there")
    return account


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return the last parts of the paths, as many as tell them apart; the same path twice has a number."""
    known = [path.resolve().parts for path in paths]
    parts = [tuple(one.encode(errors="backslashreplace").decode() for one in each) for each in known]  # as text
    names = ["" for _ in paths]
    for num_parts in range(1, max(len(one) for one in parts) + 1):
        names = ["/".join(one[-num_parts:]).lstrip("/") for one in parts]
        if len(set(names)) == len(set(parts)):
            break
    return [name if names.count(name) == 1 else f"{name}#{number}" for number, name in enumerate(names, start=1)]
