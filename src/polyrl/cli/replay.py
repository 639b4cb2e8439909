"""`polyrl replay`: run a journal again and compare every command."""

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyrl.journal.records import Difference

EXIT_OK = 0
EXIT_DIFFERENCE = 1

EXAMPLE = """\
example:
  polyrl simulate spot-trace --out out/spot
  polyrl replay out/spot

Exit code 0: the same commands. 1: a difference, the first one is named. 2: the journal cannot be read."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("journal", metavar="FILE_OR_DIR", help="a journal, or the directory of a run")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a line")


def run(args: argparse.Namespace) -> int:
    from polyrl.journal.files import open_journals
    from polyrl.journal.records import replay

    journals = [*open_journals(args.journal)]
    report = replay(journals)
    difference = report.first_difference
    if args.json:
        print(
            json.dumps(
                {
                    "journal": args.journal,
                    "about": journals[0][0].about,
                    "records": report.num_records,
                    "digest": report.digest,
                    "same": difference is None,
                    "difference": None if difference is None else _as_json(difference),
                }
            )
        )
    elif difference is None:
        print(f"{args.journal}: {report.num_records} records, digest {report.digest}, same commands")
    if difference is None:
        return EXIT_OK
    print(f"polyrl: difference: {args.journal}: {_in_a_line(difference)}", file=sys.stderr)
    return EXIT_DIFFERENCE


def _in_a_line(difference: "Difference") -> str:
    commands = ", ".join(type(command).__name__ for command in difference.commands)
    return (
        f"record {difference.record} at {difference.now:.3f} s, {type(difference.event).__name__}: "
        f"the journal has commands of digest {difference.expected}, now it is {difference.got} [{commands}]"
    )


def _as_json(difference: "Difference") -> dict[str, Any]:
    import msgspec

    return msgspec.to_builtins(difference)
