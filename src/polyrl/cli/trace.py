"""`polyrl trace`: a run's timeline for Perfetto or chrome://tracing."""

import argparse
import sys
from pathlib import Path

from polyrl.errors import UserError, plain

EXAMPLE = """\
example:
  polyrl simulate spot-trace --out out/spot
  polyrl trace out/spot
  polyrl trace runs/first --out first.json

RUN is the directory of a run, live, ended or killed, or of a simulation, or a journal. Open the file at ui.perfetto.dev
or in chrome://tracing: neither sends it anywhere."""

_READ_S = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the directory of a run, or a journal")
    parser.add_argument("--out", metavar="FILE", help="default: trace.json in RUN, or beside the journal; - is stdout")


def run(args: argparse.Namespace) -> int:
    from polyrl.dashboard.following import Follower
    from polyrl.dashboard.trace import write_trace
    from polyrl.journal.files import find_begun

    path = Path(args.run)
    for file in find_begun(path):
        if not file.exists():
            raise UserError(f"{file}: there is no such file; expected the directory of a run, or a journal")
    follower = Follower(path, live=False)
    follower.start()
    follower.wait(_READ_S)
    if follower.trouble:
        print(f"polyrl: {plain(follower.trouble)}; the trace ends there", file=sys.stderr)
    if args.out == "-":
        write_trace(follower.everything(), sys.stdout)
        return 0
    target = Path(args.out) if args.out else (path if path.is_dir() else path.parent) / "trace.json"
    try:
        with target.open("w", encoding="utf-8") as file:
            num = write_trace(follower.everything(), file)
    except OSError as error:
        raise UserError(f"--out: {target}: cannot be written: {error.strerror}") from error
    print(f"{num:,} events written to {target}; open it at ui.perfetto.dev or in chrome://tracing")
    return 0
