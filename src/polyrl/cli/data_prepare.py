"""`polyrl data prepare openr1|gsm8k|FILE`: a public data set, or any file that the loaders read, as JSON lines."""

import argparse
from pathlib import Path

from polyrl.errors import UserError


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", metavar="PATH", help="prepare: the downloaded file or directory of openr1 or gsm8k")


def run(args: argparse.Namespace) -> int:
    from polyrl.data.prepare import ANY_FILE, LAYOUTS, prepare

    if args.what in LAYOUTS:
        if args.source is None:
            raise UserError(f"--source: missing, expected where {args.what} was downloaded to; nothing is fetched here")
        done = prepare(args.what, Path(args.source), Path(args.out))
    elif args.source is not None:
        raise UserError(f"data prepare: got {args.what!r} and --source, expected openr1 or gsm8k with it, or a file")
    else:
        done = prepare(ANY_FILE, Path(args.what), Path(args.out))
    left_out = f", {done.num_left_out} left out: no prompt or no answer" if done.num_left_out else ""
    print(f"{args.out}: {done.num_rows} rows{left_out}")
    return 0
