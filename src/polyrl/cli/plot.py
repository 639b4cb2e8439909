"""`polyrl plot`: pictures of one run, or of several against each other.

Rules: what cannot be drawn is said in one line, and the rest is drawn. Pictures are made from the run, so those of the
same name are drawn anew; nothing else is written over.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from polyrl.errors import UserError

if TYPE_CHECKING:
    from polyrl.telemetry.account import Account
    from polyrl.telemetry.metrics import MetricValue
    from polyrl.telemetry.pictures import Run

EXAMPLE = """\
examples:
  polyrl plot run
  polyrl plot runs/synchronous runs/streaming --out compared

RUN is the directory of a run, live, ended or killed; or a journal. From metrics.jsonl and the journal: reward.png,
reward-cost.png (against seconds and dollars), longest.png, workers.png; a run each: steps.png, timeline.png."""

FOLDER = "plots"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("runs", metavar="RUN", nargs="+", help="the directory of a run, or a journal")
    parser.add_argument(
        "--out", metavar="DIR", help=f"where pictures go; {FOLDER} in the directory of a single run, else ./{FOLDER}"
    )


def run(args: argparse.Namespace) -> int:
    from polyrl.telemetry.canvas import NoPlottingError
    from polyrl.telemetry.pictures import draw_all

    paths = [Path(name) for name in args.runs]
    runs = [_read(path, name) for path, name in zip(paths, _short_names(paths), strict=True)]
    out = _out(args.out, paths)
    try:
        out.mkdir(parents=True, exist_ok=True)
        drawn = draw_all(runs, out)
    except OSError as error:
        raise UserError(f"--out: cannot write to {out}: {error.strerror}") from error
    except NoPlottingError as error:
        raise UserError(str(error)) from error
    if not drawn:
        raise UserError(f"{', '.join(args.runs)}: there is nothing to draw yet: no step was trained, no worker joined")
    print(f"drawn in {out}: {', '.join(path.name for path in drawn)}")
    return 0


def _out(name: str | None, paths: list[Path]) -> Path:
    if name is not None:
        return Path(name)
    return paths[0] / FOLDER if len(paths) == 1 and paths[0].is_dir() else Path(FOLDER)


def _read(path: Path, name: str) -> "Run":
    from polyrl.telemetry.metrics import FILE_NAME, read_steps
    from polyrl.telemetry.pictures import make_run

    if not path.exists():
        raise UserError(f"{path}: there is no such file")
    metrics_path = path / FILE_NAME
    if not metrics_path.is_file():
        _say(f"{path}: no {FILE_NAME}: reward is not drawn, the rest is from the journal")
        return make_run(name, _account(path), [])
    metrics: list[dict[str, MetricValue]] = read_steps(metrics_path)
    return make_run(name, _account_if_any(path), metrics)


def _account_if_any(path: Path) -> "Account | None":
    """A run whose metrics are there is drawn without its journal, if need be."""
    from polyrl.errors import JournalError
    from polyrl.journal.files import find_journals

    if not find_journals(path)[0].exists():
        _say(f"{path}: no journal: no timeline is drawn, the rest is from the metrics")
        return None
    try:
        return _account(path)
    except JournalError as error:
        _say(f"{error}; no timeline is drawn, the rest is from the metrics")
        return None


def _account(path: Path) -> "Account":
    from polyrl.telemetry.account import read_account

    account = read_account(path)
    if account.difference:
        _say(f"{account.difference}; it is drawn up to there")
    return account


def _say(text: str) -> None:
    print(f"polyrl: {text}", file=sys.stderr)


def _short_names(paths: list[Path]) -> list[str]:
    """The last parts of the paths, as many as tell them apart; the same path twice has a number."""
    parts = [path.resolve().parts for path in paths]
    names = ["" for _ in paths]
    for num_parts in range(1, max(len(one) for one in parts) + 1):
        names = ["/".join(one[-num_parts:]).lstrip("/") for one in parts]
        if len(set(names)) == len(set(parts)):
            break
    return [name if names.count(name) == 1 else f"{name}#{number}" for number, name in enumerate(names, start=1)]
