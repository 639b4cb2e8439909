"""`polyrl story`: say why a sample took as long as it did."""

import argparse

from polyrl.errors import UserError, plain_lines

EXAMPLE = """\
example:
  polyrl simulate spot-trace --out out/spot
  polyrl story out/spot 12/3"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("journal", metavar="FILE_OR_DIR", help="a journal, or the directory of a run")
    parser.add_argument("sample", metavar="SAMPLE", help="GROUP/INDEX: 12/3 is the fourth sample of group 12")


def run(args: argparse.Namespace) -> int:
    from polyrl.ids import parse_sample
    from polyrl.journal.files import open_journals
    from polyrl.journal.story import UnknownSample, tell_story

    try:
        sample = parse_sample(args.sample)
    except ValueError as error:
        raise UserError(f"SAMPLE: {error}") from error
    try:
        lines = tell_story(open_journals(args.journal), sample)
    except UnknownSample as error:
        raise UserError(f"{args.journal}: {error}") from error
    print(plain_lines("\n".join(lines)))  # a journal may be a stranger's
    return 0
