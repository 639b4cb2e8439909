"""`polyrl dash`: a run in the browser."""

import argparse
import asyncio
import contextlib
import webbrowser
from pathlib import Path

from polyrl.errors import UserError
from polyrl.journal.files import find_journals

EXAMPLE = """\
examples:
  polyrl dash                             of the run in runs/ that was written to last
  polyrl dash runs/first                  of a live run: the page on its manager's port
  polyrl dash runs/first runs/second      both, and their curves in one picture
  polyrl simulate spot-trace --out out/spot && polyrl dash out/spot

RUN is the directory of a run, live, ended or killed, or of a simulation, or a journal. The printed link has a token
that may look and change nothing. Ctrl+C ends it; a run does not notice."""

_MAX_RUNS = 16
_RUNS = Path("runs")
"""Where runs are that were given no other place."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="*", help="the directory of a run, or a journal")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="the port to listen on; 0: any that is free")
    parser.add_argument("--no-browser", action="store_true", help="print the link, and open no browser")
    parser.add_argument("--tokenizer", metavar="DIR", help="a model's directory, where a run has no recipe")
    parser.add_argument("--socket", metavar="FILE", help=argparse.SUPPRESS)  # for the manager, which starts it


def run(args: argparse.Namespace) -> int:
    paths = [Path(one) for one in args.runs] or [newest_run(_RUNS)]
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: there is no such file or directory; expected that of a run")
    if len(paths) > _MAX_RUNS:
        raise UserError(f"RUN: got {len(paths)}, expected at most {_MAX_RUNS}")
    if not 0 <= args.port < 1 << 16:
        raise UserError(f"--port: got {args.port}, expected one from 0 to 65535")

    from polyrl.dashboard import life
    from polyrl.run.event_loop import run_loop

    def show(link: str) -> None:
        print(link, flush=True)
        if not args.no_browser:
            webbrowser.open(link)

    if args.socket is not None:
        serving = life.serve_manager(paths[0], Path(args.socket))
    elif len(paths) == 1 and (link := life.live_link(paths[0])) is not None:
        show(link)
        return 0
    else:
        serving = life.serve(paths, show, host=args.host, port=args.port, tokenizer=args.tokenizer)
    with contextlib.suppress(asyncio.CancelledError):
        run_loop(serving)
    return 0


def newest_run(folder: Path) -> Path:
    """Return the run in a folder that was written to last. Raises UserError if there is none."""
    written = {
        run: max(file.stat().st_mtime for file in files)
        for run in sorted(folder.glob("*/"))
        if (files := [file for file in find_journals(run) if file.is_file()])
    }
    if not written:
        raise UserError(f"RUN: missing, and {folder} has no run here; expected the directory of a run, or a journal")
    return max(written, key=lambda run: written[run])
