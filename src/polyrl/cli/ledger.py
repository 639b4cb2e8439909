"""`polyrl ledger`: what became of every prompt, sample, token, second and dollar of a run, from its journal alone.

Exit code 1 means a bug of ours: an invariant does not hold, or this version decides differently from the one that wrote
the journal.
"""

import argparse
import json
import sys

from polyrl.errors import plain, plain_lines

EXIT_OK = 0
EXIT_WRONG = 1

EXAMPLE = """\
examples:
  polyrl ledger run
  polyrl ledger run --verify
  polyrl ledger out/spot --json

RUN is the directory of a run, live, ended or killed, or a journal. --verify runs the journal through the scheduler
again, checks every conservation law on the way, and holds seconds and dollars against wall clock times price.
Exit code 0: all is well. 1: a law is broken, and which; or this version decides otherwise than the journal, and where.
2: there is no run, or its journal is damaged."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the directory of a run, or a journal")
    parser.add_argument("--verify", action="store_true", help="check every law along the way, and every sum at the end")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    from polyrl.telemetry.account import read_account
    from polyrl.telemetry.ledger_report import as_json, as_text
    from polyrl.telemetry.reconcile import broken_sums

    account = read_account(args.run, verify=args.verify)
    broken = list(account.broken_laws)
    if args.verify and not broken and not account.difference:
        broken += broken_sums(account)
    is_right = not broken and not account.difference
    if args.json:
        print(json.dumps(as_json(account, args.run, broken if args.verify else None)))
    else:
        print(plain_lines(as_text(account, args.run, verified=args.verify and is_right)))  # it may be a stranger's
    if account.difference:
        print(f"polyrl: difference: {plain(account.difference)}; what follows is not told", file=sys.stderr)
    for law in broken:
        print(f"polyrl: broken law: {plain(law)}", file=sys.stderr)
    return EXIT_OK if is_right else EXIT_WRONG
