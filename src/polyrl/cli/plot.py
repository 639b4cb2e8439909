"""`polyrl plot`: pictures of one run, or of several against each other.

Rules: a picture that cannot be drawn is reported in one line, and the rest are drawn. Pictures of the same name are
overwritten, since they can be drawn again from the run; nothing else is.
"""

import argparse
import sys
from pathlib import Path

from polyrl.errors import UserError

EXAMPLE = """\
examples:
  polyrl plot run
  polyrl plot runs/synchronous runs/streaming --out compared

RUN is the directory of a run, live, ended or killed; or a journal. From metrics.jsonl and the journal: reward.png,
reward-cost.png (against seconds and dollars), longest.png, workers.png; a run each: steps.png, timeline.png."""

FOLDER = "plots"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help="the directory of a run, or a journal")
    parser.add_argument(
        "--out", metavar="DIR", help=f"where pictures go; {FOLDER} in the directory of a single run, else ./{FOLDER}"
    )


def run(args: argparse.Namespace) -> int:
    from polyrl.telemetry.canvas import NoPlottingError
    from polyrl.telemetry.pictures import draw_all
    from polyrl.telemetry.runs import read_runs

    paths = [Path(name) for name in args.runs]
    runs = read_runs(paths, lambda text: print(f"polyrl: {text}", file=sys.stderr))
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
